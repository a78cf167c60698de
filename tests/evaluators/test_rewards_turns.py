"""`turn_rewards`: rules, functions and judges of single turns and lineages, and what they make of a session's
reward.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from judge_kit import ScriptedJudge
from rewards_kit import call, edited, finished, helper_turns, session
from session_kit import agent, town
from trio.abc import Clock

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError, Refused
from polarnode.core.ports import Question
from polarnode.core.task import EvaluatorPart, EvaluatorSpec
from polarnode.core.trajectory import Turn, Verdict
from polarnode.evaluators import registry
from polarnode.evaluators.contract import AllowedNames
from polarnode.evaluators.turn_rewards import (
    BATCH,
    RULES,
    TurnRewardsConfig,
    counted,
    evaluator,
    judge_rewards,
    read_config,
)

KIT = AllowedNames(imports=("rewards_kit",), judges=frozenset({"j"}))


async def verdict(
    turns: tuple[Turn, ...], said: dict[str, Json], judge: Any = None, **outcome: Any
) -> Verdict:
    return await evaluator(KIT).evaluate(finished(turns, said, judge=judge, **outcome))


# ── rules ─────────────────────────────────────────────────────────────────────


LS, LS_SPELLED_OTHERWISE, CAT = (
    ("bash", '{"command": "ls", "x": 1}'),
    ("bash", '{"x":1,"command":"ls"}'),
    ("bash", '{"command": "cat"}'),
)


@pytest.mark.parametrize(
    ("rule", "turns", "counts"),
    [
        ("malformed_call", edited(session("a", "b"), 1, malformed_calls=2), [0, 2]),
        ("cut_answer", edited(session("a", "b"), 0, turn_finish_reason="length"), [1, 0]),
        ("empty_answer", session("a", " ", "c"), [0, 1, 0]),
        ("empty_answer", session("a", "", calls=((), [LS])), [0, 0]),
        (
            "repeated_call",
            session("a", "b", "c", "d", calls=([LS], [LS_SPELLED_OTHERWISE], [CAT], [LS])),
            [0, 1, 0, 0],
        ),
        ("repeated_call", session("a", "b", calls=([LS, CAT], [CAT, LS, LS])), [0, 3]),
        ("each_turn", session("a", "b"), [1, 1]),
    ],
)
def test_each_rule_counts_its_turns(rule: str, turns: tuple[Turn, ...], counts: list[int]) -> None:
    assert [each[rule] for each in counted([rule], turns).values()] == counts


def test_non_json_arguments_compare_as_text() -> None:
    turns = session("a", "b")
    turns = edited(turns, 0, parts=(call("bash", "{ls"),))
    turns = edited(turns, 1, parts=(call("bash", "{ls"), call("bash", "{ls "), call("sh", "{ls")))
    assert counted(["repeated_call"], turns)[1] == {"repeated_call": 1}


def test_missing_answer_is_not_empty() -> None:
    turns = session("a")
    gone = tuple(evolve(turn, answer=None, state="failed") for turn in turns)
    assert counted(list(RULES), gone) == {
        0: {"malformed_call": 0, "repeated_call": 0, "cut_answer": 0, "empty_answer": 0, "each_turn": 1}
    }


def test_side_calls_follow_no_rule() -> None:
    assert list(counted(["each_turn"], helper_turns())) == [1, 2, 3]


async def test_rules_reward_their_turns() -> None:
    turns = edited(session("a", "b", "c", calls=([LS], [LS])), 2, malformed_calls=3)
    found = await verdict(turns, {"rules": {"malformed_call": -0.5, "repeated_call": -0.25}})
    assert found.turn_rewards == {0: 0.0, 1: -0.25, 2: -1.5}
    assert found.reward == 1.0 - 1.75
    assert found.metrics == {
        "rules": {"malformed_call": 3, "repeated_call": 1}, "outcome": 1.0, "turn_rewards": {"0": 0.0, "1": -0.25, "2": -1.5},
    }  # fmt: skip


# ── what a session's reward is made of ────────────────────────────────────────


@given(
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.sampled_from(["sum", "mean", "none"]),
    st.sampled_from(["completed", "failed"]),
    st.integers(1, 5),
)
async def test_session_reward_weighs_outcome_and_turns(
    outcome: float, turns: float, total: str, status: Any, count: int
) -> None:
    """A sessions reward is its outcome and its turns each times its weight."""
    weights: Json = {"outcome": outcome, "turns": turns}
    found = await verdict(
        session(*"abcde"[:count]),
        {"rules": {"each_turn": -0.5}, "weights": weights, "total": total},
        status=status,
    )
    worth = {"sum": -0.5 * count, "mean": -0.5, "none": 0.0}[total]
    assert found.reward == pytest.approx(outcome * (status == "completed") + turns * worth)
    assert found.turn_rewards == dict.fromkeys(range(count), turns * -0.5)


async def test_lineage_reward_adds_to_outcome() -> None:
    """A lineage's traces have its own reward beside the outcome."""
    found = await verdict(
        helper_turns(),
        {"rules": {"each_turn": -0.5}, "of": "lineage", "weights": {"outcome": 2.0, "turns": 1.0}},
    )
    main, helper = helper_turns()[1].lineage, helper_turns()[2].lineage
    assert found.lineage_rewards == {main: 2.0 - 1.0, helper: 2.0 - 0.5}
    assert (found.reward, found.turn_rewards) == (2.0 - 1.5, {})


async def test_session_without_turns_has_outcome() -> None:
    for total in ("sum", "mean"):
        found = await verdict((), {"rules": {"each_turn": 1.0}, "total": total})
        assert (found.reward, found.turn_rewards) == (0.0, {})


# ── functions ─────────────────────────────────────────────────────────────────


async def test_function_rewards_turns_or_lineages() -> None:
    turns = session("a", "b c d")
    found = await verdict(turns, {"rewards": "rewards_kit:length_rewards"})
    assert found.turn_rewards == {0: len(turns[0].sampled) / 10, 1: len(turns[1].sampled) / 10}
    found = await verdict(
        turns, {"rewards": "rewards_kit:by_lineage", "of": "lineage", "weights": {"outcome": 0}}
    )
    assert found.lineage_rewards == {0: 0.5}, "it may be async"


async def test_rewards_of_turn_add_up() -> None:
    turns = session("a", "b")
    found = await verdict(turns, {"rewards": "rewards_kit:length_rewards", "rules": {"each_turn": -1}})
    assert found.turn_rewards == {
        index: pytest.approx(len(turns[index].sampled) / 10 - 1) for index in (0, 1)
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown_turn_reward", "a reward to turn 99, which this session has not: it has 0"),
        ("no_mapping", "list as its turn rewards"),
        ("raises_key_error", "rewards_kit:raises_key_error gave no rewards: 'mine'"),
    ],
)
async def test_function_without_rewards_is_error(name: str, words: str) -> None:
    with pytest.raises(EvaluatorError) as raised:
        await verdict(session("a"), {"rewards": f"rewards_kit:{name}"})
    assert words in str(raised.value)


# ── judges ────────────────────────────────────────────────────────────────────


def listed(of: str, **by_number: float) -> str:
    return json.dumps(
        {
            f"{of}s": [
                {of: int(number[1:]), "criteria": {"score": {"reason": "r", "score": score}}}
                for number, score in by_number.items()
            ]
        }
    )


def one(score: float) -> str:
    return json.dumps({"criteria": {"score": {"reason": "r", "score": score}}})


async def test_all_turns_in_one_question() -> None:
    judge = ScriptedJudge([listed("turn", n1=10, n0=5)])
    found = await verdict(
        session("first", "second"),
        {"judge": {"judge": "j", "rubric": "Was it useful?"}, "total": "mean"},
        judge,
    )
    assert (found.turn_rewards, found.reward) == ({1: 1.0, 0: 0.5}, 1.75)
    (asked,) = judge.asked
    text = str(asked.messages[1]["content"])
    assert text.index("first") < text.index("second")
    assert text.endswith("Score every turn by itself, each exactly once: turns 0, 1.")
    scores: Any = found.metrics["judged"]
    assert scores == {
        "judge": "j", "misfits": 0, "not_judged": 0,
        "scores": {"1": {"score": {"score": 10.0, "reason": "r"}}, "0": {"score": {"score": 5.0, "reason": "r"}}},
    }  # fmt: skip


async def test_each_turn_in_own_question() -> None:
    """Each is scored in the light of what came before it, never of what came after."""

    def says(question: Question) -> str:
        number = re.search(r"Score turn (\d)", str(question.messages[1]["content"]))
        assert number is not None
        return one(int(number[1]) + 1)

    judge = ScriptedJudge(says)
    found = await verdict(
        session("first", "second", "third"), {"judge": {"judge": "j", "rubric": "r", "ask": "each"}}, judge
    )
    assert found.turn_rewards == {0: 0.1, 1: 0.2, 2: 0.3}
    shown = [str(asked.messages[1]["content"]) for asked in judge.asked]
    assert [[word in text for word in ("first", "second", "third")] for text in shown] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


async def test_many_questions_asked_in_batches() -> None:
    """So that no session's questions are all written in one stretch of the node's loop."""
    batches: list[int] = []

    class Counting(ScriptedJudge):
        async def ask_each(self, questions: Sequence[Question]) -> list[str]:
            batches.append(len(questions))
            return [one(5)] * len(questions)

    judge = Counting([])
    found = await verdict(
        session(*("x" for _ in range(40))),
        {"judge": {"judge": "j", "rubric": "r", "ask": "each", "most": 35}},
        judge,
    )
    assert (len(found.turn_rewards), batches) == (35, [BATCH, BATCH, 3])


@pytest.mark.parametrize("ask", ["each", "together"])
async def test_lineages_judged_by_own_turns(ask: str) -> None:
    turns = helper_turns()
    main, helper = turns[1].lineage, turns[2].lineage

    def says(question: Question) -> str:
        if ask == "together":
            return listed("lineage", **{f"n{main}": 2, f"n{helper}": 4})
        return one(2 if f"Score lineage {main}." in str(question.messages[1]["content"]) else 4)

    judge = ScriptedJudge(says)
    said: dict[str, Json] = {
        "judge": {"judge": "j", "rubric": "r", "ask": ask},
        "of": "lineage",
        "weights": {"outcome": 0.0},
    }
    found = await verdict(turns, said, judge)
    assert found.lineage_rewards == {main: 0.2, helper: 0.4}
    assert len(judge.asked) == (1 if ask == "together" else 2)
    assert all("a title" not in str(asked.messages) for asked in judge.asked)
    if ask == "each":
        assert "found it" not in str(judge.asked[0].messages)


async def test_turns_over_limit_are_counted() -> None:
    """More turns than may be judged are counted, and not guessed."""
    judge = ScriptedJudge([listed("turn", n0=1, n1=2)])
    found = await verdict(session(*"abcd"), {"judge": {"judge": "j", "rubric": "r", "most": 2}}, judge)
    metrics: Any = found.metrics["judged"]
    assert (found.turn_rewards, metrics["not_judged"]) == ({0: 0.1, 1: 0.2}, 2)
    assert "| c" not in str(judge.asked[0].messages[1]["content"])


async def test_judge_of_all_sees_each_turn() -> None:
    numbers = {f"n{index}": 1.0 for index in range(12)}
    judge = ScriptedJudge([listed("turn", **numbers)])
    said: dict[str, Json] = {"judge": {"judge": "j", "rubric": "r", "max_chars": 3000}}
    await verdict(session(*("word " * 300 for _ in range(12))), said, judge)
    text = str(judge.asked[0].messages[1]["content"])
    assert [f"── turn {index} ──" in text for index in range(12)] == [True] * 12
    assert "left out" in text


@pytest.mark.parametrize(
    "wrong", [listed("turn", n0=1), listed("turn", n0=1, n1=1, n2=1), json.dumps({"turns": []}), one(3)]
)
async def test_list_of_other_turns_is_refused(wrong: str) -> None:
    judge = ScriptedJudge([wrong, listed("turn", n0=1, n1=2)])
    found = await verdict(session("a", "b"), {"judge": {"judge": "j", "rubric": "r"}}, judge)
    metrics: Any = found.metrics["judged"]
    assert (found.turn_rewards, metrics["misfits"]) == ({0: 0.1, 1: 0.2}, 1)
    with pytest.raises(EvaluatorError, match="did not the first time"):
        await verdict(session("a", "b"), {"judge": {"judge": "j", "rubric": "r"}}, ScriptedJudge([wrong]))


async def test_turn_scored_twice_is_refused() -> None:
    twice = json.dumps({"turns": json.loads(listed("turn", n0=1))["turns"] * 2})
    with pytest.raises(EvaluatorError, match=r"scores the turns \[0, 0\] and was asked for \[0\]"):
        await verdict(session("a"), {"judge": {"judge": "j", "rubric": "r"}}, ScriptedJudge([twice]))


async def test_no_turns_ask_no_judge() -> None:
    judge = ScriptedJudge(["never"])
    config = read_config({"judge": {"judge": "j", "rubric": "r"}})
    assert config.judge is not None
    assert (await judge_rewards(finished((), judge=judge), config.judge, "turn")).rewards == {}
    assert judge.asked == []


# ── what a task may say ───────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ({}, "$.evaluator.config"),
        ({"rules": {}}, "$.evaluator.config"),
        ({"rules": {"politeness": 1}}, "$.evaluator.config.rules"),
        (
            {"rules": {"each_turn": 1}, "weights": {"outcome": float("inf")}},
            "$.evaluator.config.weights.outcome",
        ),
        ({"rules": {"each_turn": 1}, "total": "median"}, "$.evaluator.config.total"),
        ({"rules": {"each_turn": 1}, "of": "token"}, "$.evaluator.config.of"),
        ({"rewards": "os:getcwd"}, "$.evaluator.config.rewards"),
        ({"rewards": "rewards_kit:nothing"}, "$.evaluator.config.rewards"),
        ({"rewards": "rewards_kit:NOT_CALLABLE"}, "$.evaluator.config.rewards"),
        ({"rewards": "rewards_kit"}, "$.evaluator.config.rewards"),
        ({"judge": {"judge": "k", "rubric": "r"}}, "$.evaluator.config.judge.judge"),
        ({"judge": {"judge": "j"}}, "$.evaluator.config.judge"),
        ({"judge": {"judge": "j", "criteria": [{"name": "?"}]}}, "$.evaluator.config.judge.criteria[0].name"),
        ({"judge": {"judge": "j", "rubric": "r", "most": 0}}, "$.evaluator.config.judge.most"),
        ({"judge": {"judge": "j", "rubric": "r", "max_chars": 0}}, "$.evaluator.config.judge.max_chars"),
        ({"judge": {"judge": "j", "rubric": "r", "max_tokens": 0}}, "$.evaluator.config.judge.max_tokens"),
    ],
)
def test_bad_config_refused_at_submission(said: Any, path: str) -> None:
    with pytest.raises(Refused) as refused:
        registry.find(
            EvaluatorSpec(name="turn_rewards", config=said),
            allowed_imports=("rewards_kit",),
            judges=frozenset({"j"}),
        )
    assert refused.value.path == path
    with pytest.raises(Refused) as refused:
        registry.find(
            EvaluatorSpec(parts=(EvaluatorPart(name="turn_rewards", config=said),)),
            allowed_imports=("rewards_kit",),
            judges=frozenset({"j"}),
        )
    assert refused.value.path == path.replace("$.evaluator", "$.evaluator.parts[0]")


async def test_forbidden_function_not_imported_when_judging() -> None:
    """A task that was taken under other settings, before a restart."""
    with pytest.raises(Refused, match="may not be imported by this node"):
        await evaluator(AllowedNames()).evaluate(
            finished(session("a"), {"rewards": "rewards_kit:length_rewards"})
        )


def test_defaults_are_the_expected_ones() -> None:
    """The defaults are the ones that a reader would guess."""
    said = TurnRewardsConfig()
    assert (said.of, said.total, said.weights.outcome, said.weights.turns) == ("turn", "sum", 1.0, 1.0)


# ── a whole session ───────────────────────────────────────────────────────────


async def test_session_delivers_rewards_to_trainer(autojump_clock: Clock, tmp_path: Any) -> None:
    spec = EvaluatorSpec(name="turn_rewards", config={"rules": {"each_turn": -0.125}})
    async with town(tmp_path, {"agent": agent(turns=3)}) as place:
        found = await place.one(evaluator=spec)
    (trace,) = found.traces
    assert (found.reward, trace.reward, [span.reward for span in trace.turn_spans]) == (
        0.625,
        0.625,
        [-0.125] * 3,
    )
    evaluation: Any = found.metrics["evaluation"]
    assert evaluation == {
        "rules": {"each_turn": 3},
        "outcome": 1.0,
        "turn_rewards": {"0": -0.125, "1": -0.125, "2": -0.125},
    }
