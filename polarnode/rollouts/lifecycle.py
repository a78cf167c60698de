"""The lifecycle of a session under any driver: opened with a key, run, and ended once with one message.

A driver is a session with its own container (`Session`) or a harness that its caller runs (`Capture`).
`LiveSessionFactory` opens its session, as the model endpoint sees it. The registry holds every live driver of
a node, builds its trajectory when it is over and publishes it. Invariant: an end caused by the agent is never
retried, because choosing among attempts would bias the training data. Only a loss caused by the machine is
retried, at most `retries` times.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, Protocol, TypeVar

import trio
from attrs import define, evolve, field, frozen

from polarnode.core.backoff import Backoff
from polarnode.core.errors import Refused
from polarnode.core.task import Budgets, TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory, Turn
from polarnode.engine.adapters import EngineAdapters
from polarnode.engine.scoring import ScoringEngines
from polarnode.gateway.live_sessions import LiveSession, LiveSessions, SessionBudget, SessionCounters
from polarnode.groups.group import lost_to_the_machine, stamp_staleness
from polarnode.merge.lineage import DropsThinking, Lineages
from polarnode.merge.token_extras import SessionExtras, unscored
from polarnode.merge.trajectory import Identity, Result, assemble, without_traces
from polarnode.rollouts.evaluation import taught
from polarnode.rollouts.results import SessionResults
from polarnode.rollouts.services import CachePlaces, SessionJournal
from polarnode.support.bounded import trim_memory
from polarnode.support.metrics import NodeCounters

logger = logging.getLogger(__name__)

REASON_CHARACTERS = 200  # characters of a reason in the node's log; the trajectory has all of it
# The seconds after which a request that ends a capture or watches a session has been answered.
FORGET_DELAY_S: Final = 1.0

# ── attempts of a group's sample ──────────────────────────────────────────────

# The pauses before an attempt. A Podman service that crashed is up again in one or two seconds.
PAUSES: Final = Backoff(first_s=0.5, longest_s=5.0, factor=4.0)


def has_retries_left(retries: int, budgets: Budgets) -> bool:
    """Whether another attempt may follow a session that itself followed `retries` others."""
    return retries < budgets.retries


def pause_before(attempt: int) -> float:
    """The seconds of pause before an attempt begins; none before the first."""
    return PAUSES.delay(attempt - 1) if attempt else 0.0


# ── as the model endpoint sees a session ──────────────────────────────────────


@frozen(kw_only=True)
class LiveSessionFactory:
    """Opens sessions for the model endpoint. Their turns are recorded in `journal` and counted in `tally`."""

    journal: SessionJournal
    tally: NodeCounters
    drops_thinking: DropsThinking  # whether the model's template leaves out earlier thinking
    carried_limit: int = 0  # bytes a session may carry beside ids and logprobs

    def open(self, identity: Identity, task: TaskSpec, *, calls_first: bool = False) -> LiveSession:
        """Create a session as the model endpoint sees it, with a new key. `calls_first` is its harness's."""
        session_id, journal = identity.session_id, self.journal
        drops = self.drops_thinking if task.thinking == "template" else None
        counters = SessionCounters()

        def record(turn: Turn) -> None:
            # This function does not refer to its session, because the cycle would keep an ended session until
            # the garbage collector runs.
            counters.last_turn = trio.current_time()
            journal.record_turn(turn)

        return LiveSession(
            session_id=session_id,
            key=f"sk-polarnode-{secrets.token_urlsafe(24)}",
            lineages=Lineages(session_id=session_id, secret=secrets.token_bytes(32), drops_thinking=drops),
            sampling=task.sampling,
            budget=SessionBudget(task.budgets, counters=counters, tally=self.tally),
            record=record,
            carrier=SessionExtras(task.carry, limit=self.carried_limit),
            adapter=task.adapter,
            calls_first=calls_first,
        )


# ── drivers and their registry ────────────────────────────────────────────────

CancelCause = Literal["cancelled", "stopped", "early stop"]  # by its trainer, by its node, by its group


@frozen(kw_only=True)
class SessionEnd:
    """Sent once for each session, when it is over. `cancelled` is the first cause, if it was cancelled."""

    identity: Identity
    trajectory: Trajectory
    cancelled: CancelCause | None


class SessionDriver(Protocol):
    """Drives a session: in its own container, or by a caller that holds its key."""

    @property
    def identity(self) -> Identity: ...

    @property
    def task(self) -> TaskSpec: ...

    @property
    def live(self) -> LiveSession: ...

    @property
    def cancelled(self) -> CancelCause | None: ...

    async def run(self) -> Result:
        """Run to the end and close `live`. Raises only what ends the node."""

    def cancel(self, cause: CancelCause) -> None:
        """End the session; it keeps its turns. The first cause counts."""

    def closed(self, *, failed: bool) -> None:
        """Called last, when the registry no longer holds it. `failed`: its trajectory was not published."""


Driver = TypeVar("Driver", bound=SessionDriver)
OnEnd = Callable[[SessionEnd], Awaitable[None]]


def no_versions(_: str) -> tuple[str, ...]:
    """For a node whose engine has no versions."""
    return ()


@define(eq=False, kw_only=True)
class SessionRegistry:
    """Every live session of a node, by id, in the order they began. A session needs its adapter in `adapters`
    and its place in `places` until it is over. Published sessions are counted in `tally`.

    Keep publishing synchronous and last, so that a finished rollout cannot be lost. A teacher scores before
    that, and none of its failures keeps a session from being published.
    """

    results: SessionResults
    places: CachePlaces
    tally: NodeCounters
    adapters: EngineAdapters
    scoring: ScoringEngines  # the engines of teachers
    allowed_imports: tuple[str, ...] = ()
    # It lists the versions that were served of the base or of an adapter, the oldest first and the current
    # last. A session's tokens may have an adapter's own versions, or the base's.
    served_versions: Callable[[str], Sequence[str]] = no_versions
    stopping: bool = field(default=False, init=False)
    _drivers: dict[str, SessionDriver] = field(factory=dict, init=False)
    _scoring_scopes: set[trio.CancelScope] = field(factory=set, init=False)  # of sessions being scored
    # It is set when the last session of a stopping node is over.
    _emptied: trio.Event = field(factory=trio.Event, init=False)

    def require_not_stopping(self, what: str) -> None:
        """Raise Refused when the node is stopping. `what` names what it takes no more of."""
        if self.stopping:
            raise Refused(f"this node is stopping and takes no new {what}: use another node, or retry later")

    def start(
        self,
        driver: SessionDriver,
        *,
        nursery: trio.Nursery,
        sessions_by_key: LiveSessions,
        on_end: OnEnd | None = None,
    ) -> None:
        """Run a driver in `nursery`, its key valid in `sessions_by_key` meanwhile. `on_end` receives its end
        in place of `end`.
        """
        session_id = driver.identity.session_id
        if driver.task.adapter:
            self.adapters.need(driver.task.adapter)
        self._drivers[session_id] = driver
        sessions_by_key.add(driver.live)
        nursery.start_soon(
            self._drive, driver, sessions_by_key, on_end or self.end_session_now, name=f"session {session_id}"
        )

    async def _drive(self, driver: SessionDriver, sessions_by_key: LiveSessions, on_end: OnEnd) -> None:
        identity, failed = driver.identity, False
        try:
            await self._publish_result(driver, await driver.run(), on_end)
        except Exception:
            # This is the isolation boundary: even a session that cannot be published does not end the others.
            logger.exception(
                "session %s was not published: its turns are in the journal, where the node's next start"
                " finds it",
                identity.session_id,
            )
            self.results.unwritten.add((identity.task_id, identity.sample_index))
            failed = True
        finally:
            sessions_by_key.remove(driver.live)
            del self._drivers[identity.session_id]
            if driver.task.adapter:
                self.adapters.release(driver.task.adapter)
            self.places.end_session(identity.session_id)
            driver.closed(failed=failed)
            if self.stopping and not self._drivers:
                self._emptied.set()
        if driver.live.earlier.large:
            # The memory of the session is free only when nothing refers to the session any more.
            del driver
            await trio.sleep(FORGET_DELAY_S)
            await trim_memory()

    async def _publish_result(self, driver: SessionDriver, result: Result, on_end: OnEnd) -> None:
        identity, turns = driver.identity, driver.live.lineages.turns
        versions = self.served_versions(driver.task.adapter)  # The time of a teacher adds no staleness.

        async def send(trajectory: Trajectory) -> None:
            await on_end(SessionEnd(identity=identity, trajectory=trajectory, cancelled=driver.cancelled))

        try:
            imports = self.allowed_imports
            found = assemble(identity, driver.task, turns, result, allowed_imports=imports)
            found = stamp_staleness(found, versions)
            await send(await self._taught(driver.task, found))
        except Exception as error:
            # The same boundary: a session that cannot be built or packed loses its traces, not its record.
            bug = evolve(result, outcome=bug_outcome(identity, error), verdict=None, metrics={})
            await send(stamp_staleness(without_traces(identity, driver.task, turns, bug), versions))

    async def _taught(self, task: TaskSpec, found: Trajectory) -> Trajectory:
        """The trajectory with the scores of the task's teacher, which has the time that is left of
        `post_s`.
        """
        if not task.carry.teacher or not found.trainable_tokens:
            return found
        if lost_to_the_machine(found.outcome):  # Nobody trains on it, and its next attempt may be waiting.
            return unscored(found, "its session was lost to the machine")
        left = max(0.0, task.budgets.post_s - found.timing.post_s)
        scope = trio.CancelScope(deadline=trio.current_time() + left)
        self._scoring_scopes.add(scope)
        try:
            return await taught(found, task.carry.teacher, self.scoring, scope)
        finally:
            self._scoring_scopes.discard(scope)

    def end(self, end: SessionEnd) -> None:
        """Count and publish a session that is over."""
        self.publish(end.trajectory)
        self.tally.published(end.trajectory)

    async def end_session_now(self, end: SessionEnd) -> None:
        """`end` as an asynchronous function, which `start` needs."""
        self.end(end)

    def publish(self, trajectory: Trajectory) -> None:
        """Publish a finished sample."""
        log_end(trajectory)
        self.results.publish(trajectory)

    def live(self, kind: type[Driver], task_id: str | None = None) -> tuple[Driver, ...]:
        """The live drivers of a type, oldest first, of one task or of all."""
        return tuple(
            each
            for each in self._drivers.values()
            if isinstance(each, kind) and task_id in (None, each.identity.task_id)
        )

    def get(self, kind: type[Driver], session_id: str) -> Driver | None:
        """The live driver of a session; None when it is over or of another type."""
        found = self._drivers.get(session_id)
        return found if isinstance(found, kind) else None

    def of_task(self, task_id: str) -> tuple[SessionDriver, ...]:
        """The live drivers of a task, of any type."""
        return tuple(each for each in self._drivers.values() if each.identity.task_id == task_id)

    def find(self, session_id: str) -> SessionDriver | None:
        """The live driver of a session, of any type."""
        return self._drivers.get(session_id)

    def cancel_all(self) -> None:
        """End every session because the node stops. Each keeps its turns. A session is published without its
        teacher's logprobs if those are not there yet.
        """
        for scope in self._scoring_scopes:
            scope.cancel()
        for driver in self._drivers.values():
            driver.cancel("stopped")

    async def stop(self, *, cancel: bool) -> None:
        """Start no more sessions and wait until all are over. With `cancel` they are ended now and keep their
        turns. The wait is bounded by their own budgets.
        """
        self.stopping = True
        self.results.shorten_waits()
        if cancel:
            self.cancel_all()
        if self._drivers:
            await self._emptied.wait()
        await self.results.leave()


def log_end(trajectory: Trajectory) -> None:
    """Log how a session ended, on one line."""
    outcome, reward = trajectory.outcome, trajectory.reward
    why = (
        "" if outcome.status == "completed" else " ".join((outcome.reason or "").split())[:REASON_CHARACTERS]
    )
    logger.info(
        "session %s of task %s is over: %s, reward %s, %d turns, %d tokens, %.1f s%s",
        trajectory.session_id,
        trajectory.task_id,
        outcome.status,
        "none" if reward is None else f"{reward:g}",
        len(trajectory.turns),
        trajectory.sampled_tokens,
        trajectory.timing.run_s,
        f": {why}" if why else "",
    )


def bug_outcome(identity: Identity, error: Exception) -> Outcome:
    """Log a bug of the node and return the outcome of its session."""
    logger.error("session %s met a bug", identity.session_id, exc_info=error)
    return Outcome(status="error", boundary="node", reason=f"{type(error).__name__}: {error}")
