"""A node in memory for tests of sessions: real gates, lineages, live sessions and builders; containers and
harnesses are functions.

`town()` opens one; whatever a test did in it, leaving it checks what must hold at every end: all containers
closed, all gates empty, nothing wanted warm, one trajectory a session, and each of them within the laws.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any, cast

import merge_toys as toys
import trio
from attrs import define, evolve, field
from fakes_runtime import Call, MemoryRuntime, MemoryRuntimes, ProgramFunction
from memory_log import MemoryLog

from polarnode.containers.egress.proxy import NodeEgress
from polarnode.core import ports
from polarnode.core.conversation import Json, Message, ModelRequest, Sampling
from polarnode.core.errors import EvaluatorError, ForkError
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.core.task import Budgets, EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskSpec
from polarnode.core.trajectory import Built, Trajectory, Turn, Verdict
from polarnode.evaluators.contract import Evaluator, Finished
from polarnode.gateway.live_sessions import LiveSession, LiveSessions
from polarnode.harnesses.harness import Harness
from polarnode.journal.held import ResultStore
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import Claim, Log, NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.merge.invariants import check
from polarnode.merge.trajectory import Identity
from polarnode.rollouts.admission import TaskAdmission, TaskSubmission, admitted
from polarnode.rollouts.evaluations import Evaluations
from polarnode.rollouts.forks import ForkNodes, ForkParents, NoParents
from polarnode.rollouts.freezer import ContainerFreezer
from polarnode.rollouts.lifecycle import LiveSessionFactory
from polarnode.rollouts.scheduler import Scheduler, make_scheduler
from polarnode.rollouts.services import (
    CachePlaces,
    NoCachePlaces,
    NodeIdentity,
    SessionJournal,
    SessionOrder,
    StageSlots,
)
from polarnode.rollouts.session import Session, SessionServices
from polarnode.rollouts.session_containers import NodeContainers
from polarnode.rollouts.snapshots import NoCopies, NodeSnapshots, SnapshotCopies
from polarnode.support.concurrency import PrioritySemaphore, open_background
from polarnode.support.metrics import NodeCounters

ALLOWED = ("session_kit",)


# ── what a node writes down ───────────────────────────────────────────────────


@define(eq=False, repr=False)
class Notebook:
    """The journal's synchronous side, as lists. `refuse` is raised when the next ends are packed, one each."""

    refuse: list[Exception] = field(factory=list)
    started: list[Identity] = field(factory=list)
    turns: list[Turn] = field(factory=list)

    def pack_time(self) -> float:
        """The time of an end, which is asked for when it is packed: `refuse` is what the next packings raise."""
        if self.refuse:
            raise self.refuse.pop(0)
        return 0.0

    def record_session(self, identity: Identity) -> None:
        self.started.append(identity)

    def record_turn(self, turn: Turn) -> None:
        self.turns.append(turn)

    def turns_of(self, session_id: str) -> list[Turn]:
        """A session's turns as the journal has them: a later one of the same number replaces it."""
        return list({each.index: each for each in self.turns if each.session_id == session_id}.values())


# ── containers that take time, or never come ──────────────────────────────────


@define(eq=False, kw_only=True, repr=False)
class Containers(MemoryRuntimes):
    """`takes` seconds an opening, one each, then none. `wanted` keeps the last number of each shape, `most`
    the highest.
    """

    takes: list[float] = field(factory=list)
    most: "Counter[str]" = field(factory=Counter)
    sessions: list[str] = field(factory=list)

    @asynccontextmanager
    async def open(
        self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float
    ) -> AsyncIterator[MemoryRuntime]:
        self.sessions.append(session_id)
        if self.takes:
            await trio.sleep(self.takes.pop(0))
        async with super().open(spec, session_id=session_id, lifetime_s=lifetime_s) as runtime:
            yield runtime

    def prewarm(self, spec: RuntimeSpec, count: int) -> None:
        super().prewarm(spec, count)
        self.most[spec.image] = max(self.most[spec.image], count)


# ── a node ────────────────────────────────────────────────────────────────────


@define(eq=False, repr=False)
class MemoryNode:
    scheduler: Scheduler
    runtimes: Containers
    notes: Notebook
    log: MemoryLog
    sessions_by_key: LiveSessions
    stages: StageSlots
    nursery: trio.Nursery
    doors: "Counter[str]"

    def set_judges(self, judge: Any, names: frozenset[str]) -> None:
        """Give the next tasks and sessions these judges."""
        self.scheduler.admission = evolve(self.scheduler.admission, judges=names)
        self.scheduler.services = evolve(self.scheduler.services, judge=judge)

    @property
    def published(self) -> list[Trajectory]:
        return self.log.published

    def session(self, session_id: str) -> Session:
        found = self.scheduler.registry.get(Session, session_id)
        assert found is not None
        return found

    def submit(self, **more: Any) -> list[str]:
        spec = task(**more)
        self.scheduler.registry.require_not_stopping("tasks")
        self.scheduler.admission.admit(spec)
        task_id = spec.task_id or f"task-{len(self.log.tasks)}"
        ids = tuple(f"{task_id}-{index}" for index in range(spec.num_samples))
        self.log.put(spec, task_id, ids)
        for claim in self.log.claim_now():  # as the claims do in their next look
            self.scheduler.begin(claim)
        return list(ids)

    async def until(self, phase: str, session_id: str | None = None) -> None:
        """Until some session, or the one named, is in the phase."""
        while not any(  # noqa: ASYNC110
            each.phase == phase and session_id in (None, each.session_id)
            for each in self.scheduler.sessions()
        ):
            await trio.sleep(0.01)

    async def over(self) -> None:
        unwritten = self.scheduler.registry.results.unwritten
        with trio.fail_after(1e7):
            while self.log.open_places > len(unwritten) or self.scheduler.statistics().live:  # noqa: ASYNC110
                await trio.sleep(0.01)

    async def one(self, **more: Any) -> Trajectory:
        """A task of one session, run to its end."""
        (session_id,) = self.submit(**more)
        await self.over()
        return self.of(session_id)

    def of(self, session_id: str) -> Trajectory:
        (found,) = (each for each in self.published if each.session_id == session_id)
        return found

    def check_left(self) -> None:
        """What holds at every end, also a violent one."""
        assert not any(runtime.alive for runtime in self.runtimes.opened), "a container was left open"
        for name in ("live", "init", "run", "post"):
            assert (
                getattr(self.stages, name).statistics().inside,
                getattr(self.stages, name).statistics().waiting,
            ) == (0, 0), name
        assert not any(self.runtimes.wanted.values()), "warm containers are wanted for nobody"
        assert self.sessions_by_key.statistics().live == 0
        assert not +self.doors, "a door is still served"
        for trajectory in self.published:
            check(trajectory.turns, Built(traces=trajectory.traces, left_out=trajectory.left_out))
            assert all(trace.reward == trajectory.reward for trace in trajectory.traces)

    def check_published(self) -> None:
        """Every session has one trajectory, and every turn the journal took is in it."""
        began = {each.session_id for each in self.notes.started}
        assert len({each.session_id for each in self.published}) == len(self.published)
        assert began <= {each.session_id for each in self.published}
        assert not any(each.turns for each in self.published if each.session_id not in began)
        assert Counter(turn.session_id for each in self.published for turn in each.turns) == Counter(
            turn.session_id for turn in self.notes.turns
        )


@asynccontextmanager
async def town(
    tmp_path: Path,
    programs: Mapping[str, ProgramFunction] | None = None,
    *,
    live: int = 8,
    init: int = 8,
    run: int = 8,
    post: int = 8,
    warm: int = 2,
    places: CachePlaces | None = None,
    egress: Any = None,
) -> AsyncIterator[MemoryNode]:
    runtimes: Any  # held to the same contract as the real ones
    runtimes, notes, sessions_by_key, doors = (
        Containers(programs=dict(programs or {})),
        Notebook(),
        LiveSessions(),
        Counter[str](),
    )
    for program in runtimes.programs.values():
        setattr(program, "sessions_by_key", sessions_by_key)  # noqa: B010 - how a program in memory finds the session of its key
    stages = StageSlots(
        live=PrioritySemaphore(limit=live),
        init=PrioritySemaphore(limit=init),
        run=PrioritySemaphore(limit=run),
        post=PrioritySemaphore(limit=post),
    )
    tally, egress = NodeCounters(), egress or NodeEgress()
    admission = TaskAdmission(
        identity=NodeIdentity(node="n0", model="tiny"),
        context_length=4096,
        allowed_imports=ALLOWED,
        egress=egress.names,
    )
    services = SessionServices(
        journal=notes,
        stages=stages,
        parents=NoParents(),
        snapshots=NodeSnapshots(folder=tmp_path, runtimes=runtimes, tally=tally),
        drops_thinking=drops_thinking,
        containers=NodeContainers(
            runtimes=runtimes, ensure_image=_ensure_image, folder=tmp_path, egress=egress
        ),
        serve_endpoint=lambda session_id, door: _serve_door(doors, session_id, door),
        context_length=4096,
        places=places or NoCachePlaces(),
        freezer=ContainerFreezer(),
        judge=no_judge,
    )
    async with trio.open_nursery() as nursery:
        log = MemoryLog(notes.turns_of)
        scheduler = make_scheduler(
            cast(Log, log),
            nursery,
            admission=admission,
            services=services,
            session_factory=LiveSessionFactory(journal=notes, tally=tally, drops_thinking=drops_thinking),
            sessions_by_key=sessions_by_key,
            now=lambda: 0.0,
            most_claimed=1_000,
            warm=warm,
        )
        scheduler.registry.results.now = notes.pack_time
        joined = await log.join(NodeFacts(name="n0"))
        scheduler.claims.membership.incarnation = joined.incarnation
        async with running(scheduler):
            found = MemoryNode(scheduler, runtimes, notes, log, sessions_by_key, stages, nursery, doors)
            yield found
            await found.over()
            await scheduler.registry.stop(cancel=False)
    found.check_left()
    found.check_published()


@asynccontextmanager
async def _serve_door(doors: "Counter[str]", session_id: str, door: socket) -> AsyncIterator[None]:
    assert door.fileno() >= 0, "the door of a closed container"
    doors[session_id] += 1
    try:
        yield
    finally:
        doors[session_id] -= 1


@asynccontextmanager
async def running(scheduler: Scheduler) -> AsyncIterator[None]:
    """The scheduler claims places and delivers results for as long as the block."""
    async with (
        open_background(scheduler.registry.results.run),
        open_background(partial(scheduler.claims.run, scheduler)),
    ):
        yield


async def submit(scheduler: Scheduler, spec: TaskSpec, **more: Any) -> tuple[str, tuple[str, ...]]:
    """Submit a task as the node of the scheduler does. Gives its id and those of its sessions."""
    submission = TaskSubmission(
        log=scheduler.log,
        admission=scheduler.admission,
        registry=scheduler.registry,
        now=scheduler.now,
        runs_tasks=True,
    )
    return await submission.submit(spec, **more)


def make_evaluations(scheduler: Scheduler, journal: Journal, *, workers: int) -> Evaluations:
    """The evaluations of the scheduler's node."""
    services, membership = scheduler.services, scheduler.claims.membership
    return Evaluations(
        admission=scheduler.admission,
        stages=services.stages,
        containers=services.containers,
        judge=services.judge,
        copies=services.snapshots.copies,
        journal_health=journal.health,
        now=journal.now,
        log=scheduler.log,
        incarnation=lambda: membership.incarnation,
        workers=workers,
    )


@asynccontextmanager
async def life(
    path: Path, programs: Mapping[str, ProgramFunction]
) -> AsyncIterator[tuple[Journal, Scheduler, MemoryNode]]:
    """A life of a node over containers in memory and the journal at `path`. Leaving it waits for the
    sessions.
    """
    async with open_journal(path, now=time.time) as journal, town(path.parent, programs) as place:
        log, identity = SqliteLog(journal), NodeIdentity(node="n1", model="tiny")
        parents = ForkNodes(
            log=log,
            journal_writer=journal.writer,
            journal_reader=journal.reader,
            node="n1",
            snapshots=path.parent,
        )
        async with scheduling(log, place, journal.writer, identity=identity, parents=parents) as scheduler:
            await scheduler.claims.membership.join(NodeFacts(name="n1"))
            yield journal, scheduler, place
            while scheduler.log.open_places > len(scheduler.registry.results.unwritten):  # noqa: ASYNC110
                await trio.sleep(0.005)
        await journal.writer.flush()


@asynccontextmanager
async def scheduling(
    log: Log,
    place: MemoryNode,
    journal: SessionJournal,
    *,
    identity: NodeIdentity | None = None,
    allowed_imports: tuple[str, ...] = ALLOWED,
    parents: ForkParents | None = None,
    copies: SnapshotCopies | None = None,
    held: ResultStore | None = None,
) -> AsyncIterator[Scheduler]:
    """A scheduler over the containers of `place` that claims from a log of its own, or from a shared one, and
    records in another journal. Leaving it waits for the sessions that began.
    """
    usual = place.scheduler
    scheduler = make_scheduler(
        log,
        place.nursery,
        admission=evolve(
            usual.admission, identity=identity or usual.admission.identity, allowed_imports=allowed_imports
        ),
        services=evolve(
            usual.services,
            journal=journal,
            parents=parents or NoParents(),
            snapshots=evolve(usual.services.snapshots, copies=copies or NoCopies()),
        ),
        session_factory=evolve(usual.session_factory, journal=journal),
        sessions_by_key=place.sessions_by_key,
        now=time.time,
        most_claimed=1_000,
        warm=0,
        held=held,
    )
    async with running(scheduler):
        yield scheduler
        await scheduler.registry.stop(cancel=False)


def drops_thinking(new: Sequence[Message]) -> bool:
    """As a template that leaves out earlier thinking when the user says something."""
    return any(message.role == "user" for message in new)


async def _ensure_image(name: str) -> None:
    await trio.lowlevel.checkpoint()


def no_judge(name: str) -> ports.Judge:
    raise EvaluatorError(f"no judge is called {name}")


def task(
    *, budgets: Mapping[str, Any] | None = None, evaluator: str | EvaluatorSpec | None = None, **more: Any
) -> TaskSpec:
    """A task whose harness is the program `agent`, judged by an evaluator of this module by name. Nothing is
    tried again unless `retries` says so.
    """
    said: dict[str, Any] = {
        "instruction": "do it",
        "harness": HarnessSpec(name="shell", command=("agent",)),
    } | more
    if isinstance(evaluator, str):
        evaluator = EvaluatorSpec(import_path=f"session_kit:{evaluator}")
    return TaskSpec(
        **said,
        budgets=Budgets(**({"retries": 0} | dict(budgets or {}))),
        **({"evaluator": evaluator} if evaluator else {}),
    )


def claim_of(session_id: str, spec: TaskSpec, *, attempt: int = 0) -> Claim:
    """What a log gives a node that runs the only place of a task."""
    return Claim(
        task_id="t",
        sample_index=0,
        session_id=session_id,
        attempt=attempt,
        incarnation=1,
        retries=attempt,
        spec=spec,
        submitted=0.0,
    )


def order(spec: TaskSpec | None = None, session_id: str = "s") -> SessionOrder:
    """The order of a session of a task."""
    spec = spec or task()
    found = admitted(spec, model="tiny", context_length=4096, allowed_imports=ALLOWED)
    who = Identity(
        session_id=session_id, task_id="t", group_id="g", sample_index=0, harness="shell", harness_version=None, model="tiny", node="n0"
    )  # fmt: skip
    return SessionOrder(identity=who, spec=spec, harness=found.harness, evaluator=found.evaluator)


# ── harnesses ─────────────────────────────────────────────────────────────────


def agent(
    *,
    turns: int = 2,
    each: float = 1.0,
    ends: int | Exception | float = 0,
    says: str = "",
    endless: bool = False,
) -> ProgramFunction:
    """A harness that makes `turns` turns of `each` seconds, prints, and ends with an exit code or an error;
    `endless`, it then sleeps for ever.
    """

    async def program(call: Call) -> int:
        live = session_of_call(program, call)
        history: list[Message] = [toys.user()]
        for _ in range(turns):
            turn = await ask(live, history, takes=each)
            if turn is None or turn.answer is None:
                break
            history += [turn.answer.as_message(), toys.user("go on")]
        call.stdout += says.encode()
        if endless:
            await trio.sleep_forever()
        if isinstance(ends, Exception):
            raise ends
        await trio.lowlevel.checkpoint()
        return int(ends)

    return program


def session_of_call(program: Any, call: Call) -> LiveSession:
    sessions_by_key: LiveSessions = program.sessions_by_key
    found = sessions_by_key.by_key(call.env["OPENAI_API_KEY"])
    assert found is not None
    return found


async def ask(live: LiveSession, history: list[Message], *, takes: float) -> Turn | None:
    """One model call as the model plane makes it: refused, or recorded however it ends. None when refused or
    cut by the session's end.
    """
    fault = live.refusal(history)
    if fault is not None:
        live.budget.count_refusal(fault, history)
        return None
    toy = toys.Session(live.session_id)
    toy.lineages, toy.samples = live.lineages, len(live.lineages.turns)
    with live.calls.enter(trio.CancelScope()):
        conversation = toys.ask(*history)
        pending = toy.begin(conversation)
        try:
            live.check_resumed(pending.plan, conversation)
        except ForkError:
            live.lineages.abandon_plan(pending.plan)
            return None
        if live.before_generation is not None:
            asked = ModelRequest(provider="toy", model="m", conversation=conversation, sampling=Sampling())
            await live.before_generation(pending.plan, asked)
        order = ports.GenerateOrder(request_id="", prompt=pending.prompt, sampling=Sampling(), stop_ids=())
        answers = live.inherited.answers
        if answers is not None:
            given = answers.take(pending.plan, order, alone=live.calls.samples == 1)
            if given is not None:
                live.commit(evolve(given, session_id=live.session_id))
                return given
        try:
            await trio.sleep(takes)
        except trio.Cancelled:
            live.commit(
                toy.turn(pending, toy.answer(pending.plan, "half a", finish="abort"), state="partial")
            )
            raise
        turn = toy.turn(pending, toy.answer(pending.plan, "an answer"))
        live.commit(turn)
        return turn
    return None


# ── evaluators, as users write them ───────────────────────────────────────────

Judge = Callable[[Finished], Awaitable[Any]]


def _evaluator(judge: Judge) -> Evaluator:
    return Evaluator(name=judge.__name__, evaluate=judge, check=lambda config: None)


async def _counts(finished: Finished) -> Verdict:
    await trio.sleep(3)
    return Verdict(reward=len(finished.turns), metrics={"seen": finished.outcome.status})


async def _raises(finished: Finished) -> Verdict:
    await trio.lowlevel.checkpoint()
    raise ZeroDivisionError("by my own hand")


async def _raises_in_nursery(finished: Finished) -> Verdict:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_raises, finished)
        nursery.start_soon(trio.sleep_forever)
    return Verdict(reward=0.0)


async def _judges_not(finished: Finished) -> Verdict:
    await trio.lowlevel.checkpoint()
    raise EvaluatorError("the test suite is gone")


async def _exits(finished: Finished) -> Verdict:
    await trio.lowlevel.checkpoint()
    raise SystemExit(3)


async def _hangs(finished: Finished) -> Verdict:
    await trio.sleep_forever()
    return Verdict(reward=1.0)


async def _hangs_and_falls(finished: Finished) -> Verdict:
    try:
        await trio.sleep_forever()
    finally:
        raise ValueError("while being ended")
    return Verdict(reward=1.0)


def _gives(value: Any) -> Evaluator:
    async def gives(finished: Finished) -> Any:
        await trio.lowlevel.checkpoint()
        return value

    return _evaluator(gives)


async def _reads(finished: Finished) -> Verdict:
    found = await finished.runtime.read(f"{finished.runtime.workdir}/answer")
    left = finished.left is finished.runtime
    return Verdict(reward=float(found == b"42"), metrics={"runtime": finished.runtime.id, "left": left})


async def _takes(finished: Finished) -> Verdict:
    found = await finished.left.read(f"{finished.left.workdir}/answer")
    return Verdict(
        reward=float(found == b"42"),
        metrics={"runtime": finished.runtime.id, "left": finished.left is not finished.runtime},
    )


def _refuses(config: Mapping[str, Json]) -> None:
    raise KeyError("threshold")


COUNTS, RAISES, JUDGES_NOT, EXITS, HANGS = (
    _evaluator(judge) for judge in (_counts, _raises, _judges_not, _exits, _hangs)
)
HANGS_AND_FALLS, RAISES_IN_NURSERY, READS = (
    _evaluator(judge) for judge in (_hangs_and_falls, _raises_in_nursery, _reads)
)
NAN, HUGE, TRUE, NOTHING = (
    _gives(Verdict(reward=float("nan"))),
    _gives(Verdict(reward=10**400)),
    _gives(Verdict(reward=True)),
    _gives(None),
)
WHOLE = _gives(Verdict(reward=2**50))
OBJECTS = _gives(Verdict(reward=1.0, metrics={"who": object()}))  # type: ignore[dict-item]
ODD = _gives(Verdict(reward=1, metrics={"pair": (1, 2), "nan": float("nan"), 1: 2}))  # type: ignore[dict-item]
TAKES = Evaluator(name="takes", evaluate=_takes, check=lambda config: None, fresh=True, copies=False)
PICKY = Evaluator(name="picky", evaluate=_counts, check=_refuses)
NO_EVALUATOR = "a word"


# ── harnesses and builders, as users write them ───────────────────────────────


def _fails_to_launch(order: HarnessOrder) -> Launch:
    raise IndexError("no such thing")


def _gives_no_launch(order: HarnessOrder) -> Any:
    return ["agent"]


def _fails_when_run(order: HarnessOrder) -> Launch:
    """Takes its dry run; the real one has another key."""
    if "dry" not in order.endpoint.key:
        raise IndexError("only when it counts")
    return Launch(argv=("agent",), env={}, files={})


def _fed(order: HarnessOrder) -> Launch:
    env = {"OPENAI_API_KEY": order.endpoint.key}
    return Launch(argv=order.command or ("agent",), env=env, files={}, stdin=order.instruction.encode())


def _fed_again(order: HarnessOrder) -> Launch:
    launch = _fed(order)
    return evolve(launch, argv=(*launch.argv, "--continue"))


BROKEN_HARNESS = Harness(name="broken", version=None, image="base", launch=_fails_to_launch)
WRONG_HARNESS = Harness(name="wrong", version=None, image="base", launch=_gives_no_launch)
LATE_HARNESS = Harness(name="late", version="1", image="base", launch=_fails_when_run)
# its exit codes mean nothing
LYING_HARNESS = Harness(name="liar", version="1", image="base", launch=_fed, exit_code_honest=False)
# it goes on with a conversation that it kept
KEEPING_HARNESS = Harness(name="keeper", version="1", image="base", launch=_fed, resume=_fed_again)


def broken_builder(turns: Any, config: Any) -> Built:
    if turns:
        raise IndexError("a builder's bug")
    return Built(traces=())


def garbage_builder(turns: Any, config: Any) -> Any:
    return Built(traces=("a trace",) if turns else ())  # type: ignore[arg-type]


def odd_builder(turns: Any, config: Any) -> Built:
    """Within the laws, and of a kind no journal can pack."""
    from polarnode.merge.builders import prefix_merging

    built = prefix_merging(turns, {})
    return Built(
        traces=tuple(evolve(trace, lineage=object()) for trace in built.traces), left_out=built.left_out
    )
