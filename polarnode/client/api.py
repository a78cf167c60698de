"""What both clients can do, as scripts: which requests, how often, and how their answers are put together.

The rule for whoever edits it: what is sent more than once must be taken once. Looking is asked once: whether a node is there is a question of now.
"""

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from secrets import token_hex

from attrs import frozen

from polarnode.client import capturing, requests, weights
from polarnode.client.acks import ACK_EVERY_S, Acks
from polarnode.client.capturing import LEAVING_S, Captured, CaptureSession, Opened
from polarnode.client.collecting import Collector
from polarnode.client.commands import Request, Script, T
from polarnode.client.errors import ClientError, Unreachable
from polarnode.client.following import Follower, Following
from polarnode.client.patience import Patience, patiently
from polarnode.client.streams import Groups, events, objects, pieces
from polarnode.client.values import Submitted
from polarnode.client.weights import Mode, WeightsReport
from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.records import Trajectory
from polarnode.tasks import CaptureSpec, TaskSpec
from polarnode.wire import Arrays, Turns

logger = logging.getLogger(__name__)

STREAM = "/v1/trajectories/stream"


@frozen(kw_only=True)
class Reading:
    """What both kinds of stream are told: who reads, from where, what of it, and how it is written."""

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
        """A task has an end, and with it what is told of it; a node has none."""
        return self.task_id is None if self.follow is None else self.follow

    def following(self, kinds: Sequence[str], **filters: object) -> Following:
        if self.ack and self.consumer is None:
            raise Refused("ack needs a consumer: name whose position moves", path="$.consumer")
        query = requests.query(
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
    """Of one client, as patient as it is."""

    patience_s: float
    ack_every_s: float = ACK_EVERY_S
    now: Callable[[], float] = time.monotonic

    def patiently(self, request: Request[T]) -> Script[T]:
        return patiently(request, self._patience())

    def submit(self, spec: TaskSpec | dict[str, Json], idempotency_key: str | None) -> Script[Submitted]:
        return self.patiently(requests.submit(spec, idempotency_key=idempotency_key or token_hex(16)))

    def acknowledge(self, consumer: str, seq: int) -> Script[int]:
        return self.patiently(requests.acknowledge(consumer, seq))

    def trajectory(self, session_id: str, turns: Turns, arrays: Arrays) -> Script[Trajectory]:
        return self.patiently(requests.trajectory(session_id, turns=turns, arrays=arrays))

    def update_weights(self, version: str, path: str | None, source: Mapping[str, Json] | None, mode: Mode) -> Script[WeightsReport]:
        if (path is None) == (source is None):
            raise Refused("weights come from one place: say path=, a checkpoint's folder on the node's machine, or source=", path="$.source")
        return self.patiently(weights.update(version, {"kind": "disk", "path": path} if source is None else source, mode))

    def push_weights(self, version: str, buckets: Iterable[Mapping[str, Json]], kind: str, group: str | None, mode: Mode) -> Script[WeightsReport]:
        source: dict[str, Json] = {"kind": kind} if group is None else {"kind": kind, "group": group}
        return weights.push(version, source, buckets, mode, self._patience())

    # ── captures ──────────────────────────────────────────────────────────────

    def begin_capture(self, spec: CaptureSpec) -> Script[Opened]:
        return self.patiently(capturing.begin(spec))

    def end_capture(self, session: CaptureSession) -> Script[Captured]:
        return self.patiently(capturing.end(session.session_id, session.end()))

    def leave_capture(self, session: CaptureSession, error: BaseException) -> Script[None]:
        """End it for what its agent's code was left by; a node that can not be told is not waited for as long as otherwise."""
        session.failed(error)
        try:
            asked = capturing.end(session.session_id, session.end())
            session.result = yield from patiently(asked, Patience(min(self.patience_s, LEAVING_S), self.now))
        except (ClientError, Unreachable) as unsaid:
            logger.warning("the node was not told that capture %s is over (%s): it ends when its time is", session.session_id, unsaid)

    # ── what is iterated ──────────────────────────────────────────────────────

    def trajectories(self, reading: Reading, kinds: Sequence[str], **filters: object) -> Script[None]:
        following = reading.following(kinds, **filters)
        return events(Follower(following, self._patience()), self._acks(reading))

    def groups(self, reading: Reading, skip: Container[str], kept_bytes: int) -> Script[None]:
        follower = Follower(reading.following(("trajectory", "group")), self._patience())
        collector = Collector(skip=skip, kept_bytes=kept_bytes)
        groups = Groups(
            follower, self._acks(reading), collector, patience_s=self.patience_s, now=self.now, turns=reading.turns, arrays=reading.arrays
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
