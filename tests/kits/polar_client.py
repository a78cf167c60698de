"""A bridge's side of Polar, written to Polar's own models: strict in every field, so that one that is missing
or new is a failure.

The models are those of the repository NVIDIA-NeMo/ProRL-Agent-Server:
`src/polar/trajectory/models.py` at 467f2ab and bac80ae (Trace, Trajectory, CompletionRecord),
`src/polar/rollout/models.py` at 063c948 (SessionResult, TaskResult, TaskStatus, SessionTiming, GatewayNodeInfo),
`src/slime_bridge/adapter.py` at 5926834 (`trainable_agent_timeout` below), and the fan-out of a rollout server
from the fork BryanChen408/ProRL-Agent-Server (`src/polar/rollout/server.py`). `Trace` and `CompletionRecord`
check what their pydantic validators check.

The rule for whoever edits it: this is the reader, not the writer; it knows nothing of polarnode but what
docs/polar.md says beside Polar's own.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

import httpx2
import trio
from attrs import field, frozen

from polarnode.core.codec import structure

Word = Literal[
    "REGISTERED",
    "INITIALIZING",
    "READY",
    "RUNNING",
    "POST_RUN",
    "BUILDING",
    "EVALUATING",
    "COMPLETED",
    "ERROR",
    "TIMEOUT",
]
TERMINAL = ("COMPLETED", "ERROR", "TIMEOUT")


@frozen(kw_only=True)
class Trace:
    """`response_logprobs` are plain floats, one for each response token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    prompt_messages: tuple[Mapping[str, Any], ...]
    response_messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None
    finish_reason: str | None
    response_logprobs: tuple[float, ...] | None
    reward: float | None
    reward_components: Mapping[str, float]
    metadata: Mapping[str, Any]

    def __attrs_post_init__(self) -> None:
        assert set(self.loss_mask) <= {0, 1}
        assert len(self.loss_mask) in (0, len(self.response_ids))
        assert self.response_logprobs is None or len(self.response_logprobs) == len(self.response_ids)
        assert all(isfinite(value) for value in self.response_logprobs or ())
        assert self.reward is None or isfinite(self.reward)


@frozen(kw_only=True)
class AgentResult:
    """What the gateway's `_attach_agent_result_metadata` writes (src/polar/gateway/node.py)."""

    status: Literal["completed", "failed", "timeout"]
    return_code: int | None
    error: str | None = None
    timeout_source: Literal["agent", "session"] | None = None
    timeout_stage: Literal["setup", "exec", "postprocess"] | None = None


@frozen(kw_only=True)
class ReconstructionStats:
    chains_total: int
    chains_reconstructed_full: int
    chains_reconstructed_truncated: int
    completions_total: int
    completions_merged: int


@frozen(kw_only=True)
class TrajectoryMetadata:
    builder: str | None
    session_id: str
    task_id: str
    api_type: str | None
    model_requested: str | None
    model_used: str | None
    record_count: int
    task_metadata: Mapping[str, Any]
    trace_count: int
    reconstruction_stats: ReconstructionStats
    agent_result: AgentResult
    evaluation: Mapping[str, Any] | None
    group_id: str | int | None = None
    policy_version: int | None = None
    rollout_step: int | None = None


@frozen(kw_only=True)
class Trajectory:
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    metadata: TrajectoryMetadata
    traces: tuple[Trace, ...]
    error: str | None


@frozen(kw_only=True)
class SessionTiming:
    """Polar forbids any other field here."""

    register_to_init_queue_ms: float
    init_ms: float
    run_ms: float
    postrun_ms: float


@frozen(kw_only=True)
class SessionResult:
    session_id: str
    task_id: str
    status: Word
    trajectory: Trajectory
    timing: SessionTiming
    node_id: str | None
    error: str | None
    metadata: Mapping[str, Any]


@frozen(kw_only=True)
class CompletionRecord:
    """The two requests and the response are objects, never null."""

    completion_id: str
    timestamp: str | None
    request: dict[str, Any]
    original_request: dict[str, Any]
    response: dict[str, Any]
    metadata: dict[str, Any]


def trainable_agent_timeout(result: SessionResult, trace: Trace) -> bool:
    """Whether Polar's bridge trains a trace of a session that ran out of time: it masks all others."""
    agent, filtered = result.trajectory.metadata.agent_result, trace.metadata.get("training_filter", {})
    evaluation = result.trajectory.metadata.evaluation or {}
    return (
        (result.status, result.trajectory.status) == ("TIMEOUT", "TIMEOUT")
        and (agent.status, agent.timeout_source, agent.timeout_stage) == ("timeout", "agent", "exec")
        and filtered.get("reason") == "agent_timeout"
        and filtered.get("trainable") is True
        and filtered.get("masked") is not True
        and evaluation.get("verifier_timeout") is not True
    )


@frozen(kw_only=True)
class TaskResult:
    task_id: str
    status: Literal["running", "completed", "failed"]
    results: tuple[SessionResult, ...]
    result_paths: tuple[str, ...]


@frozen(kw_only=True)
class TaskStatus:
    task_id: str
    status: Literal["running", "completed", "failed"]
    total_sessions: int
    completed_sessions: int
    results: tuple[SessionResult, ...]
    result_paths: tuple[str, ...]


@frozen(kw_only=True)
class StageMetrics:
    init_queue_depth: int
    init_inflight: int
    ready_depth: int
    run_inflight: int
    postrun_queue_depth: int
    postrun_inflight: int


@frozen(kw_only=True)
class NodeInfo:
    node_id: str
    gateway_url: str
    max_init_workers: int
    max_run_workers: int
    max_postrun_workers: int
    metrics: StageMetrics
    dispatch_reservations: int
    healthy: bool
    draining: bool
    heartbeat_interval_seconds: int
    last_heartbeat: str


@frozen(kw_only=True)
class Dispatched:
    session_id: str
    task_id: str
    status: Word
    node_id: str | None


@frozen(kw_only=True)
class SessionStatus:
    session_id: str
    task_id: str
    created_at: str
    completion_count: int
    status: Word
    node_id: str
    result: SessionResult | None


@frozen(kw_only=True)
class Deleted:
    session_id: str
    task_id: str
    deleted: bool
    messages_deleted: int


@frozen(kw_only=True)
class InferenceStatus:
    """`held` is the node's own."""

    paused: bool
    drained: bool
    inflight: int
    held: int
    base_url: str
    engine: str
    request_timeout_seconds: float | None
    policy_version: str


@frozen(kw_only=True)
class NodeAnswer:
    """One gateway's answer in a rollout server's fan-out."""

    node_id: str
    status: Literal["ok"]
    response: Mapping[str, Any]


@frozen(kw_only=True)
class AllPaused:
    all_paused: bool
    all_drained: bool
    inflight: int
    nodes: tuple[NodeAnswer, ...]


@frozen(kw_only=True)
class AllResumed:
    all_resumed: bool
    nodes: tuple[NodeAnswer, ...]


@frozen(kw_only=True)
class AllUpdated:
    all_updated: bool
    policy_version: int
    nodes: tuple[NodeAnswer, ...]


def read(value: Any, cls: Any) -> Any:
    """A value as one of Polar's models: nothing missing, nothing more."""
    return structure(value, cls, forbid_extra=True)


class Refused(Exception):
    """An answer of 4xx or 5xx, with FastAPI's detail."""

    def __init__(self, status: int, detail: Any) -> None:
        super().__init__(f"{status}: {detail}")
        self.status, self.detail = status, detail


@frozen(kw_only=True)
class PolarClient:
    """Speaks to a rollout server and its gateway, which are one here."""

    url: str
    headers: Mapping[str, str] = field(factory=dict)

    async def ask(self, method: str, path: str, *, body: Any = None, **params: Any) -> Any:
        async with httpx2.AsyncClient(
            base_url=self.url, headers=dict(self.headers), timeout=60, trust_env=False
        ) as client:
            answer = await client.request(method, path, json=body, params=params)
        if answer.status_code >= 400:
            raise Refused(answer.status_code, answer.json().get("detail", answer.json()))
        return answer.json()

    async def submit(self, request: Any) -> str:
        said = await self.ask("POST", "/rollout/task/submit", body=request)
        assert said["status"] == "running"
        return str(said["task_id"])

    async def status(self, task_id: str, **params: Any) -> TaskStatus:
        found: TaskStatus = read(await self.ask("GET", f"/rollout/task/{task_id}", **params), TaskStatus)
        return found

    async def finished(self, task_id: str, *, every: float = 0.2) -> TaskStatus:
        """Poll until the task is over, as every bridge does."""
        while (found := await self.status(task_id)).status == "running":  # noqa: ASYNC110 (a bridge polls)
            await trio.sleep(every)
        return found
