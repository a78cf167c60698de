"""Finished sessions evaluated again: each gets one reward event more, whatever its evaluator needs of it, and
nothing that was published changes.
"""

import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import session_kit as kit
import trio
import trio.testing
from attrs import define, evolve
from fakes_runtime import Call, ProgramFunction
from journal_samples import write_sessions
from judge_kit import ScriptedJudge
from session_kit import MemoryNode, agent, make_evaluations, scheduling, submit, task, town

from polarnode.containers.files import workspace_path
from polarnode.core.errors import Conflict, EvaluatorError, JournalDamaged, Refused
from polarnode.core.status import EvaluationStatus
from polarnode.core.task import EvaluationSpec, EvaluatorSpec, RuntimeSpec
from polarnode.core.trajectory import Trajectory
from polarnode.journal import queries
from polarnode.journal.entries import JournalEntry
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import LogUnavailable, NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.values import EventFilters
from polarnode.rollouts.evaluations import Evaluations
from polarnode.support.concurrency import open_background

KEEPS = RuntimeSpec(keep_workspace=True)
JUDGED = EvaluatorSpec(
    name="llm_judge", config={"judge": "j", "criteria": [{"name": "works", "description": "does it work?"}]}
)
GOOD = '{"criteria": {"works": {"reason": "because", "score": 10}}}'


def user(name: str, **more: Any) -> EvaluatorSpec:
    return EvaluatorSpec(import_path=f"session_kit:{name}", **more)


def writes(content: bytes) -> dict[str, ProgramFunction]:
    """A harness that writes /work/answer."""
    talks = agent(each=0.0)

    async def program(call: Call) -> int:
        call.runtime.files["/work/answer"] = content
        return await talks(call)

    return {"agent": program, "talks": talks}


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.005)


@define(eq=False)
class Place:
    town: MemoryNode
    journal: Journal
    evaluations: Evaluations

    async def session(self, **more: Any) -> Trajectory:
        _, (session_id,) = await submit(self.town.scheduler, task(**more))
        with trio.fail_after(60):
            while self.town.scheduler.log.open_places:  # noqa: ASYNC110 - real time, and short
                await trio.sleep(0.005)
        await self.journal.writer.flush()
        found = await self.journal.reader.query(queries.trajectory, session_id)
        assert found is not None
        return found

    async def again(self, *sessions: str, key: str | None = None, **more: Any) -> EvaluationStatus:
        """An evaluation, when it has finished."""
        spec = EvaluationSpec(sessions=sessions, **more)
        found: EvaluationStatus | None = await self.evaluations.accept(spec, idempotency_key=key)
        with trio.fail_after(60):
            while found is not None and not found.finished:
                await trio.sleep(0.01)
                found = await self.evaluations.status(found.evaluation_id)
        assert found is not None
        return found

    async def rewards(self) -> list[dict[str, Any]]:
        page = await self.journal.reader.events(0, filters=EventFilters(kinds=("reward",)))
        return [{"key": each.key, **orjson.loads(each.body)} for each in page.events]

    def published(self) -> list[Any]:
        """All that is on disk of the sessions' ends."""
        with sqlite3.connect(self.journal.reader.path) as db:
            found = db.execute("SELECT * FROM trajectories").fetchall()
            found += db.execute("SELECT * FROM sessions").fetchall()
            found += db.execute("SELECT * FROM events WHERE kind != 'reward'").fetchall()
        db.close()
        return found


@asynccontextmanager
async def place(tmp_path: Path, content: bytes = b"42") -> AsyncIterator[Place]:
    async with (
        open_journal(tmp_path / "journal.sqlite", now=lambda: 9.0) as journal,
        town(tmp_path / "sessions", writes(content)) as around,
    ):
        (tmp_path / "sessions").mkdir(exist_ok=True)
        async with scheduling(SqliteLog(journal), around, journal.writer) as scheduler:
            await scheduler.claims.membership.join(NodeFacts(name="n0"))
            around.scheduler = scheduler
            async with evaluating(around, journal) as evaluations:
                yield Place(around, journal, evaluations)


@asynccontextmanager
async def evaluating(around: MemoryNode, journal: Journal) -> AsyncIterator[Evaluations]:
    evaluations = make_evaluations(around.scheduler, journal, workers=2)
    async with open_background(evaluations.run):
        yield evaluations


async def test_unavailable_judge_is_asked_again(tmp_path: Path) -> None:
    def down(name: str) -> Any:
        raise EvaluatorError("judge 'j' does not answer")

    async with place(tmp_path) as here:
        here.town.set_judges(down, frozenset({"j"}))
        first = await here.session(evaluator=JUDGED)
        assert (first.outcome.boundary, first.reward) == ("evaluator", None)
        assert first.metrics["run_outcome"] == {
            "status": "completed",
            "clock": None,
            "exit_code": 0,
            "boundary": None,
            "reason": None,
            "log_tail": None,
        }
        before = here.published()
        judge = ScriptedJudge([GOOD])
        here.evaluations.admission, here.evaluations.judge = here.town.scheduler.admission, judge
        found = await here.again(first.session_id, reason="the judge was down")
        (one,) = found.sessions
        assert (one.state, one.n, one.first_reward, one.reward) == ("evaluated", 1, None, 1.0)
        assert "completed" in str(judge.asked[0].messages), "the judge sees how the run ended"
        (event,) = await here.rewards()
        assert (event["key"], event["reward"], event["first_reward"], event["reason"]) == (
            f"reward:{first.session_id}:1",
            1.0,
            None,
            "the judge was down",
        )
        assert (event["evaluator"], len(event["evaluator_digest"]), event["given"]) == ("llm_judge", 16, 9.0)
        assert here.published() == before
        assert len(here.town.runtimes.opened) == 1, "a judge of turns needs no container"


@pytest.mark.parametrize("runtime", [KEEPS, RuntimeSpec(artifacts=("./",))], ids=["workspace", "artifacts"])
@pytest.mark.parametrize("evaluator", [user("READS"), user("READS", fresh_runtime=True), user("TAKES")])
async def test_fixed_test_reruns_in_kept_workspace(
    tmp_path: Path, runtime: RuntimeSpec, evaluator: EvaluatorSpec
) -> None:
    """A test that was wrong is run again in the workspace that was kept."""
    async with place(tmp_path) as here:
        first = await here.session(evaluator=user("NOTHING"), runtime=runtime)
        before = here.published()
        (one,) = (await here.again(first.session_id, evaluator=evaluator)).sessions
        assert (one.state, one.reward, one.error) == ("evaluated", 1.0, None)
        kept = sorted((tmp_path / "sessions").glob("*.tar"))
        assert len(kept) == 1, "an evaluation keeps nothing"
        (two,) = (await here.again(first.session_id, evaluator=evaluator)).sessions
        assert two.n == 2
        assert here.published() == before


async def test_missing_sessions_are_reported(tmp_path: Path) -> None:
    """What is missing is reported, and the other sessions are evaluated."""
    async with place(tmp_path) as here:
        bare = await here.session(evaluator=user("READS"))
        kept = await here.session(evaluator=user("WHOLE"), runtime=KEEPS)
        write_sessions(here.journal)  # sessions of another harness, which never had a container
        await submit(here.town.scheduler, task(evaluator=user("HANGS")))
        await here.town.until("post")
        (running,) = (each.session_id for each in here.town.scheduler.sessions() if each.outcome is None)
        await here.journal.writer.flush()
        ids = (bare.session_id, "gone", running, kept.session_id, "a")
        found = await here.again(*ids, evaluator=user("READS"), key="k")
        states = {each.session_id: (each.state, each.error) for each in found.sessions}
        assert states[kept.session_id] == ("evaluated", None)
        assert states["gone"] == (
            "refused",
            "it is not in the log: it never was, or retention has pruned it",
        )
        assert states[running] == ("refused", "it is not over: send it when its trajectory has come")
        state, error = states[bare.session_id]
        assert state == "failed"
        assert error == (
            "the session's workspace was not kept, and this evaluator works in it: set runtime.keep_workspace in"
            " tasks that are to be evaluated again"
        )
        assert states["a"][0] == "failed"
        failed = {each["session_id"]: each for each in await here.rewards()}[bare.session_id]
        assert (failed["reward"], failed["boundary"]) == (None, "evaluator")
        again = await here.evaluations.accept(
            EvaluationSpec(sessions=ids, evaluator=user("READS")), idempotency_key="k"
        )
        assert (again.created, again.evaluation_id) == (False, found.evaluation_id)
        with pytest.raises(Conflict, match="was requested before with another body"):
            await here.evaluations.accept(EvaluationSpec(task_id="a"), idempotency_key="k")
        for spec, sentence in (
            (
                EvaluationSpec(sessions=("gone", "lost")),
                "no session can be evaluated; gone: it is not in the log",
            ),
            (EvaluationSpec(task_id="none"), "none has 0 sessions in the log"),
            (
                EvaluationSpec(task_id="a", evaluator=EvaluatorSpec(name="nobody")),
                "no evaluator is called nobody",
            ),
        ):
            with pytest.raises(Refused, match=sentence):
                await here.evaluations.accept(spec, idempotency_key=None)
        here.town.scheduler.registry.cancel_all()
        here.town.nursery.cancel_scope.cancel()


async def test_interrupted_session_gets_no_reward(tmp_path: Path) -> None:
    async def hangs(call: Call) -> int:
        await trio.sleep_forever()

    async with place(tmp_path) as here:
        here.town.runtimes.programs["agent"] = hangs
        _, (session_id,) = await submit(here.town.scheduler, task(evaluator=user("WHOLE")))
        await until(lambda: here.town.scheduler.cancel_session(session_id))
        await until(lambda: not here.town.scheduler.log.open_places)
        await here.journal.writer.flush()
        (one,) = (await here.again(session_id)).sessions
        assert one.state == "failed"
        assert "the session ended as cancelled" in (one.error or "")


async def test_incomplete_workspace_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place(tmp_path) as here:
        collect = kit.MemoryRuntime.collect

        async def cut(self: Any, paths: Any, to: Path) -> Any:
            return evolve(await collect(self, paths, to), left_out=("big: it is too large",))

        monkeypatch.setattr(kit.MemoryRuntime, "collect", cut)
        first = await here.session(evaluator=user("READS"), runtime=KEEPS)
        assert list((tmp_path / "sessions").glob("*.tar")) == []
        (one,) = (await here.again(first.session_id)).sessions
        assert "was not kept whole" in (one.error or "")
        assert "big: it is too large" in (one.error or "")


async def test_accepted_evaluation_survives_restart(tmp_path: Path) -> None:
    """An accepted evaluation is finished by the node's next run, once."""
    async with place(tmp_path) as here:
        sessions = [(await here.session(evaluator=user("WHOLE"))).session_id for _ in range(3)]
        here.town.stages.post.adjust(0)  # rollouts have all of it
        begun = await here.evaluations.accept(EvaluationSpec(sessions=tuple(sessions)), idempotency_key=None)
        with trio.move_on_after(0.1):
            await trio.sleep_forever()
        found = await here.evaluations.status(begun.evaluation_id)
        assert found is not None
        assert found.counts == {"pending": 3}
        assert here.evaluations.statistics() == {"open": 1, "sessions": 3}
        leftover = tmp_path / "sessions" / ".restoring-x"
        leftover.mkdir()
        here.town.stages.post.adjust(8)
        async with evaluating(here.town, here.journal) as second:  # beside the first: each would do them all
            await until(lambda: not here.evaluations.statistics()["open"] and not second.statistics()["open"])
        assert not leftover.exists()
        keys = [each["key"] for each in await here.rewards()]
        assert sorted(keys) == sorted(f"reward:{one}:1" for one in sessions)


async def test_start_retries_while_log_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending, asked = SqliteLog.pending_evaluations, list[int]()

    async def away_once(log: SqliteLog, incarnation: int) -> tuple[EvaluationStatus, ...]:
        asked.append(incarnation)
        if len(asked) == 1:
            raise LogUnavailable("the log is away")
        return await pending(log, incarnation)

    monkeypatch.setattr(SqliteLog, "pending_evaluations", away_once)
    async with place(tmp_path) as here:
        assert here.evaluations.statistics()["open"] == 0
    assert len(asked) == 2


async def test_rollouts_go_before_evaluations(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        first = await here.session(evaluator=user("READS"), runtime=KEEPS)
        post, seen = here.town.stages.post, list[int]()
        post.adjust(1)

        async def rollout() -> None:
            async with post.slot(priority=0):
                seen.append(post.statistics().waiting)

        async with trio.open_nursery() as nursery, post.slot(priority=0):
            await here.evaluations.accept(EvaluationSpec(sessions=(first.session_id,)), idempotency_key=None)
            await until(lambda: post.statistics().waiting == 1)
            nursery.start_soon(rollout)
            await until(lambda: post.statistics().waiting == 2)
        assert seen == [1], "the evaluation, which came first, waits"


async def test_bug_costs_one_session_its_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place(tmp_path) as here:
        ids = [(await here.session(evaluator=user("WHOLE"))).session_id for _ in range(2)]
        order = Evaluations._order

        async def broken(self: Any, spec: Any, trajectory: Trajectory) -> Any:
            if trajectory.session_id == ids[0]:
                raise ZeroDivisionError("oh")
            return await order(self, spec, trajectory)

        monkeypatch.setattr(Evaluations, "_order", broken)
        found = await here.again(*ids)
        assert [each.state for each in found.sessions] == ["refused", "evaluated"]
        assert found.sessions[0].error == "a bug of the node, see its log: ZeroDivisionError: oh"


async def test_damaged_reward_ends_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry meets a damaged page: the workers go on, and new evaluations are refused."""

    def corrupt(*_: object) -> None:
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    async def lost(self: SqliteLog, given: object) -> None:
        await self.journal.writer.commit(JournalEntry(1, corrupt))

    async with place(tmp_path) as here:
        spec = EvaluationSpec(sessions=((await here.session(evaluator=user("WHOLE"))).session_id,))
        monkeypatch.setattr(SqliteLog, "write_reward", lost)
        await here.evaluations.accept(spec, idempotency_key=None)
        with trio.fail_after(60):
            await here.journal.health.damage_event.wait()
        await until(lambda: not here.evaluations.statistics()["sessions"])
        with pytest.raises(JournalDamaged):
            await here.evaluations.accept(spec, idempotency_key=None)


async def test_kept_workspaces_are_removed_with_sessions(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    gone, new = workspace_path(sessions, "gone"), workspace_path(sessions, "new")
    for path in (gone, new, sessions / "gone.log"):
        path.write_bytes(b"")
    async with place(tmp_path) as here:
        kept = await here.session(evaluator=user("WHOLE"), runtime=KEEPS)
        of_kept = workspace_path(sessions, kept.session_id)
        for path in (gone, of_kept):
            os.utime(path, (0, 0))
        async with evaluating(here.town, here.journal):
            await until(lambda: not gone.exists())
            await trio.testing.wait_all_tasks_blocked(0.1)
        # the session of a new one may not be on the journal's disk yet
        assert sorted(path.name for path in sessions.iterdir() if path.suffix != ".half") == sorted(
            ["gone.log", new.name, of_kept.name, f"{kept.session_id}.log"]
        )


async def test_start_waits_for_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is away when the node starts ends no node."""
    usual, left = SqliteLog.pending_evaluations, [LogUnavailable("the log is away")]

    async def pending(*given: Any) -> Any:
        if left:
            raise left.pop()
        return await usual(*given)

    monkeypatch.setattr(SqliteLog, "pending_evaluations", pending)
    async with place(tmp_path) as here:
        found = await here.again((await here.session(evaluator=user("WHOLE"))).session_id)
        assert [each.state for each in found.sessions] == ["evaluated"]
