"""The methods of both clients, as scripts: which requests are sent, how often, and how their answers are
combined.

Invariant: a request that is sent more than once takes effect once. A version names one set of weights for
ever, and a capture is opened under an id that the caller chose, so both may be retried. A capture is ended
whatever happens to the agent, because an open one holds a place on the node.
"""

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import define, evolve, field, frozen

from polarnode.client import requests
from polarnode.client.requests import (
    ClientRequest,
    Script,
    SleepFor,
    T,
    ask,
    json_request,
    part,
    typed_request,
)
from polarnode.client.scripts import Following, RetryPatience, StreamFollower, patiently
from polarnode.client.streams import (
    ACK_INTERVAL_S,
    Acknowledgements,
    Collector,
    GroupStream,
    events,
    live_sessions,
    objects,
    pieces,
)
from polarnode.client.values import ClientError, Unreachable, read_answer
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.forks import ForkOrder
from polarnode.core.codec.json import plain
from polarnode.core.codec.trajectories import Turns
from polarnode.core.conversation import Json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Refused
from polarnode.core.status import EvaluationStatus, Submitted
from polarnode.core.task import CaptureEnd, CaptureSpec, EvaluationSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.core.weights import (
    AdapterReport,
    AdapterState,
    Backend,
    MemoryTag,
    PauseMode,
    UpdateMode,
    UpdateOpened,
    WeightsReport,
    WeightsStatus,
)

if TYPE_CHECKING:
    from polarnode.sources.values import Kind

# ── captures ────────────────────────────────────────────────────────────

MOST_REASON = 1000  # characters: one line of a table, not a traceback
LEAVING_S = 30.0  # for reporting an exception to the node, before the exception propagates
# The node answers when the end is on disk. It ends the calls in progress first, then waits up to 30 s, and a
# teacher scores within post_s, 300 s by default.
END_SILENCE_S = 420.0


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


# ── weights ────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

UPDATES = "/v1/weights/updates"

UPDATE_SILENCE_S = (
    # an update is silent until it is served: `drain` waits for every call, and a checkpoint of a terabyte
    # is read in minutes
    3600.0
)


def update_weights(
    version: str, source: Mapping[str, Json], mode: UpdateMode
) -> ClientRequest[WeightsReport]:
    return typed_request(
        WeightsReport,
        "POST",
        "/v1/weights",
        _weights_order(version, source, mode),
        silence_s=UPDATE_SILENCE_S,
    )


def _weights_order(version: str, source: Mapping[str, Json], mode: UpdateMode) -> dict[str, Json]:
    return {"version": version, "source": dict(source), "mode": mode}


def push_weights(
    version: str,
    source: Mapping[str, Json],
    buckets: Iterable[Mapping[str, Json]],
    mode: UpdateMode,
    patience: RetryPatience,
) -> Script[WeightsReport]:
    """Begin an update, send each bucket, and commit. If anything fails before the commit, the node keeps its
    weights.
    """
    opened = yield from ask(
        typed_request(
            UpdateOpened, "POST", UPDATES, _weights_order(version, source, mode), silence_s=UPDATE_SILENCE_S
        )
    )
    try:
        for bucket in buckets:
            yield from ask(
                json_request(
                    "POST", f"{UPDATES}/{part(opened.update_id)}/buckets", bucket, silence_s=UPDATE_SILENCE_S
                )
            )
    except Exception:  # including one raised while a bucket is made
        yield from _give_up(opened.update_id)
        raise
    commit = typed_request(
        WeightsReport, "POST", f"{UPDATES}/{part(opened.update_id)}/commit", silence_s=UPDATE_SILENCE_S
    )
    return (yield from patiently(commit, patience))


def _give_up(update_id: str) -> Script[None]:
    try:
        yield from ask(json_request("DELETE", f"{UPDATES}/{part(update_id)}"))
    except (ClientError, Unreachable) as error:
        if isinstance(error, ClientError) and error.status == 404:
            return  # the node gave it up already, because of a bucket's content
        logger.warning(
            "the node was not told to give up update %s (%s): it does so after its idle time",
            update_id,
            error,
        )


def join_group(
    name: str, address: str, port: int, world_size: int, rank_offset: int, backend: Backend
) -> ClientRequest[dict[str, Any]]:
    body: dict[str, Json] = {
        "name": name,
        "address": address,
        "port": port,
        "world_size": world_size,
        "rank_offset": rank_offset,
    }
    return json_request("POST", "/v1/weights/groups", body | {"backend": backend}, silence_s=UPDATE_SILENCE_S)


def leave_group(name: str) -> ClientRequest[dict[str, Any]]:
    return json_request("DELETE", f"/v1/weights/groups/{part(name)}")


ADAPTERS = "/v1/adapters"
# an adapter of some gigabytes is copied and digested before it is served
ADAPTER_SILENCE_S = 600.0


def update_adapter(name: str, version: str, path: str) -> ClientRequest[AdapterReport]:
    body: dict[str, Json] = {"name": name, "version": version, "source": {"kind": "disk", "path": path}}
    return typed_request(AdapterReport, "POST", ADAPTERS, body, silence_s=ADAPTER_SILENCE_S)


def send_adapter(name: str, version: str, body: bytes) -> ClientRequest[AdapterReport]:
    return ClientRequest(
        method="PUT",
        path=f"{ADAPTERS}/{part(name)}/versions/{part(version)}",
        read=lambda answer: read_answer(answer, AdapterReport),
        body=body,
        headers={"Content-Type": "application/octet-stream"},
        silence_s=ADAPTER_SILENCE_S,
    )


def delete_adapter(name: str) -> ClientRequest[AdapterState]:
    return typed_request(AdapterState, "DELETE", f"{ADAPTERS}/{part(name)}", silence_s=ADAPTER_SILENCE_S)


def memory(
    verb: Literal["release", "resume"], tags: Sequence[MemoryTag] | None
) -> ClientRequest[WeightsStatus]:
    body: dict[str, Json] = {} if tags is None else {"tags": list(tags)}
    return typed_request(WeightsStatus, "POST", f"/v1/engine/memory/{verb}", body, silence_s=UPDATE_SILENCE_S)


def pause(mode: PauseMode) -> ClientRequest[WeightsStatus]:
    return typed_request(
        WeightsStatus, "POST", "/v1/engine/pause", {"mode": mode}, silence_s=UPDATE_SILENCE_S
    )


def resume() -> ClientRequest[WeightsStatus]:
    return typed_request(WeightsStatus, "POST", "/v1/engine/resume", silence_s=UPDATE_SILENCE_S)


# ── api ────────────────────────────────────────────────────────────

STREAM_PATH = "/v1/trajectories/stream"
NEWEST_POSITION: Final = "newest"  # as `after`: begin after all events there are
# between two looks at an evaluation: the first of a quick one, the last of one that takes hours
EVALUATION_POLL_S, EVALUATION_POLL_MOST_S = 0.2, 5.0


@frozen
class Reading:
    """The parameters that `trajectories` and `groups` share: the reader, where it begins, filters and
    encoding.
    """

    consumer: str | None
    after: int | str | None
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
            begin=NEWEST_POSITION if self.after == NEWEST_POSITION else None,
            **filters,
        )
        after = None if self.after in (None, NEWEST_POSITION) else Cursor.read(str(self.after), "after")
        return Following(path=STREAM_PATH + query, after=after, goes_on=self.goes_on)


def exported(
    task_id: str | None,
    group_id: str | None,
    outcome: str | None,
    min_reward: float | None,
    arrays: Arrays | None,
    turns: Turns | None,
) -> dict[str, object]:
    """The query of an export: filters and encoding."""
    filters = {"task_id": task_id, "group_id": group_id, "outcome": outcome, "min_reward": min_reward}
    return {**filters, "arrays": arrays, "turns": turns}


@frozen(kw_only=True)
class Api:
    """The client's methods as scripts."""

    patience_s: float
    ack_every_s: float = ACK_INTERVAL_S
    now: Callable[[], float] = time.monotonic

    def patiently(self, request: ClientRequest[T]) -> Script[T]:
        return patiently(request, self._new_patience())

    def submit(self, spec: TaskSpec | dict[str, Json], idempotency_key: str | None) -> Script[Submitted]:
        return self.patiently(requests.submit(spec, idempotency_key=idempotency_key or token_hex(16)))

    def fork(self, session_id: str, order: ForkOrder, idempotency_key: str | None) -> Script[Submitted]:
        request = requests.fork(session_id, order, idempotency_key=idempotency_key or token_hex(16))
        return self.patiently(request)

    def evaluate(
        self, spec: EvaluationSpec, idempotency_key: str | None, *, wait: bool
    ) -> Script[EvaluationStatus]:
        request = requests.evaluate(spec, idempotency_key=idempotency_key or token_hex(16))
        found = yield from self.patiently(request)
        return (yield from self.evaluation(found.evaluation_id, wait=True)) if wait else found

    def evaluation(self, evaluation_id: str, *, wait: bool) -> Script[EvaluationStatus]:
        pause = EVALUATION_POLL_S
        while True:
            found = yield from self.patiently(requests.evaluation(evaluation_id))
            if found.finished or not wait:
                return found
            yield SleepFor(pause)
            pause = min(2 * pause, EVALUATION_POLL_MOST_S)

    def acknowledge(self, consumer: str, position: int | str) -> Script[int | str]:
        where = Cursor.read(str(position), "position")
        answer = yield from self.patiently(requests.acknowledge(consumer, where))
        return answer.id if ":" in answer.id else answer.position

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
            update_weights(version, {"kind": "disk", "path": path} if source is None else source, mode)
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
        return push_weights(version, source, buckets, mode, self._new_patience())

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
                request, RetryPatience(min(self.patience_s, LEAVING_S), self.now)
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
        return events(StreamFollower(following, self._new_patience()), self._make_acknowledgements(reading))

    def groups(
        self,
        reading: Reading,
        skip: Container[str],
        kept_bytes: int,
        run: Callable[[Script[None]], Any],
    ) -> Script[None]:
        """`run`: how this client runs the script of a group's `ack`."""
        follower = StreamFollower(reading.following(("trajectory", "group")), self._new_patience())
        collector = Collector(skip=skip, kept_bytes=kept_bytes)
        groups = GroupStream(
            follower,
            self._make_acknowledgements(evolve(reading, ack=reading.consumer is not None)),
            collector,
            patience_s=self.patience_s,
            now=self.now,
            run=run,
            on_request=reading.ack,
            turns=reading.turns,
            arrays=reading.arrays,
        )
        return groups.script()

    def live_sessions(self, *, follow: bool) -> Script[None]:
        return live_sessions(follow=follow, patience=self._new_patience())

    def export(self, **query: object) -> Script[None]:
        return objects(requests.export(**query))

    def export_bytes(self, **query: object) -> Script[None]:
        return pieces(requests.export(**query))

    def artifacts(self, session_id: str) -> Script[None]:
        return pieces(requests.artifacts(session_id))

    def _new_patience(self) -> RetryPatience:
        return RetryPatience(self.patience_s, self.now)

    def _make_acknowledgements(self, reading: Reading) -> Acknowledgements:
        return Acknowledgements(
            reading.consumer if reading.ack else None, self.patience_s, self.now, self.ack_every_s
        )


def specs_of(path: str | Path, kind: "Kind | None", overrides: Mapping[str, Any]) -> list[TaskSpec]:
    """Read all tasks of a source.

    The import of `polarnode.sources` is local because it would double the time that importing the client
    takes.
    """
    from polarnode.sources.source import read_source
    from polarnode.sources.values import Overrides

    return [task.spec for task in read_source(path, kind=kind, overrides=Overrides(**overrides)).tasks()]
