"""Tasks become sessions: taken whole or not at all, in their order, and over when they are over."""

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from memory_log import MemoryLog
from session_kit import agent, submit, task, town
from trio.abc import Clock

from polarnode.containers.pool import RuntimeDemand
from polarnode.core.errors import Busy, JournalError, Refused
from polarnode.core.task import (
    BuilderSpec,
    CarrySpec,
    EvaluatorSpec,
    FileSpec,
    HarnessSpec,
    PrepareStep,
    RuntimeSpec,
    TaskSpec,
)
from polarnode.journal.log.port import NodeFacts, NodeRow
from polarnode.merge.token_extras import CallExtras
from polarnode.rollouts import scheduler as scheduler_module
from polarnode.rollouts.admission import TaskSubmission, admitted
from polarnode.rollouts.session import Session

PROGRAMS = {"agent": agent(turns=2, each=10.0)}


# ── taking a task ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("requires", "error", "sentence"),
    [
        ({}, Refused, "serve large, tiny: name the one that is meant, as requires.model = large"),
        ({"model": "large"}, None, ""),
        ({"gpu": "x"}, None, ""),
        ({"gpu": "y"}, Busy, "only nodes that are away have the labels that requires names: c, d"),
        (
            {"gpu": "z"},
            Refused,
            "no node of this log has the labels that requires names: a has gpu=x, model=tiny",
        ),
    ],
    ids=["no model", "a model", "a label", "away", "nobody"],
)
async def test_required_labels_need_a_node(
    requires: dict[str, str],
    error: type[Exception] | None,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One that is started again comes back with its labels: a client waits for it, and is told of no mistake."""

    def row(name: str, state: Any, **labels: str) -> NodeRow:
        facts = NodeFacts(name=name, labels=labels)
        return NodeRow(incarnation=1, facts=facts, state=state, sign=0, serving={"": "0"})

    rows = (
        row("a", "alive", gpu="x", model="tiny"),
        row("b", "alive", model="large"),
        row("c", "lost", gpu="y", model="tiny"),
        row("d", "left", gpu="y", model="tiny"),
        row("e", "replaced", gpu="z", model="tiny"),
    )

    async def nodes(_: object, *, every: bool = False) -> tuple[NodeRow, ...]:
        return tuple(each for each in rows if every or each.state == "alive")

    monkeypatch.setattr(MemoryLog, "nodes", nodes, raising=False)

    async with town(tmp_path) as place:
        scheduler = place.scheduler
        submission = TaskSubmission(
            log=scheduler.log,
            admission=scheduler.admission,
            registry=scheduler.registry,
            now=scheduler.now,
            runs_tasks=True,
        )
        with nullcontext() if error is None else pytest.raises(error, match=sentence):
            model = await submission._check_nodes(task(requires=requires), here=False)
            assert model == requires.get("model", "tiny")


async def test_task_becomes_group_of_sessions(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, PROGRAMS) as place:
        spec = task(num_samples=4, metadata={"split": "train"})
        task_id, session_ids = await submit(place.scheduler, spec, idempotency_key="k")
        await trio.sleep(0.01)
        assert list(place.log.tasks) == [task_id]
        assert [each.session_id for each in place.notes.started] == list(session_ids)
        assert len(set(session_ids)) == 4
        other, _ = await submit(place.scheduler, task(task_id="mine", group_id="ours"))
        assert other == "mine"
    group = [each for each in place.published if each.task_id == task_id]
    assert sorted(each.sample_index for each in group) == [0, 1, 2, 3]
    assert {(each.group_id, each.model, each.node, each.harness) for each in group} == {
        (task_id, "tiny", "n0", "shell")
    }
    assert group[0].metadata == {"split": "train"}
    assert [each.group_id for each in place.published if each.task_id == "mine"] == ["ours"]


@pytest.mark.parametrize(
    ("wrong", "path", "sentence"),
    [
        ({"harness": HarnessSpec(name="nobody")}, "$.harness.name", "no harness is called nobody"),
        ({"harness": HarnessSpec(name="shell")}, "$.harness.command", "needs a command"),
        (
            {"harness": HarnessSpec(name="pi", settings={"apii": "x"})},
            "$.harness.settings.apii",
            "no setting apii",
        ),
        (
            {"harness": HarnessSpec(name="pi", settings={"api": "x"})},
            "$.harness.settings.api",
            "must be one of",
        ),
        ({"harness": HarnessSpec(name="mini_swe_agent", settings={"x": 1})}, "$.harness", None),
        ({"harness": HarnessSpec(import_path="os:system")}, None, "may not be imported"),
        (
            {"harness": HarnessSpec(import_path="session_kit:BROKEN_HARNESS")},
            None,
            "cannot be launched with these settings: no such thing",
        ),
        (
            {"harness": HarnessSpec(import_path="session_kit:WRONG_HARNESS")},
            "$.harness",
            "gave list: return a polarnode.core.ports.Launch",
        ),
        ({"builder": BuilderSpec(name="nobody")}, "$.builder.name", "there is no builder 'nobody'"),
        ({"builder": BuilderSpec(config={"x": 1})}, "$.builder.config.x", "no setting 'x'"),
        (
            {"builder": BuilderSpec(import_path="session_kit:NO_EVALUATOR")},
            "$.builder.import_path",
            "is not callable",
        ),
        ({"evaluator": EvaluatorSpec(name="nobody")}, "$.evaluator.name", "no evaluator is called nobody"),
        ({"evaluator": EvaluatorSpec(name="command")}, "$.evaluator.config", "either argv or script"),
        (
            {"evaluator": EvaluatorSpec(import_path="session_kit:PICKY")},
            None,
            "cannot work with this config: 'threshold'",
        ),
        (
            {"evaluator": EvaluatorSpec(import_path="session_kit:NO_EVALUATOR")},
            "$.evaluator.import_path",
            "is not a",
        ),
    ],
)
async def test_unrunnable_task_is_refused_with_path(
    autojump_clock: Clock, tmp_path: Path, wrong: dict[str, Any], path: str | None, sentence: str | None
) -> None:
    async with town(tmp_path) as place:
        with pytest.raises(Refused) as caught:
            place.submit(num_samples=3, **wrong)
        assert (caught.value.path or "").startswith(path or "")
        assert sentence is None or sentence in str(caught.value)
        assert (list(place.log.tasks), place.notes.started, place.scheduler.sessions()) == ([], [], ())


async def test_routed_experts_need_engine_support(autojump_clock: Clock, tmp_path: Path) -> None:
    """A task that asks for experts is refused where the engine cannot report them."""
    async with town(tmp_path, PROGRAMS) as place:
        scheduler, dense = place.scheduler, "the model tiny is dense; leave it out"
        scheduler.admission = evolve(scheduler.admission, unrouted=dense)
        with pytest.raises(
            Refused, match="is not available here: the model tiny is dense; leave it out"
        ) as caught:
            place.submit(carry=CarrySpec(routed_experts=True))
        assert caught.value.path == "$.carry.routed_experts"
        place.submit(carry=CarrySpec(top_logprobs=3))


async def test_session_extras_respect_node_limit(autojump_clock: Clock, tmp_path: Path) -> None:
    """A session carries what its task asks for, up to the node's limit."""
    async with town(tmp_path, PROGRAMS) as place:
        scheduler = place.scheduler
        scheduler.session_factory = evolve(scheduler.session_factory, carried_limit=5)
        place.submit(carry=CarrySpec(top_logprobs=3, routed_experts=True))
        await place.until("run")
        (session,) = place.scheduler.registry.live(Session)
        assert session.live.carrier.carry(None) == CallExtras(top_logprobs=3, routed_from=0, room=5)
        await place.over()
        plain = await place.one()
    carrying = place.published[0]
    # this harness calls no engine
    assert (carrying.metrics["carried_bytes"], carrying.metrics["uncarried_turns"]) == (0, 0)
    assert "carried_bytes" not in plain.metrics


def test_every_harness_passes_dry_run() -> None:
    for name in ("pi", "mini_swe_agent", "claude_code"):
        found = admitted(
            task(harness=HarnessSpec(name=name)), model="tiny", context_length=4096, allowed_imports=()
        )
        assert (found.harness.name, found.evaluator.name) == (name, "session_completed")


async def test_unrecorded_task_starts_nothing(autojump_clock: Clock, tmp_path: Path) -> None:
    """A task that the journal cannot take starts nothing."""
    async with town(tmp_path, PROGRAMS) as place:
        place.log.refuse_task = JournalError("the disk is full")
        with pytest.raises(JournalError):
            place.submit(num_samples=3)
        assert (
            place.scheduler.statistics().live,
            place.sessions_by_key.statistics().live,
            place.notes.started,
        ) == (
            0,
            0,
            [],
        )


# ── who goes first ────────────────────────────────────────────────────────────


async def test_urgent_task_passes_waiting_tasks(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, PROGRAMS, run=1, live=1) as place:
        first = place.submit(priority=50)
        await place.until("run")
        low, middle, high = place.submit(priority=10), place.submit(priority=50), place.submit(priority=90)
    assert [each.session_id for each in place.published] == [*first, *high, *middle, *low]


async def test_stages_respect_their_limits(autojump_clock: Clock, tmp_path: Path) -> None:
    most: dict[str, int] = {}
    async with (
        town(tmp_path, PROGRAMS, live=5, init=2, run=3, post=1) as place,
        trio.open_nursery() as nursery,
    ):

        async def watch() -> None:
            while True:
                for name, stage in place.scheduler.statistics().stages.items():
                    most[name] = max(most.get(name, 0), stage.inside)
                await trio.sleep(0.1)

        nursery.start_soon(watch)
        each_its_own = RuntimeSpec(prepare=(PrepareStep(argv=("sleep", "1")),), reuse_prepared=False)
        place.submit(num_samples=12, runtime=each_its_own, evaluator="COUNTS")
        await place.over()
        nursery.cancel_scope.cancel()
    assert most == {"live": 5, "init": 2, "run": 3, "post": 1}
    assert [each.outcome.status for each in place.published] == ["completed"] * 12


# ── ending ────────────────────────────────────────────────────────────────────


async def test_cancel_ends_only_own_sessions(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, PROGRAMS, live=3) as place:
        mine, others = (
            place.submit(num_samples=2, task_id="mine"),
            place.submit(num_samples=2, task_id="others"),
        )
        await trio.sleep(5)
        assert await place.scheduler.cancel("mine")
        assert not await place.scheduler.cancel("nobody's")
        await place.over()
        assert not await place.scheduler.cancel("mine")
    assert {place.of(each).outcome.status for each in mine} == {"cancelled"}
    assert {place.of(each).outcome.status for each in others} == {"completed"}


@pytest.mark.parametrize("cancel", [True, False])
async def test_stop_refuses_new_and_waits(autojump_clock: Clock, tmp_path: Path, cancel: bool) -> None:
    async with town(tmp_path, {"agent": agent(turns=50, each=10.0)}, live=2) as place:
        place.submit(num_samples=3)
        await trio.sleep(15)
        async with trio.open_nursery() as nursery:
            for _ in range(2):  # asked twice, as by a signal and the end of the block
                nursery.start_soon(partial(place.scheduler.registry.stop, cancel=cancel))
            await trio.sleep(0.1)
            with pytest.raises(Refused, match="stopping"):
                place.submit()
        assert (
            place.scheduler.statistics().live,
            place.scheduler.statistics().stopping,
            len(place.published),
        ) == (0, True, 3)
        await place.scheduler.registry.stop(cancel=True)
    statuses = [each.outcome.status for each in place.published]
    assert statuses == ["cancelled"] * 3 if cancel else ["completed"] * 3


async def test_stopping_node_judges_ended_sessions(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, PROGRAMS) as place:
        place.submit(evaluator="COUNTS")
        await place.until("post")
        await place.scheduler.registry.stop(cancel=True)
        assert [each.reward for each in place.published] == [2.0]


async def test_unpublishable_session_is_logged_alone(
    autojump_clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A session that cannot be published at all is logged, and no other learns of it."""
    async with town(tmp_path, PROGRAMS) as place:
        place.notes.refuse = [TypeError("no"), TypeError("no again")]
        every = place.submit(num_samples=3)
        await place.over()
        assert [each.outcome.status for each in place.published] == ["completed"] * 2
        (lost,) = set(every) - {each.session_id for each in place.published}
        (status,) = (each for each in place.scheduler.sessions() if each.session_id == lost)
        assert (status.phase, status.outcome) == ("ended", "error"), "whoever waits for it learns of it"
        place.notes.started = [each for each in place.notes.started if each.session_id != lost]
        place.notes.turns = [turn for turn in place.notes.turns if turn.session_id != lost]
    assert any(
        "was not published" in record.getMessage() and record.levelno == logging.ERROR
        for record in caplog.records
    )


# ── what can be seen ──────────────────────────────────────────────────────────


async def test_overview_of_sessions(
    autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_ENDED_SESSIONS", 2)
    async with town(tmp_path, PROGRAMS, live=1) as place:
        place.submit(task_id="a", num_samples=2, evaluator="COUNTS")
        await place.until("run")
        await trio.sleep(15)
        first, second = sorted(place.scheduler.sessions("a"), key=lambda each: -each.turns)
        assert (first.phase, first.turns, first.outcome, first.reward) == ("run", 1, None, None)
        assert first.sampled_tokens > 0
        assert (second.phase, second.turns) == ("init", 0)
        assert first.age_s is not None
        assert first.age_s >= 15
        assert first.last_turn_s is not None
        assert 0 <= first.last_turn_s <= first.phase_s <= first.age_s
        assert (second.last_turn_s, second.phase_s) == (None, second.age_s)
        assert place.scheduler.sessions("b") == ()
        await place.over()
        assert {
            (each.phase, each.outcome, each.reward, each.traces) for each in place.scheduler.sessions("a")
        } == {("ended", "completed", 2.0, 1)}
        place.submit(task_id="b")
        await place.over()
        assert [each.task_id for each in place.scheduler.sessions()] == ["a", "b"], (
            "the oldest ended ones are let go"
        )


async def test_key_expires_with_session(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, PROGRAMS) as place:
        (session_id,) = place.submit()
        key = place.session(session_id).live.key
        assert place.sessions_by_key.by_key(key) is not None
        await place.over()
        assert place.sessions_by_key.by_key(key) is None
        assert place.sessions_by_key.ended_session_id(key) == session_id


# ── warm containers ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("cancel", [True, False])
async def test_warm_container_demand_ends_at_zero(
    autojump_clock: Clock, tmp_path: Path, cancel: bool
) -> None:
    async with town(tmp_path, PROGRAMS, init=1, warm=2) as place:
        place.submit(
            num_samples=6, task_id="t", runtime=RuntimeSpec(prepare=(PrepareStep(argv=("sleep", "1")),))
        )
        assert place.runtimes.wanted == {"base": 2}
        await trio.sleep(3.5)
        if cancel:
            await place.scheduler.cancel("t")
        await place.over()
        assert (place.runtimes.wanted, place.runtimes.most) == ({"base": 0}, {"base": 2})


def test_container_demand_ignores_later_fields() -> None:
    """Tasks that differ only in what comes later share one demand for containers."""
    told: list[tuple[str, int]] = []
    demand = RuntimeDemand(lambda spec, count: told.append((spec.image, count)), 3)
    plain, busy = (
        RuntimeSpec(image="i"),
        RuntimeSpec(image="i", files=(FileSpec(path="x", text=""),), env={"A": "b"}),
    )
    demand.expect(["a", "b"], plain)
    demand.expect(["c", "d"], busy)
    demand.expect(["e"], RuntimeSpec(image="i", memory_mb=9999))
    for session_id in ("a", "a", "b", "nobody", "c", "d", "e"):
        demand.served(session_id)
    assert told == [("i", 2), ("i", 3), ("i", 1), ("i", 2), ("i", 1), ("i", 0), ("i", 0)]


def test_pool_without_warmth_gets_no_demand() -> None:
    told: list[int] = []
    demand = RuntimeDemand(lambda _, count: told.append(count), 0)
    demand.expect(["a", "b"], RuntimeSpec())
    demand.served("a")
    demand.expect(["c"], RuntimeSpec())
    demand.served("b")
    demand.served("c")
    assert told == []
    assert not demand._coming


def test_nul_in_launch_is_refused() -> None:
    """A harness of a user's own may make arguments of its settings; no program takes such a one."""
    shell = HarnessSpec(name="shell", command=("sh", "-c", "echo a\0b"))
    with pytest.raises(Refused, match=r"harness\.settings put a NUL character") as refused:
        admitted(
            TaskSpec(instruction="Do it.", harness=shell), model="m", context_length=1000, allowed_imports=()
        )
    assert refused.value.path == "$.harness.settings"
