"""A task's teacher scores what its sessions sampled: exactly the trained tokens, after everything before them.
Whatever becomes of the teacher, the session is published, and says why its logprobs are missing.
"""

from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from captures_kit import Desk, Told, in_thread, open_capture_node
from fakes_engine import ScriptedEngine
from journal_samples import make_identity, make_spec
from plane_kit import CONTEXT, answers

from polarnode.core.arrays import floats, ids
from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import RowScores, ScoreOrder
from polarnode.core.task import BuilderSpec, CarrySpec
from polarnode.core.trajectory import Trajectory, Turn, VersionSpan
from polarnode.engine.routing import EngineStatistics
from polarnode.engine.scoring import REQUESTS, ROWS, ScoringEngines
from polarnode.journal import queries
from polarnode.journal.values import UnfinishedSession
from polarnode.merge.builders import build
from polarnode.merge.token_extras import masked_logprobs, row_to_score
from polarnode.rollouts.recovery import _trajectory


@define(eq=False)
class Teacher:
    """Each token's logprob is minus the sum of its row up to it, over 65536: it shows what was before it."""

    fails: Exception | None = None
    hold: trio.Event | None = None
    orders: list[ScoreOrder] = field(factory=list)
    left: int = 0

    async def score(self, order: ScoreOrder) -> RowScores:
        await trio.lowlevel.checkpoint()
        self.orders.append(order)
        if self.hold is not None:
            try:
                await self.hold.wait()
            except trio.Cancelled:
                self.left += 1
                raise
        if self.fails is not None:
            raise self.fails
        return RowScores(logprobs=shown(list(order.row))[order.start :], version="t1")

    def statistics(self) -> EngineStatistics:
        raise AssertionError("nobody asks")


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not holds():  # noqa: ASYNC110 - it has no event
            await trio.sleep(0.01)


def shown(row: list[int]) -> Any:
    return floats(-sum(row[: place + 1]) / 65536 for place in range(len(row)))


def engine() -> ScriptedEngine:
    return ScriptedEngine(reply=answers("Bread.", "Loaf.", "Crust."), vocab_size=4096, context_length=CONTEXT)


async def captured(desk: Desk, calls: int = 2, **spec: Any) -> Trajectory:
    opened = await desk.open(**spec)
    for _ in range(calls):
        await in_thread(Told(opened["env"]).chat)
    await desk.end(opened["session_id"], reward=0.5)
    found = await desk.journal.reader.query(queries.trajectory, opened["session_id"])
    assert found is not None
    return found


def checked(trajectory: Trajectory) -> int:
    """Each trained token has what its whole row says, every other token 0. Returns how many are trained."""
    turns = {each.index: each for each in trajectory.turns}
    for trace in trajectory.traces:
        row, _ = row_to_score(trace, turns)
        expected = shown(list(row))[trace.offset :]
        for place, trained in enumerate(trace.loss_mask):
            assert trace.teacher_logprobs is not None
            assert trace.teacher_logprobs[place] == (expected[place] if trained else 0.0)
    return trajectory.trainable_tokens


@pytest.mark.parametrize(
    "builder",
    [{}, {"name": "per_request"}, {"config": {"max_row_tokens": 40}}],
    ids=["merged", "each", "cut"],
)
async def test_trained_token_is_scored_in_context(tmp_path: Path, builder: Any) -> None:
    """Each trained token is scored after all tokens before it."""
    teacher = Teacher()
    async with open_capture_node(tmp_path, engine(), scoring=ScoringEngines({"big": teacher})) as desk:
        found = await captured(desk, carry={"teacher": "big"}, builder=builder)
    assert checked(found) > 0
    assert found.reward == 0.5
    assert {trace.missing_extras for trace in found.traces} == {()}
    assert len(teacher.orders) == len(found.traces)
    told: Any = found.metrics["teacher"]
    assert (told["name"], told["versions"]) == ("big", ["t1"])


async def test_failing_teacher_costs_only_logprobs(tmp_path: Path) -> None:
    down = Teacher(fails=EngineError("every engine host keeps dying"))
    narrow = Teacher(fails=Refused("this engine reads 7 at most"))
    async with open_capture_node(
        tmp_path, engine(), scoring=ScoringEngines({"down": down, "narrow": narrow})
    ) as desk:
        for name, words in (
            ("down", "every engine host keeps dying"),
            ("narrow", "this engine reads 7 at most"),
        ):
            found = await captured(desk, 1, carry={"teacher": name})
            assert (found.reward, found.outcome.status, found.trainable_tokens > 0) == (
                0.5,
                "completed",
                True,
            )
            assert [trace.teacher_logprobs for trace in found.traces] == [None]
            assert found.traces[0].missing_extras == (f"teacher_logprobs: {words}",)


async def test_slow_teacher_gets_remaining_post_budget(tmp_path: Path) -> None:
    slow = Teacher(hold=trio.Event())
    async with open_capture_node(tmp_path, engine(), scoring=ScoringEngines({"slow": slow})) as desk:
        found = await captured(desk, 1, carry={"teacher": "slow"}, budgets={"post_s": 0.2})
        assert found.reward == 0.5
        assert found.traces[0].missing_extras == (
            "teacher_logprobs: its teacher had not scored it when budgets.post_s was over",
        )
        assert slow.left == 1


async def test_stopping_node_leaves_teacher(tmp_path: Path) -> None:
    slow = Teacher(hold=trio.Event())
    async with open_capture_node(tmp_path, engine(), scoring=ScoringEngines({"slow": slow})) as desk:
        opened = await desk.open(carry={"teacher": "slow"})
        await in_thread(Told(opened["env"]).chat)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: desk.end(opened["session_id"], reward=0.5))
            await until(lambda: bool(slow.orders))
            desk.captures.registry.cancel_all()
        found = await desk.journal.reader.query(queries.trajectory, opened["session_id"])
    assert found is not None
    assert (found.reward, slow.left) == (0.5, 1)
    assert "its node was stopped" in found.traces[0].missing_extras[0]


async def test_unknown_teacher_lists_known_names(tmp_path: Path) -> None:
    async with open_capture_node(
        tmp_path, engine(), scoring=ScoringEngines({"policy": Teacher(), "big": Teacher()})
    ) as desk:
        answer = await desk.caller.post("/v1/capture", {"carry": {"teacher": "bigger"}})
        assert answer.status == 400
        error = answer.json()["error"]
        assert error["path"] == "$.carry.teacher"
        assert "name policy, big, or add [teachers.bigger]" in error["message"]
        assert (await desk.caller.post("/v1/capture", {"carry": {"teacher": 3}})).status == 400


# ── the row of a slice ────────────────────────────────────────────────────────


def turn(index: int, parent: Turn | None, delta: int, sampled: int) -> Turn:
    begin = 0 if parent is None else parent.end
    return Turn(
        session_id="s",
        index=index,
        provider="openai_chat",
        lineage=0,
        parent=None if parent is None else parent.index,
        kind="root" if parent is None else "extend",
        reason="",
        prompt_delta=ids(range(begin, begin + delta)),
        prompt_length=begin + delta,
        sampled=ids(range(100 + begin, 100 + begin + sampled)),
        logprobs=floats([-0.5] * sampled),
        version_spans=(VersionSpan(version="0", start=0, end=sampled),),
    )


def test_slice_is_scored_whole_or_not() -> None:
    """A slice is scored in its whole row or not at all."""
    first = turn(0, None, 5, 3)
    turns = [first, turn(1, first, 4, 6)]
    built = build(BuilderSpec(config={"max_row_tokens": 9}), turns)
    by_index = {each.index: each for each in turns}
    whole = [*turns[0].prompt_delta, *turns[0].sampled, *turns[1].prompt_delta, *turns[1].sampled]
    assert len(built.traces) > 1
    for trace in built.traces:
        row, start = row_to_score(trace, by_index)
        assert row == ids(whole[: len(row)])
        assert start == trace.offset + trace.loss_mask.find(1)
        assert len(row) == trace.offset + trace.loss_mask.rfind(1) + 1
    last = built.traces[-1]
    for broken in (evolve(last, token_ids=ids([9] * len(last.token_ids))), evolve(last, turn_spans=())):
        with pytest.raises(Refused, match="before its offset are not those of its turns"):
            row_to_score(broken, by_index)


@pytest.mark.parametrize("teacher", ["", "big"])
def test_earlier_session_reports_missing_scores(teacher: str) -> None:
    """A session of an earlier run says that nobody scored it."""
    first = turn(0, None, 5, 3)
    spec = make_spec(carry=CarrySpec(teacher=teacher))
    lost = UnfinishedSession(identity=make_identity("s"), spec=spec, turns=(first, turn(1, first, 4, 6)))
    found = _trajectory(lost, ())
    (trace,) = found.traces
    assert (found.outcome.status, trace.teacher_logprobs) == ("interrupted", None)
    why = "teacher_logprobs: the node ended before its teacher had scored it; POST /v1/score takes its rows"
    assert trace.missing_extras == ((why,) if teacher else ())


def test_only_trained_positions_are_scored() -> None:
    mask = bytes([1, 0, 1, 1, 0, 2, 1])
    assert list(masked_logprobs(mask, floats([3, 4, 5, 6, 7, 8]), begin=1)) == [0, 0, 4, 5, 0, 0, 8]


# ── POST /v1/score ────────────────────────────────────────────────────────────


async def test_named_rows_are_scored_without_mask(tmp_path: Path) -> None:
    """Rows are scored by name, with or without a mask."""
    teacher = Teacher()
    async with open_capture_node(
        tmp_path, engine(), scoring=ScoringEngines({"policy": Teacher(), "big": teacher})
    ) as desk:
        row, mask = [5, 6, 7, 8, 9], [0, 0, 1, 1, 0]
        rows = [
            {"token_ids": row},
            {"token_ids": row, "loss_mask": mask},
            {"token_ids": row, "start": 3},
            {"token_ids": [4]},
        ]
        answer = await desk.caller.post("/v1/score", {"engine": "big", "rows": rows})
        assert answer.status == 200, answer.text
        whole = list(shown(row))
        assert answer.json() == {
            "engine": "big",
            "arrays": "json",
            "rows": [
                {"logprobs": [0, *whole[1:]], "version": "t1"},
                {"logprobs": [0, 0, *whole[2:4], 0], "version": "t1"},
                {"logprobs": [0, 0, 0, *whole[3:]], "version": "t1"},
                {"logprobs": [0], "version": None},
            ],
        }
        assert {(len(order.row), order.start) for order in teacher.orders} == {(5, 1), (4, 2), (5, 3)}
        coded = {"token_ids": b64encode(ids(row)).decode(), "loss_mask": b64encode(bytes(mask)).decode()}
        again = await desk.caller.post("/v1/score?arrays=base64", {"rows": [coded]})
        assert again.json()["rows"][0]["logprobs"] == b64encode(floats([0, 0, *whole[2:4], 0])).decode()


async def test_unscorable_rows_are_refused_with_place(tmp_path: Path) -> None:
    narrow = Teacher(fails=Refused("this engine reads 7 at most"))
    async with open_capture_node(
        tmp_path, engine(), scoring=ScoringEngines({"policy": Teacher(), "narrow": narrow})
    ) as desk:
        good = {"token_ids": [1, 2]}
        for body, path, words in (
            ({"rows": []}, "$.rows", f"1 to {ROWS}"),
            ({"rows": [good] * (ROWS + 1)}, "$.rows", f"1 to {ROWS}"),
            (
                {"rows": [good, {"token_ids": [1, 2], "loss_mask": [1]}]},
                "$.rows[1].loss_mask",
                "1 values for 2",
            ),
            ({"rows": [{"token_ids": [1, 2], "start": 3}]}, "$.rows[0].start", "0 to 2"),
            ({"rows": [good], "engine": "bog"}, "$.engine", "policy, narrow"),
            (
                {"rows": [good], "engine": "narrow", "adapter": "a"},
                "$.adapter",
                "only the policy has adapters",
            ),
            ({"rows": [good], "engine": "narrow"}, "$.rows[0]", "reads 7 at most"),
            ({"rows": [good], "engines": "narrow"}, "$.engines", "did you mean engine?"),
        ):
            answer = await desk.caller.post("/v1/score", body)
            error = answer.json()["error"]
            assert (answer.status, error["path"]) == (400, path)
            assert words in error["message"]


async def test_excess_scoring_requests_must_wait(
    tmp_path: Path,
) -> None:
    """Requests beyond a node's limit are told to wait, and one that leaves ends."""
    slow = Teacher(hold=trio.Event())
    async with open_capture_node(tmp_path, engine(), scoring=ScoringEngines({"policy": slow})) as desk:
        body = {"rows": [{"token_ids": [1, 2]}]}
        async with trio.open_nursery() as nursery:
            for _ in range(REQUESTS):
                nursery.start_soon(desk.caller.post, "/v1/score", body)
            await until(lambda: len(slow.orders) == REQUESTS)
            refused = await desk.caller.post("/v1/score", body)
            assert (refused.status, refused.headers["retry-after"]) == (429, "2")
            nursery.cancel_scope.cancel()
        await until(lambda: slow.left == REQUESTS)
        slow.hold = None
        assert (await desk.caller.post("/v1/score", body)).status == 200
