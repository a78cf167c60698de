"""What a trainer asks for. Pure values with their defaults; `wire.py` reads them from JSON and TOML, and refuses with the field's path.

Every default number carries its reason; every budget is in seconds.
"""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from polarnode.conversation import Json, Sampling


@frozen(kw_only=True)
class McpServerSpec:
    """A server of tools the harness itself starts (`command`, in the container) or reaches (`url`, over streamable HTTP)."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    url: str | None = None
    headers: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class HarnessSpec:
    """Which agent program, and how it is set. `command` is for `shell`; `import_path` is `package.module:attribute`.

    `mcp_servers` by name; `skills` are texts of SKILL.md by the name of their folder. Both are for harnesses that know them.
    """

    name: str = "shell"
    import_path: str | None = None
    version: str | None = None
    model_name: str | None = None
    command: tuple[str, ...] | None = None
    settings: Mapping[str, Json] = field(factory=dict)
    env: Mapping[str, str] = field(factory=dict)
    mcp_servers: Mapping[str, McpServerSpec] = field(factory=dict)
    skills: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class FileSpec:
    """A file to place in the workspace before the harness starts: text, or `base64` for bytes. `path` relative to the workdir or absolute."""

    path: str
    text: str | None = None
    base64: str | None = None
    mode: int = 0o644


@frozen(kw_only=True)
class PrepareStep:
    """One command run in the runtime before the harness (or the evaluator), as argv; a non-zero exit ends the session in INIT."""

    argv: tuple[str, ...]
    user: str | None = None


@frozen(kw_only=True)
class RuntimeSpec:
    """The container. `image` is a folder name of `runtimes/` or any image Podman has. Network is none: the model plane's door is inside."""

    image: str = "agent"
    files: tuple[FileSpec, ...] = ()
    prepare: tuple[PrepareStep, ...] = ()
    eval_prepare: tuple[PrepareStep, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    workdir: str = "/work"
    user: str = "agent"
    cpus: float = 1.0  # one harness is one busy thread; more lets one session starve its siblings
    memory_mb: int = 2048  # Claude Code peaks near 1 GB; twice that before the kernel ends it
    pids: int = 512  # node harnesses run ~60 threads; a fork bomb stops here
    network: Literal["none"] = "none"


@frozen(kw_only=True)
class BuilderSpec:
    name: str = "prefix_merging"
    import_path: str | None = None
    config: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class EvaluatorSpec:
    """What scores the session. `fresh_runtime`: judge the workdir's files in a clean container the harness never touched."""

    name: str = "session_completed"
    import_path: str | None = None
    config: Mapping[str, Json] = field(factory=dict)
    fresh_runtime: bool = False


@frozen(kw_only=True)
class Budgets:
    """Seconds a phase may take, and counts a run may spend; None is no limit of this kind."""

    init_s: float = 300.0  # an image build is not in it; a cold container start under load is 1-3 s, prepare steps take the rest
    run_s: float = 1800.0
    post_s: float = 300.0
    max_turns: int | None = None
    max_tokens: int | None = None


@frozen(kw_only=True)
class CarrySpec:
    """What is carried with the tokens beside their ids, logprobs and weight versions. Both take memory, up to the node's `carried_mb` a session.

    `top_logprobs`: the likeliest tokens at each sampled one, 0 to 20; 8 bytes each. `routed_experts`: the experts of a mixture that read each
    position, for a trainer that replays the routing; layers * experts a token bytes a position.
    """

    top_logprobs: int = 0
    routed_experts: bool = False


@frozen(kw_only=True)
class TaskSpec:
    """One task: `num_samples` sessions of the same harness on the same instruction; together they are a group."""

    instruction: str
    harness: HarnessSpec
    task_id: str | None = None
    group_id: str | None = None
    num_samples: int = 1
    priority: int = 50
    runtime: RuntimeSpec = field(factory=RuntimeSpec)
    builder: BuilderSpec = field(factory=BuilderSpec)
    evaluator: EvaluatorSpec = field(factory=EvaluatorSpec)
    budgets: Budgets = field(factory=Budgets)
    sampling: Sampling = field(factory=Sampling)
    thinking: Literal["keep", "template"] = "keep"  # what a later prompt shows of sampled thoughts: all, or what the model's template would
    carry: CarrySpec = field(factory=CarrySpec)
    metadata: Mapping[str, Json] = field(factory=dict)
