"""The settings of the engines, and the arguments and environment of each host. Pure.

An argument that the node relies on is RESERVED. Every other argument of SGLang's can be given through
`extra`, and is compared with SGLang's own types by `embedded/arguments.py`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attrs import asdict, field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import EngineError
from polarnode.engine.drafts import algorithm_of, draft_refusal
from polarnode.engine.protocol import EXPERT_COUNTS, ExpertShape, FamilyMarks, Simulation

# Requests decoded together. Torch's own attention loops over them, so more requests only make each slower.
CPU_MAX_RUNNING = 16
# Bytes of KV cache, which leaves room for the model, its host and harnesses on an 8 GB machine.
CPU_CACHE_BYTES = 2 << 30
CPU_MAX_TOKENS = 131_072  # four prompts of 30 000 tokens at once; the tiny model needs 2 KB a token
CPU_MIN_TOKENS = 8_192  # below this no harness's first prompt fits
# SGLang checks this share against the whole machine's free memory, which others use too. The real cap is
# CPU_CACHE_BYTES.
CPU_MEMORY_SHARE = 0.8
# Tokens a chunk: the tiny model makes 1 500 a second, and each chunk costs the node's loop some 50 us.
CPU_STREAM_INTERVAL = 4
# Tokens a chunk: 256 requests at 50 tokens/s on 8 GPUs are 6 400 chunks a second, half of what one loop can
# do.
GPU_STREAM_INTERVAL = 16

# Arguments of SGLang that the node relies on, and what to use instead or why they cannot be set.
_ONE_HOST = "an engine host is one process on one machine, with the GPUs that --gpus and --tp give it"
_ADAPTERS = "use lora_rank, lora_modules, lora_slots and --adapter"
_CACHE = "use host_cache_gb"
RESERVED: Mapping[str, str] = {
    "model_path": "use --model",
    "context_length": "use --context-length",
    "device": "use --cpu or --gpus",
    "tp_size": "use --tp",
    "mem_fraction_static": "use mem_fraction",
    **dict.fromkeys(("dp_size", "pp_size", "nnodes", "node_rank", "base_gpu_id", "gpu_id_step"), _ONE_HOST),
    "disaggregation_mode": "an engine both reads prompts and samples",
    "skip_tokenizer_init": "the node sends and reads token ids",
    "incremental_streaming_output": "the node reads the tokens of each chunk alone",
    "weight_version": "the node names the weights it serves",
    "nccl_port": "the node chooses a free port for each engine host",
    "preferred_sampling_params": "tasks and harnesses set how they sample",
    "enable_return_routed_experts": "use --routed-experts",
    **dict.fromkeys(("enable_memory_saver", "enable_weights_cpu_backup"), "use memory_saver"),
    **dict.fromkeys(("enable_lora", "lora_paths", "max_lora_rank", "lora_target_modules"), _ADAPTERS),
    **dict.fromkeys(("max_loras_per_batch", "max_loaded_loras"), _ADAPTERS),
    "enable_session_radix_cache": "use session_cache",
    **dict.fromkeys(("enable_hierarchical_cache", "hicache_size", "hicache_ratio"), _CACHE),
    "hicache_write_policy": _CACHE,
}

# The linear layers of a transformer, as PEFT names them. Every family that is served has these.
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERT_MODULES = frozenset(("gate_proj", "up_proj", "down_proj"))  # in the experts, if the model is a mixture


@frozen(kw_only=True)
class SimulatedEngine:
    """Settings of a simulated engine: what its hosts must know of the model, because they load none."""

    simulation: Simulation
    marks: FamilyMarks
    vocab_size: int


@frozen(kw_only=True)
class ExternalEngine:
    """Servers that somebody else runs, with one host for each address. `words` are ids of the node's
    tokenizer and their texts, with which a server must agree. `experts` is the shape of routed experts, if
    the node asks for them.
    """

    urls: tuple[str, ...]
    vocab_size: int
    context_length: int  # tokens, as long as no server has answered
    words: tuple[tuple[int, str], ...] = ()
    experts: ExpertShape | None = None


@frozen(kw_only=True)
class EngineSettings:
    """One model on one machine. `gpus` are numbers among those this process may see. `max_total_tokens`
    bounds the KV cache of one host.

    `state_dir` takes the logs (`engine-<i>.log`, and that of the run before in `.log.1`) and what was learned
    of sessions (`engine-<i>.sizes.json`). `extra` goes to `sglang.Engine` as it is. A `simulated` engine has
    a host for each of `gpus` (or for each `tp` of them) too, but needs none of them to be there.

    `routed_experts`: remember which experts of a mixture read each token, in main memory: layers * experts a
    token * 4 bytes for each token of the KV cache. `memory_saver`: GPU memory can be lent to others; the
    weights are then discarded (`discard`) or kept in main memory (`backup`).

    `lora_rank` is the largest rank of an adapter; with 0 no adapters are taken. `lora_modules` are the layers
    that adapters may change. `lora_slots` is how many adapters are sampled by at once, in memory of the GPU
    that is taken at the start.

    `session_cache`: prefixes of sessions that still call are evicted after all others, and `Forget` says
    which sessions call no more. `residency`: sessions begin only while the cache holds what they will become
    (`residency.py`). `host_cache_gb` is main memory for each GPU, 1e9 bytes each, which takes what its KV
    cache evicts; 0 means none.
    """

    model_path: Path
    device: Literal["cpu", "cuda"]
    state_dir: Path
    gpus: tuple[int, ...] = ()
    tp: int = 1
    context_length: int | None = None
    dtype: str = "auto"
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    weight_version: str = "0"
    simulated: SimulatedEngine | None = None
    external: ExternalEngine | None = None
    routed_experts: bool = False
    memory_saver: Literal["off", "discard", "backup"] = "off"
    lora_rank: int = 0
    lora_modules: tuple[str, ...] = LORA_MODULES
    lora_slots: int = 8
    session_cache: bool = False
    residency: bool = True
    host_cache_gb: int = 0
    # The environment variable that holds the key of external servers.
    key_env: str | None = "POLARNODE_ENGINE_KEY"
    extra: Mapping[str, Json] = field(factory=dict)

    @property
    def has_residency(self) -> bool:
        """Whether sessions wait for the cache. They do not for a cache without bounds, nor for a server that
        others use too.
        """
        bounded = self.simulated is None or self.simulated.simulation.kv_tokens > 0
        return self.residency and bounded and self.external is None

    def log_path(self, index: int) -> Path:
        return self.state_dir / f"engine-{index}.log"

    def sizes_path(self, index: int) -> Path:
        """Where a host keeps what it learned of its sessions."""
        return self.state_dir / f"engine-{index}.sizes.json"


def check(settings: EngineSettings) -> None:
    """Raise EngineError naming a setting that cannot work, before anything is started."""
    if not (settings.model_path / "config.json").is_file():
        raise _settings_error(
            f"--model {settings.model_path}: there is no config.json; name a folder with a Hugging Face"
            " checkpoint"
        )
    for name in settings.extra:
        if name in RESERVED:
            raise _settings_error(f"--engine-arg {name} is the node's own: {RESERVED[name]}")
    cpu = settings.device == "cpu" and settings.simulated is None and settings.external is None
    drafts = draft_refusal(settings.extra, cpu=cpu, routes=settings.routed_experts, environment=os.environ)
    if drafts is not None:
        raise _settings_error(drafts)
    if settings.routed_experts and (reason := unrouted(settings)):
        raise _settings_error(f"--routed-experts: {reason}")
    if settings.memory_saver != "off" and (settings.device == "cpu" or settings.simulated is not None):
        raise _settings_error("memory_saver lends the memory of GPUs, and this engine has none: leave it out")
    if settings.lora_rank and (reason := adapter_refusal(settings)):
        raise _settings_error(reason)
    if settings.session_cache and (reason := session_cache_refusal(settings)):
        raise _settings_error(f"session_cache {reason}")
    if settings.host_cache_gb and (settings.device == "cpu" or settings.simulated or settings.external):
        raise _settings_error(
            "host_cache_gb takes what the KV cache of a GPU evicts, and this engine has none: leave it out"
        )
    if settings.simulated is not None or settings.external is not None:
        return
    if settings.device == "cpu" and (settings.gpus or settings.tp != 1):
        raise _settings_error("--cpu takes neither --gpus nor --tp: leave them out")
    if settings.device == "cuda" and (
        not settings.gpus or settings.tp < 1 or len(settings.gpus) % settings.tp
    ):
        raise _settings_error(
            f"--gpus names {len(settings.gpus)} GPUs and --tp {settings.tp} takes that many for each engine:"
            " change one of them"
        )
    if fault := _checkpoint_misfit(settings):
        raise _settings_error(fault)


def _checkpoint_misfit(settings: EngineSettings) -> str | None:
    """Why the checkpoint cannot be served with these settings by an engine of the node's own. None where it
    can, as far as its config.json says.
    """
    most, heads = checkpoint_context(settings.model_path), _whole(_text_config(settings.model_path), HEADS, 0)
    length, name = settings.context_length, settings.model_path.name
    if length is not None and most is not None and length > most and LONGER not in os.environ:
        return (
            f"--context-length {length}: the model {name} was made for {most}; leave it out, or set"
            f" {LONGER}=1 if its positions reach further"
        )
    if heads % settings.tp and "enable_dp_attention" not in settings.extra:
        return (
            f"--tp {settings.tp} does not divide the {heads} attention heads of the model {name}: change --tp"
        )
    return None


def experts_of(settings: EngineSettings) -> ExpertShape:
    """The shape of the routed experts of a mixture, from its checkpoint. There is a row for every layer, also
    for layers without experts.
    """
    merged = _text_config(settings.model_path)
    return ExpertShape(
        layers=_whole(merged, "num_hidden_layers", 0),
        top_k=_whole(merged, "num_experts_per_tok", 0),
        number=next(found for name in EXPERT_COUNTS if (found := _whole(merged, name, 0))),
    )


def _text_config(model: Path) -> dict[str, Json]:
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def unrouted(settings: EngineSettings) -> str | None:
    """Why an engine of these settings cannot report routed experts. None when it can."""
    if settings.simulated is not None:
        return (
            "the simulated engine's answers are random, and no experts read them; leave it out, or start a"
            " real engine"
        )
    merged = _text_config(settings.model_path)
    if any(_whole(merged, name, 0) for name in EXPERT_COUNTS):
        return None
    return f"the model {settings.model_path.name} is dense: it has no experts; leave it out"


def adapter_refusal(settings: EngineSettings) -> str | None:
    """Why an engine of these settings cannot take adapters. None when it can."""
    merged, modules, model = (
        _text_config(settings.model_path),
        set(settings.lora_modules),
        settings.model_path,
    )
    other = sorted(modules - set(LORA_MODULES))
    reasons = (
        (settings.external, "lora_rank is for the node's own engine: leave it out with --engine URL"),
        (other, f"lora_modules may not hold {', '.join(other)}: give some of {', '.join(LORA_MODULES)}"),
        (
            settings.memory_saver == "discard",
            'memory_saver = "discard" loses the base weights: use "backup" with lora_rank',
        ),
        # SGLang's layers with adapters hide the scales from an update.
        (
            "quantization_config" in merged,
            f"lora_rank: the model {model.name} is quantised: start from its full weights",
        ),
        (
            EXPERT_MODULES & modules and any(_whole(merged, name, 0) for name in EXPERT_COUNTS),
            (
                f"lora_modules: the model {model.name} is a mixture, and adapters of its experts are not"
                ' served: give lora_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]'
            ),
        ),
    )
    return next((sentence for holds, sentence in reasons if holds), None)


# SGLang 0.5.23 refuses session-aware eviction with these arguments, or keeps no prefixes.
_OTHER_CACHES = ("disable_radix_cache", "radix_cache_backend", "enable_flexkv")
SESSIONLESS_ARGUMENTS = (*_OTHER_CACHES, "enable_kv_cache_sharding", "enable_encoder_swa_bounded_replay")


def session_cache_refusal(settings: EngineSettings) -> str | None:
    """Why an engine of these settings cannot evict by sessions. None when it can."""
    if settings.external is not None:
        return "is for the node's own engine, and others get no session ids: leave it out with --engine URL"
    if name := next((name for name in SESSIONLESS_ARGUMENTS if settings.extra.get(name)), None):
        return f"does not go with --engine-arg {name}: leave one of them out"
    merged = _text_config(settings.model_path)
    layers = merged.get("layer_types") or merged.get("hybrid_layer_pattern")
    # SGLang gives a model that attends only to a window another cache, which knows no sessions.
    if isinstance(layers, list) and layers and all(each in ("sliding_attention", 1) for each in layers):
        name = settings.model_path.name
        return f"is not for the model {name}, all of whose layers attend to a window alone: leave it out"
    return None


# Where SGLang looks for the context length of a checkpoint, in its order.
CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
HEADS = "num_attention_heads"
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # SGLang's own variable: no limit by the checkpoint


def checkpoint_context(model: Path) -> int | None:
    """The number of tokens that a checkpoint was made for, as SGLang reads it. None where its config does not
    say it.
    """
    merged = _text_config(model)
    length = next((found for key in CONTEXT_KEYS if (found := _whole(merged, key, 0))), None)
    scaling = merged.get("rope_scaling")
    if length is None or not isinstance(scaling, dict) or scaling.get("rope_type") == "llama3":
        return length
    factor = scaling.get("factor", 1)
    if "original_max_position_embeddings" in scaling or not isinstance(factor, int | float):
        return length
    return int(factor * length)


def gpu_groups(settings: EngineSettings) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each host in order. There is one empty group on a CPU, and one for each external server."""
    if settings.external is not None:
        return ((),) * len(settings.external.urls)
    if not settings.gpus:
        return ((),)
    return tuple(
        settings.gpus[first : first + settings.tp] for first in range(0, len(settings.gpus), settings.tp)
    )


def engine_arguments(settings: EngineSettings, *, nccl_port: int, index: int = 0) -> dict[str, Json]:
    """The keyword arguments of `sglang.Engine` for one host; for a simulated or an external host, what its
    program reads. `index` is the host's.
    """
    if settings.external is not None:
        return _external_arguments(settings, settings.external, index)
    if settings.simulated is not None:
        return _simulated_arguments(settings, settings.simulated)
    wanted: dict[str, Json] = {
        "model_path": str(settings.model_path.resolve()),
        "device": settings.device,
        "tp_size": settings.tp,
        "dtype": settings.dtype,
        "weight_version": settings.weight_version,
        "nccl_port": nccl_port,  # chosen here, because hosts that start together would race for one
        "skip_tokenizer_init": True,  # token ids in, token ids out
        # SGLang sends copied deltas; without this argument every chunk is the engine's own live list.
        "incremental_streaming_output": True,
        "log_level": "warning",  # one line a batch would fill the disk in weeks
    }
    wanted.update(
        _cpu_arguments(settings) if settings.device == "cpu" else {"stream_interval": GPU_STREAM_INTERVAL}
    )
    configured: dict[str, Json] = {
        "context_length": settings.context_length,
        "mem_fraction_static": settings.mem_fraction,
        "max_total_tokens": settings.max_total_tokens,
        "max_running_requests": settings.max_running_requests,
    }
    wanted.update({name: value for name, value in configured.items() if value is not None})
    wanted.update(_routed_arguments(settings))
    if settings.lora_rank:
        wanted.update(
            {
                "enable_lora": True,
                "max_lora_rank": settings.lora_rank,
                "lora_target_modules": list(settings.lora_modules),
                "max_loras_per_batch": settings.lora_slots + 1,  # for SGLang the base takes a slot too
                **({"lora_backend": "torch_native"} if settings.device == "cpu" else {}),
            }
        )
    if settings.session_cache:
        wanted["enable_session_radix_cache"] = True
    if settings.host_cache_gb:
        wanted.update(
            {
                "enable_hierarchical_cache": True,
                "hicache_size": settings.host_cache_gb,
                # SGLang's own default copies each prefix at once, so that both levels hold the same. Then the
                # larger level counts, and not their sum.
                "hicache_write_policy": "write_back",
            }
        )
    if settings.memory_saver != "off":
        wanted.update(
            {"enable_memory_saver": True, "enable_weights_cpu_backup": settings.memory_saver == "backup"}
        )
    return {**wanted, **settings.extra}


def _simulated_arguments(settings: EngineSettings, simulated: SimulatedEngine) -> dict[str, Json]:
    config = json.loads((settings.model_path / "config.json").read_text())
    return {
        "model_path": str(settings.model_path.resolve()),
        "context_length": settings.context_length or _whole(config, "max_position_embeddings", 32_768),
        "vocab_size": simulated.vocab_size,
        "weight_version": settings.weight_version,
        "simulation": asdict(simulated.simulation),
        "marks": asdict(simulated.marks),
        "session_cache": settings.session_cache,
        "drafts": algorithm_of(settings.extra),
    }


def _external_arguments(settings: EngineSettings, external: ExternalEngine, index: int) -> dict[str, Json]:
    return {
        "url": external.urls[index],
        "vocab_size": external.vocab_size,
        "words": [[token, text] for token, text in external.words],
        "context_length": settings.context_length,
        "experts": None if external.experts is None else list(external.experts),
    }


def _routed_arguments(settings: EngineSettings) -> dict[str, Json]:
    """The arguments that report routed experts, with the largest chunk of a prompt. SGLang sizes its per-pass
    buffers by that chunk, and -1 gives no size. This value still takes a prompt in one pass.
    """
    if not settings.routed_experts:
        return {}
    chunk: dict[str, Json] = {"chunked_prefill_size": CPU_MAX_TOKENS} if settings.device == "cpu" else {}
    return {"enable_return_routed_experts": True, **chunk}


def _cpu_arguments(settings: EngineSettings) -> dict[str, Json]:
    return {
        # The logprobs agree with a float32 trainer, and there is no AMX here to make bf16 pay.
        "dtype": "float32" if settings.dtype == "auto" else settings.dtype,
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        # An idle scheduler spins otherwise, and takes one of two cores from the harnesses.
        "sleep_on_idle": True,
        "mem_fraction_static": CPU_MEMORY_SHARE,
        "max_total_tokens": cpu_tokens(json.loads((settings.model_path / "config.json").read_text())),
        "max_running_requests": CPU_MAX_RUNNING,
        "stream_interval": CPU_STREAM_INTERVAL,
        # A prompt is read in one pass: torch's causal kernel needs no mask then, and is twice as fast as in
        # chunks.
        "chunked_prefill_size": -1,
        "max_prefill_tokens": CPU_MAX_TOKENS,
    }


def cpu_tokens(config: Mapping[str, Json]) -> int:
    """The number of KV-cache tokens that fit in CPU_CACHE_BYTES for this model at float32, within reasonable
    bounds.
    """
    return max(CPU_MIN_TOKENS, min(CPU_MAX_TOKENS, CPU_CACHE_BYTES // token_bytes(config, size=4)))


def token_bytes(config: Mapping[str, Json], *, size: int) -> int:
    """The bytes that a token takes in the KV cache of a model, in all layers, with numbers of `size`
    bytes.
    """
    layers, heads = _whole(config, "num_hidden_layers", 32), _whole(config, "num_attention_heads", 32)
    if latent := _whole(config, "kv_lora_rank", 0):  # multi-head latent attention keeps one row for all heads
        return size * layers * (latent + _whole(config, "qk_rope_head_dim", 0))
    kv_heads = _whole(config, "num_key_value_heads", heads)
    head_size = _whole(config, "head_dim", _whole(config, "hidden_size", 4096) // heads)
    return 2 * size * layers * kv_heads * head_size


def _whole(config: Mapping[str, Json], name: str, default: int) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else default


def host_environment(
    settings: EngineSettings, *, gpus: tuple[int, ...], scratch: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of one host: ours, with its own temporary folder, and only its own GPUs."""
    environment = {
        **base,
        "TMPDIR": str(scratch),
        "CUDA_VISIBLE_DEVICES": "" if settings.simulated is not None else _visible_gpus(gpus, base),
    }
    if settings.external is not None:  # each server is sent only its own key
        environment["POLARNODE_ENGINE_KEY"] = base.get(settings.key_env or "", "")
    # Compiled kernels are worth keeping from run to run. Their default place is the temporary folder, which
    # ends with the host.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.state_dir.resolve() / "compiled"))
    environment["PYTHONUNBUFFERED"] = "1"  # the log's last line matters most when the process is killed
    if settings.device == "cpu":
        environment["SGLANG_PLATFORM"] = "polarnode_cpu"
        # Threads that spin at a barrier starve the harnesses on the same cores: on a busy machine this
        # setting made decoding twice as fast.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        environment.pop("SGLANG_PLATFORM", None)
    return environment


def _visible_gpus(gpus: tuple[int, ...], base: Mapping[str, str]) -> str:
    """GPU numbers count among those this process was given, as CUDA itself counts."""
    visible = [each for each in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if not visible:
        return ",".join(map(str, gpus))
    if gpus and max(gpus) >= len(visible):
        raise _settings_error(
            f"--gpus {max(gpus)}: CUDA_VISIBLE_DEVICES={','.join(visible)} shows this node"
            f" only {len(visible)}, counted from 0"
        )
    return ",".join(visible[each] for each in gpus)


def _settings_error(sentence: str) -> EngineError:
    return EngineError(sentence, retryable=False)
