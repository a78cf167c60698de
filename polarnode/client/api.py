"""The methods of both clients, as scripts: which requests are sent, how often, and how their answers are
combined.

Invariant: a request that is sent more than once takes effect once. A capture is opened under an id that the
caller chose, so opening it may be retried. It is ended whatever happens to the agent, because an open capture
holds a place on the node.
"""

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Literal

from attrs import define, evolve, field, frozen

from polarnode.client import requests, weights
from polarnode.client.requests import ClientRequest, Script, T, part, typed_request
from polarnode.client.scripts import Follower, Following, Patience, patiently
from polarnode.client.streams import ACK_EVERY_S, Acks, Collector, Groups, events, objects, pieces
from polarnode.client.values import ClientError, Unreachable
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.json import plain
from polarnode.core.codec.trajectories import Turns
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.status import Submitted
from polarnode.core.task import CaptureEnd, CaptureSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.core.weights import UpdateMode, WeightsReport

# ── captures ────────────────────────────────────────────────────────────

MOST_REASON = 1000  # characters: one line of a table, not a traceback
LEAVING_S = 30.0  # for reporting an exception to the node, before the exception propagates
# The node answers when the end is on disk. It ends the calls in progress first, then waits up to 30 s.
END_SILENCE_S = 120.0


@frozen(kw_only=True)
class BaseUrls:
    """The base URL for each provider's own client. `any` serves all providers."""

    anthropic: str
    openai: str
    google: str
    any: str = ""


@frozen(kw_only=True)
class ClientCapture:
    """An open capture, as the node describes it."""

    session_id: str
    task_id: str
    group_id: str
    key: str = field(repr=False)
    base_urls: BaseUrls = field(repr=False)  # `any` has the key in its path
    env: Mapping[str, str] = field(factory=dict, repr=False)
    expires_s: float = 0.0
    sample_index: int = 0
    created: bool = True


@frozen(kw_only=True)
class Captured:
    """The result of a capture. Its tokens are in its trajectory."""

    session_id: str
    outcome: Outcome
    reward: float | None
    turns: int
    traces: int
    sampled_tokens: int = 0
    trainable_tokens: int = 0


@define(eq=False, kw_only=True)
class CaptureSession:
    """An open capture, for the code that runs the agent: the model's addresses, and the result to report.

    Set `reward` and the other fields before the block ends; `result` is set after it.
    """

    opened: ClientCapture
    reward: float | None = None
    status: Literal["completed", "failed", "cancelled"] = "completed"
    exit_code: int | None = None
    reason: str | None = None
    metrics: dict[str, Json] = field(factory=dict)
    turn_rewards: dict[int, float] = field(factory=dict)
    lineage_rewards: dict[int, float] = field(factory=dict)
    result: Captured | None = field(default=None, init=False)

    @property
    def session_id(self) -> str:
        return self.opened.session_id

    @property
    def key(self) -> str:
        """The API key for the agent's client."""
        return self.opened.key

    @property
    def openai_base_url(self) -> str:
        return self.opened.base_urls.openai

    @property
    def anthropic_base_url(self) -> str:
        return self.opened.base_urls.anthropic

    @property
    def google_base_url(self) -> str:
        return self.opened.base_urls.google

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables for a harness that is a program: merged over its environment, they lead it to
        the model.
        """
        return self.opened.env

    def failed(self, error: BaseException) -> None:
        """Record that `error` ended the agent's code: "failed" for an exception, "cancelled" for an
        interruption.
        """
        self.status = "failed" if isinstance(error, Exception) else "cancelled"
        self.reason = self.reason or f"{type(error).__name__}: {error}"[:MOST_REASON]

    def end(self) -> CaptureEnd:
        """The result to report to the node."""
        return CaptureEnd(
            status=self.status,
            exit_code=self.exit_code,
            reason=self.reason,
            reward=self.reward,
            metrics=self.metrics,
            turn_rewards={str(turn): reward for turn, reward in self.turn_rewards.items()},
            lineage_rewards={str(lineage): reward for lineage, reward in self.lineage_rewards.items()},
        )


def named(spec: CaptureSpec | None, **options: Any) -> CaptureSpec:
    """Merge options over `spec`; a capture without a task id gets a random one."""
    whole = evolve(
        spec or CaptureSpec(), **{name: value for name, value in options.items() if value is not None}
    )
    return whole if whole.task_id is not None else evolve(whole, task_id=f"capture-{token_hex(8)}")


def begin(spec: CaptureSpec) -> ClientRequest[ClientCapture]:
    return typed_request(ClientCapture, "POST", "/v1/capture", plain(spec))


def end(session_id: str, result: CaptureEnd) -> ClientRequest[Captured]:
    return typed_request(
        Captured, "DELETE", f"/v1/capture/{part(session_id)}", plain(result), silence_s=END_SILENCE_S
    )


# ── api ────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

STREAM = "/v1/trajectories/stream"


@frozen(kw_only=True)
class Reading:
    """The parameters that `trajectories` and `groups` share: the reader, where it begins, filters and
    encoding.
    """

    consumer: str | None
    after: int | None
    task_id: str | None
    group_id: str | None
    follow: bool | None
    ack: bool
    arrays: Arrays
    turns: Turns

    @property
    def goes_on(self) -> bool:
        """Whether the stream has no end: by default only the stream of a single task ends."""
        return self.task_id is None if self.follow is None else self.follow

    def following(self, kinds: Sequence[str], **filters: object) -> Following:
        if self.ack and self.consumer is None:
            raise Refused("ack needs a consumer: name the consumer whose position moves", path="$.consumer")
        query = requests.query_string(
            consumer=self.consumer,
            follow=self.goes_on,
            arrays=self.arrays,
            turns=self.turns,
            kinds=",".join(kinds) or None,
            task_id=self.task_id,
            group_id=self.group_id,
            **filters,
        )
        return Following(path=STREAM + query, after=self.after, goes_on=self.goes_on)


@frozen(kw_only=True)
class Api:
    """The client's methods as scripts."""

    patience_s: float
    ack_every_s: float = ACK_EVERY_S
    now: Callable[[], float] = time.monotonic

    def patiently(self, request: ClientRequest[T]) -> Script[T]:
        return patiently(request, self._patience())

    def submit(self, spec: TaskSpec | dict[str, Json], idempotency_key: str | None) -> Script[Submitted]:
        return self.patiently(requests.submit(spec, idempotency_key=idempotency_key or token_hex(16)))

    def acknowledge(self, consumer: str, seq: int) -> Script[int]:
        return self.patiently(requests.acknowledge(consumer, seq))

    def trajectory(self, session_id: str, turns: Turns, arrays: Arrays) -> Script[Trajectory]:
        return self.patiently(requests.trajectory(session_id, turns=turns, arrays=arrays))

    def update_weights(
        self, version: str, path: str | None, source: Mapping[str, Json] | None, mode: UpdateMode
    ) -> Script[WeightsReport]:
        if (path is None) == (source is None):
            raise Refused(
                "weights come from one place: give either path= (a checkpoint folder on the node's machine)"
                " or source=",
                path="$.source",
            )
        return self.patiently(
            weights.update(version, {"kind": "disk", "path": path} if source is None else source, mode)
        )

    def push_weights(
        self,
        version: str,
        buckets: Iterable[Mapping[str, Json]],
        kind: str,
        group: str | None,
        mode: UpdateMode,
    ) -> Script[WeightsReport]:
        source: dict[str, Json] = {"kind": kind} if group is None else {"kind": kind, "group": group}
        return weights.push(version, source, buckets, mode, self._patience())

    # ── captures ──────────────────────────────────────────────────────────────

    def begin_capture(self, spec: CaptureSpec) -> Script[ClientCapture]:
        return self.patiently(begin(spec))

    def end_capture(self, session: CaptureSession) -> Script[Captured]:
        return self.patiently(end(session.session_id, session.end()))

    def leave_capture(self, session: CaptureSession, error: BaseException) -> Script[None]:
        """End a capture after its agent's code raised `error`. The node is waited for at most LEAVING_S
        seconds.
        """
        session.failed(error)
        try:
            request = end(session.session_id, session.end())
            session.result = yield from patiently(
                request, Patience(min(self.patience_s, LEAVING_S), self.now)
            )
        except (ClientError, Unreachable) as unreported:
            logger.warning(
                "the node was not told that capture %s has ended (%s): it ends at its time limit",
                session.session_id,
                unreported,
            )

    # ── iteration ──────────────────────────────────────────────────────

    def trajectories(self, reading: Reading, kinds: Sequence[str], **filters: object) -> Script[None]:
        following = reading.following(kinds, **filters)
        return events(Follower(following, self._patience()), self._acks(reading))

    def groups(self, reading: Reading, skip: Container[str], kept_bytes: int) -> Script[None]:
        follower = Follower(reading.following(("trajectory", "group")), self._patience())
        collector = Collector(skip=skip, kept_bytes=kept_bytes)
        groups = Groups(
            follower,
            self._acks(reading),
            collector,
            patience_s=self.patience_s,
            now=self.now,
            turns=reading.turns,
            arrays=reading.arrays,
        )
        return groups.script()

    def export(self, **query: object) -> Script[None]:
        return objects(requests.export(**query))

    def export_bytes(self, **query: object) -> Script[None]:
        return pieces(requests.export(**query))

    def artifacts(self, session_id: str) -> Script[None]:
        return pieces(requests.artifacts(session_id))

    def _patience(self) -> Patience:
        return Patience(self.patience_s, self.now)

    def _acks(self, reading: Reading) -> Acks:
        return Acks(reading.consumer if reading.ack else None, self.patience_s, self.now, self.ack_every_s)
