"""What a trainer requests: tasks, captures and their parts, as values with defaults.

`core.codec` reads them from JSON and TOML and refuses wrong values with the field's path. Times are in
seconds. A comment beside each default number gives its reason.
"""

from collections.abc import Mapping
from typing import Final, Literal

from attrs import field, frozen

from polarnode.core.conversation import Json, Sampling

CAPTURE_HARNESS: Final = (
    "capture"  # the harness name in a capture's records; no harness of a task can have it
)


@frozen(kw_only=True)
class McpServerSpec:
    """An MCP server that the harness starts in the container (`command`) or reaches over streamable HTTP
    (`url`).
    """

    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    url: str | None = None
    headers: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class HarnessSpec:
    """The agent program and its settings. `command` is for `shell`; `import_path` is
    `package.module:attribute`.

    In JSON and TOML a text stands for the name alone: `"pi"` for `{"name": "pi"}`. `mcp_servers` by name;
    `skills` are texts of SKILL.md by the name of their folder. Both are only for
    harnesses that support them.
    """

    name: str = field(default="shell", metadata={"shorthand": str})
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
    """A file to place in the workspace before the harness starts: text, or `base64` for bytes. `path`
    relative to the workdir or absolute.
    """

    path: str
    text: str | None = None
    base64: str | None = None
    mode: int = 0o644


@frozen(kw_only=True)
class PrepareStep:
    """One command run in the runtime before the harness (or the evaluator), as argv; a non-zero exit ends the
    session in INIT.
    """

    argv: tuple[str, ...]
    user: str | None = None


@frozen(kw_only=True)
class VolumeSpec:
    """A folder of the node's machine, mounted in the container at `target`. Only where the node's `volumes`
    setting allows it.
    """

    source: str
    target: str
    write: bool = False


@frozen(kw_only=True)
class RuntimeSpec:
    """The container that a session runs in. `image` is a folder name of `runtimes/` or any image that Podman
    has. There is no network: the model endpoint is inside the container.

    * `add_harness`: build the harness once on top of `image` (any Debian or Ubuntu), for an image that
      belongs to the task.
    * `egress`: names of hosts that the container may reach through the node's proxy, `*.example.org` for all
      below one; only where the node's own `egress` allows them.
    * `ptrace`: a program may ask to be traced (PTRACE_TRACEME), as gdb has its programs do.
    * `writable`: what stays writable while the harness runs, besides the workdir, the home, /tmp and
      /var/tmp; the rest of the root is read-only.
    * `artifacts`: files and folders of the session to keep, relative to the workdir or absolute.
    * `keep_workspace`: keep the workdir as the harness left it, so that an evaluator that works in it can
      score the session again.
    """

    image: str = "agent"
    add_harness: bool = False
    files: tuple[FileSpec, ...] = ()
    prepare: tuple[PrepareStep, ...] = ()
    eval_prepare: tuple[PrepareStep, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    workdir: str = "/work"
    user: str = "agent"
    cpus: float = 1.0  # one harness is one busy thread; more lets one session starve its siblings
    memory_mb: int = 2048  # Claude Code peaks near 1 GB; twice that before the kernel ends it
    pids: int = 512  # node harnesses run ~60 threads; a fork bomb stops here
    # This is what a session may write: a repository with its build fits, and 64 sessions fit on 512 GB.
    disk_mb: int = 8192
    network: Literal["none"] = "none"
    egress: tuple[str, ...] = ()
    read_only: bool = True
    ptrace: bool = False  # the node loses the exit code of a program that asks to be traced by its parent
    writable: tuple[str, ...] = ()
    volumes: tuple[VolumeSpec, ...] = ()
    artifacts: tuple[str, ...] = ()
    keep_workspace: bool = False
    # Files and prepare steps are done once, and the container that they leave is copied. False does them in
    # each session.
    reuse_prepared: bool = True


@frozen(kw_only=True)
class BuilderSpec:
    name: str = "prefix_merging"
    import_path: str | None = None
    config: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class EvaluatorPart:
    """One of several evaluators. The session's reward is the sum of their rewards, each multiplied by its
    weight.
    """

    name: str = "session_completed"
    import_path: str | None = None
    config: Mapping[str, Json] = field(factory=dict)
    weight: float = 1.0


@frozen(kw_only=True)
class EvaluatorSpec:
    """How the session is scored. `fresh_runtime`: evaluate the workdir's files in a clean container that the
    harness never touched.

    With `parts` there is neither name nor config: the parts evaluate one after another, in the same runtime.
    """

    name: str = "session_completed"
    import_path: str | None = None
    config: Mapping[str, Json] = field(factory=dict)
    fresh_runtime: bool = False
    parts: tuple[EvaluatorPart, ...] = ()


@frozen(kw_only=True)
class Budgets:
    """Seconds that a phase may take, and counts that a run may use; None means no limit.

    `max_repeats`: how many equal turns in a row (`core/repeats.py`) end a run that loops.
    `retries`: how many fresh sessions may replace one that ended through a fault of the machine (its
    container, its engine, its node), never of the agent.
    """

    # The image build does not count. A cold container start under load takes 1-3 s, prepare steps the rest.
    init_s: float = 300.0
    run_s: float = 1800.0
    post_s: float = 300.0
    max_turns: int | None = None
    max_tokens: int | None = None
    max_repeats: int | None = None
    # A machine that loses the same session three times has a fault that a fourth attempt would meet too.
    retries: int = 2


@frozen(kw_only=True)
class CarrySpec:
    """Token extras to record beside ids, logprobs and weight versions. They take memory, up to the node's
    `carried_mb` for each session.

    * `top_logprobs`: the number of likeliest tokens to record at each sampled one, 0 to 20; 8 bytes each.
    * `routed_experts`: record the experts that computed each position of a mixture model, for a trainer that
      replays the routing; layers times experts of a token, in bytes, for each position.
    * `teacher`: the name of an engine that scores every trained token when the session is over: one of the
      node's `[teachers.NAME]`, or `policy`, its current weights. "" for none; 4 bytes each.
    """

    top_logprobs: int = 0
    routed_experts: bool = False
    teacher: str = ""


ForkRule = Literal["even", "entropy"]


@frozen(kw_only=True)
class ForkPolicy:
    """Which sessions of a group are forks of its others: `per_session` of each session that begins without
    one (a root), before the turns of `at`, one after another and again from the first, or before turns that a
    rule chooses: `even` spreads them over the root, `entropy` takes the least certain.

    `by`: how, as in `ForkSpec`; None is `resume` where the harness can and the task takes snapshots, `replay`
    elsewhere.
    """

    at: tuple[int, ...] | ForkRule = "even"
    per_session: int = 1
    by: Literal["resume", "replay"] | None = None

    def roots(self, num_samples: int) -> int:
        """How many of so many sessions begin without a fork."""
        return num_samples // (1 + self.per_session)


@frozen(kw_only=True)
class GroupSpec:
    """What a trainer requires of all sessions of a task. A session is usable when it has a reward and at
    least one trainable token.

    * `early_stop_min`: with this many usable sessions the group stops, and sessions in progress end with the
      turns they have; a larger `num_samples` over-samples the group.
    * `min_usable`: a group with fewer usable sessions is dropped.
    * `max_staleness`: the most weight updates between a session's oldest sampled token and its end; a session
      over it is unusable (`drop`) or only marked (`mark`).
    * `drop_uniform_reward`: drop a group whose usable rewards are all equal, because it has no training
      signal.
    * `fork`: make the group a tree: some of its `num_samples` sessions are forks of the others.
    """

    early_stop_min: int | None = None
    min_usable: int = 1
    max_staleness: int | None = None
    stale: Literal["drop", "mark"] = "drop"
    drop_uniform_reward: bool = False
    fork: ForkPolicy | None = None


@frozen(kw_only=True)
class SnapshotSpec:
    """At which turns of a session its writable files are kept, so that it can be forked from them. A call
    waits while its snapshot is taken. Only a call of the main agent that is the only one in progress has one.

    In JSON and TOML a list stands for `turns` alone: `[3, 7]`.

    * `turns`: before these turns, by their index, from 0.
    * `every`: before a turn that is at least so many turns after the last snapshot.
    * `tool_calls`: before the turn that makes the m-th tool call of the main agent, counted from 1.
    * `entropy`: before turns whose sampled tokens have a mean of -logprob of at least this, in nats.
    * `max_mb`: the most MiB of content in one; a session with more has none.
    * `keep`: the most of one session; beyond it the oldest that `turns` does not name is removed.
    * `resume_lost`: a session that the machine lost goes on from the last one, where its harness can.
    * `freeze`: keep the processes too, for forks by `freeze`; memory and layer have four times `max_mb`.
    """

    turns: tuple[int, ...] = field(default=(), metadata={"shorthand": list})
    every: int | None = None
    tool_calls: tuple[int, ...] = ()
    entropy: float | None = None
    # A home and a repository with its build fit. A larger one would hold a call for more than a few seconds.
    max_mb: int = 256
    keep: int = 16  # a tree of 16 branch points; 4 GiB of disk where each is as large as it may be
    resume_lost: bool = True
    freeze: bool = False

    @property
    def wanted(self) -> bool:
        """Whether any rule asks for one."""
        return self.is_provisional or bool(self.turns) or self.every is not None

    @property
    def is_provisional(self) -> bool:
        """Whether some are decided only once their turn has ended, so that one is taken at each call."""
        return bool(self.tool_calls) or self.entropy is not None


ForkWay = Literal["resume", "replay", "freeze"]


@frozen(kw_only=True)
class ForkSpec:
    """Where the task's sessions begin: in the state of another session before its turn `turn`, which is the
    first turn that they sample anew. The turns before it are inherited: they are context and are never
    trained again.

    `by`: `resume` starts the harness from a snapshot of that session, `replay` starts it afresh and answers
    it from the record for as long as it asks what was asked before, `freeze` lets its frozen processes go on.
    """

    session: str
    turn: int
    by: ForkWay = "resume"


@frozen(kw_only=True)
class TaskSpec:
    """One task: `num_samples` sessions of the same harness on the same instruction, which form a group.
    `requires`: labels that the node that runs it has, `model` and `node` among them. `fork`: they all go on
    from one state of another session, whose harness and instruction they have.
    """

    instruction: str
    harness: HarnessSpec
    task_id: str | None = None
    group_id: str | None = None
    num_samples: int = 1
    priority: int = 50
    requires: Mapping[str, str] = field(factory=dict)
    runtime: RuntimeSpec = field(factory=RuntimeSpec)
    builder: BuilderSpec = field(factory=BuilderSpec)
    evaluator: EvaluatorSpec = field(factory=EvaluatorSpec)
    budgets: Budgets = field(factory=Budgets)
    sampling: Sampling = field(factory=Sampling)
    # A later prompt shows all sampled thinking, or what the model's template shows of it.
    thinking: Literal["keep", "template"] = "keep"
    carry: CarrySpec = field(factory=CarrySpec)
    adapter: str = ""  # the name of the LoRA adapter that its calls are sampled by; "" for the base alone
    group: GroupSpec = field(factory=GroupSpec)
    snapshot_at: SnapshotSpec = field(factory=SnapshotSpec)
    fork: ForkSpec | None = None
    callback_url: str | None = None  # each event of the task is sent to this URL by POST until it is accepted
    # The body of the POST is `event`, the event as on the stream, or a format that the node registered.
    callback_format: str = "event"
    metadata: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class CaptureSpec:
    """A session whose harness its caller runs, anywhere on the node's machine: no runtime, no evaluator, one
    API key.

    `num_samples` captures with one `task_id`, each with its own `sample_index` and otherwise equal, form one
    task and group; the first one registers the task. Of `budgets`, `run_s` counts from beginning to end;
    `init_s`, `post_s` and `retries` have no effect.
    """

    task_id: str | None = None
    group_id: str | None = None
    sample_index: int = 0
    num_samples: int = 1
    requires: Mapping[str, str] = field(factory=dict)  # as in a task
    builder: BuilderSpec = field(factory=BuilderSpec)
    budgets: Budgets = field(factory=Budgets)
    sampling: Sampling = field(factory=Sampling)
    thinking: Literal["keep", "template"] = "keep"
    carry: CarrySpec = field(factory=CarrySpec)
    adapter: str = ""
    metadata: Mapping[str, Json] = field(factory=dict)


@frozen(kw_only=True)
class CaptureEnd:
    """How the caller ends a capture, and its rewards. Without a reward the session has no verdict.

    `turn_rewards` and `lineage_rewards` are keyed by the number of a turn or a lineage, as a string, because
    JSON keys are strings.
    """

    status: Literal["completed", "failed", "cancelled"] = "completed"
    exit_code: int | None = None
    reason: str | None = None
    reward: float | None = None
    metrics: Mapping[str, Json] = field(factory=dict)
    turn_rewards: Mapping[str, float] = field(factory=dict)
    lineage_rewards: Mapping[str, float] = field(factory=dict)


@frozen(kw_only=True)
class EvaluationSpec:
    """Finished sessions to score again: those named, or those that hold the places of a task or a group.

    `evaluator`: in place of each task's own. `reason`: returned with each reward.
    """

    sessions: tuple[str, ...] = ()
    task_id: str | None = None
    group_id: str | None = None
    evaluator: EvaluatorSpec | None = None
    reason: str | None = None
