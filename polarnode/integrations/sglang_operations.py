"""The control operations of an SGLang server that a node serves: their bodies, paths and OpenAPI operations,
and why the others are refused.

Names and defaults are SGLang's (0.5.23: `srt/managers/io_struct.py`); each difference is described beside
them.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import frozen

from polarnode.api.openapi_shapes import Operation, Refusal, RouteKey, UpdateResult
from polarnode.core.weights import Backend, MemoryTag, PauseMode
from polarnode.engine.weight_values import Layout

# ── bodies ────────────────────────────────────────────────────────────

# The values of SGLang's `load_format` that a node accepts. For None and auto the node finds the format
# itself.
FileFormat = Literal["auto", "safetensors"]
GROUP = "weight_update_group"  # SGLang's default name


@frozen(kw_only=True)
class DiskUpdate:
    """UpdateWeightFromDiskReqInput; fields of SGLang that are not here change nothing on a node."""

    model_path: str
    load_format: FileFormat | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False


@frozen(kw_only=True)
class GroupName:
    """DestroyWeightsUpdateGroupReqInput."""

    group_name: str = GROUP


@frozen(kw_only=True)
class DistributedUpdate(GroupName):
    """UpdateWeightsFromDistributedReqInput: one bucket that rank 0 of the group broadcasts."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    load_format: Layout | None = None
    weight_version: str | None = None


@frozen(kw_only=True)
class TensorUpdate:
    """UpdateWeightsFromTensorReqInput: one bucket of handles, one for each GPU."""

    serialized_named_tensors: tuple[str, ...]
    load_format: Layout | None = None
    weight_version: str | None = None


@frozen(kw_only=True)
class InitGroup(GroupName):
    """InitWeightsUpdateGroupReqInput. The port may be text (AReaL sends it so)."""

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    backend: Backend = "nccl"


@frozen(kw_only=True)
class PauseGeneration:
    """PauseGenerationReqInput. Without a mode SGLang aborts; a node retracts, which agents do not notice."""

    mode: PauseMode = "retract"


@frozen(kw_only=True)
class NewVersion:
    """UpdateWeightVersionReqInput."""

    new_version: str


@frozen(kw_only=True)
class MemoryTags:
    """ReleaseMemoryOccupationReqInput and ResumeMemoryOccupationReqInput."""

    tags: tuple[MemoryTag, ...] | None = None


@frozen(kw_only=True)
class LoraAdapter:
    """LoadLoRAAdapterReqInput and UnloadLoRAAdapterReqInput. AReaL names versions of NAME `NAME-v1` …"""

    lora_name: str
    lora_path: str = ""


@frozen(kw_only=True)
class Nothing:
    """A body whose fields change nothing on a node."""


# ── what is refused ────────────────────────────────────────────────────

_SAMPLING_REFUSAL: Final = (
    "a node samples for its sessions: submit a task (POST /v1/tasks) or open a capture (POST /v1/capture)"
)
_ONE_MODEL_REFUSAL: Final = "a node serves whole models from disk, handles or a broadcast: docs/weights.md"
_CHECKS_REFUSAL: Final = "a node checks names, shapes and completeness of each update itself: leave this out"
REFUSED: Final[Mapping[str, str]] = {
    "/generate": _SAMPLING_REFUSAL,
    "/abort_request": (
        "a node ends a session's calls with its session: DELETE /v1/tasks/{task_id}; to hold all generation,"
        " POST /pause_generation"
    ),
    "/load_lora_adapter_from_tensors": "send a file: POST /load_lora_adapter, or client.tensors.push_adapter",
    "/update_weights_from_ipc": _ONE_MODEL_REFUSAL,
    "/pull_weights": _ONE_MODEL_REFUSAL,
    "/post_process_weights": "a node serves no weights that are quantised after loading: send bfloat16",
    "/weights_checker": _CHECKS_REFUSAL,
    "/get_weights_by_name": _CHECKS_REFUSAL,
}


# ── the table ────────────────────────────────────────────────────────────


_OBJECT: Final = dict[str, Any]
# Each row has the methods that SGLang takes, the path, the handler, its summary, and the body.
OPERATION_TABLE: Final[tuple[tuple[str, str, str, str, Any], ...]] = (
    ("POST", "/pause_generation", "pause", "Hold generation.", PauseGeneration),
    ("POST", "/continue_generation", "resume", "Serve what was sent; generation continues.", _OBJECT),
    ("GET POST", "/flush_cache", "flush", "Nothing: a cache is of one version.", None),
    ("POST", "/update_weights_from_disk", "from_disk", "Serve a checkpoint.", DiskUpdate),
    ("POST", "/update_weights_from_distributed", "from_group", "A bucket over a group.", DistributedUpdate),
    ("POST", "/update_weights_from_tensor", "from_tensor", "A bucket of handles.", TensorUpdate),
    ("POST", "/begin_weight_update", "begin", "The next buckets are one update.", _OBJECT),
    ("POST", "/end_weight_update", "end", "Serve them.", _OBJECT),
    ("POST", "/update_weight_version", "name", "Confirm the version of the weights.", NewVersion),
    ("POST", "/init_weights_update_group", "init_group", "Join a process group.", InitGroup),
    ("POST", "/destroy_weights_update_group", "destroy_group", "Leave it.", GroupName),
    ("POST", "/release_memory_occupation", "release", "Lend GPU memory.", MemoryTags),
    ("POST", "/resume_memory_occupation", "take", "Take it back.", MemoryTags),
    ("POST", "/load_lora_adapter", "load_adapter", "Serve an adapter.", LoraAdapter),
    ("POST", "/unload_lora_adapter", "unload_adapter", "Delete it.", LoraAdapter),
    *(("GET", path, "version", "The version.", None) for path in ("/get_weight_version", "/weight_version")),
    *(("GET", path, "model_info", "The model.", None) for path in ("/get_model_info", "/model_info")),
    *(("GET", path, "server_info", "The engines.", None) for path in ("/get_server_info", "/server_info")),
    ("GET", "/health_generate", "healthy", "Whether it serves.", None),
    *(("POST", path, "", "Not on a node: the answer is why.", _OBJECT) for path in REFUSED),
)
OPERATIONS: Final[Mapping[RouteKey, Operation]] = {
    (method, path): Operation(
        summary=summary,
        tag="sglang",
        body=body,
        optional_body=body is not None,
        open_body=True,
        answer=_OBJECT,
        errors=(409, 413) if method == "POST" else (503,),
        # Refusal: the node's own, before a handler runs (no token, another origin)
        refusal=UpdateResult | Refusal,
    )
    for methods, path, _, summary, body in OPERATION_TABLE
    for method in methods.split()
}
