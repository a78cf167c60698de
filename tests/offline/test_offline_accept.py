"""What is accepted as data, and for all else one reason: expressions over documented columns that never
raise, and tables that add up.
"""

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_samples import make_trajectory
from wire_strategies import trajectories

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.offline import GenerationTable, judge, parse_acceptance
from polarnode.offline.acceptance import (
    COLUMNS,
    LONGEST,
    REASONS,
    UnknownValue,
    evaluate,
    facts_of,
    has_no_answer,
    read_expression,
)
from polarnode.offline.generation import ALL, find_grouping


def verdict(text: str, **more: Any) -> tuple[str, str]:
    judged = judge(parse_acceptance(text), evolve(make_trajectory("s"), **more))
    return judged.reason, judged.because


@pytest.mark.parametrize(
    "text",
    [
        "reward >= 1",
        "reward == 1.0 and turns < 3",
        "outcome == 'completed' or status in ('timeout', 'failed')",
        "metadata['repo'] == 'a/b'",
        "len(metadata) == 1 and not turns > 5",
        "0 < sampled_tokens <= 3",
        "exit_code is None",
        "clock is None and reward is not None",
        "max(reward, 0) * 2 - 1 >= 0.5",
        "metadata['list'][0] == 1 or harness == ''",
        "turns and traces",
        "-reward < 0",
    ],
)
def test_true_expression_is_accepted(text: str) -> None:
    assert verdict(text, metadata={"repo": "a/b"}) == ("accepted", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("reward >", "is no expression"),
        ("", "is no expression"),
        ("rewrad >= 1", "rewrad at column 1 is not a column: did you mean reward?"),
        ("zzz", "zzz at column 1 is not a column: there are reward"),
        ("reward.real > 0", "is not allowed here"),
        ("__import__('os')", "__import__() at column 1 is unknown: there are len, min, max, abs"),
        ("(lambda: 1)()", "is not allowed here"),
        ("[x for x in metadata]", "is not allowed here"),
        ("metadata[reward]", "is not allowed here"),
        ("2 ** 9999 > 1", "is not allowed here"),
        ("f'{reward}' == '1'", "is not allowed here"),
        ("(reward := 1)", "is not allowed here"),
        ("b'x' == 1", "is not allowed here"),
        ("max(metadata, key=len)", "is not allowed here"),
        ("(" * 400 + "1" + ")" * 400, "is no expression"),
        ("1" + " " * LONGEST, "characters"),
    ],
)
def test_unreadable_expression_is_refused(text: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_acceptance(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "reward >= 1",
        "not reward >= 1",
        "reward + 1 >= 1",
        "not (reward < 1)",
        "metadata['x'] != 'a'",
        "abs(reward) >= 0",
        "reward == metadata['x']",
        "reward",
    ],
)
def test_missing_value_accepts_nothing(text: str) -> None:
    reason, because = verdict(text, reward=None)
    assert reason in ("reward", "expression")
    assert "missing" in because


def test_other_operand_may_decide() -> None:
    assert verdict("reward >= 1 or turns == 1", reward=None)[0] == "accepted"
    assert verdict("turns == 1 or reward >= 1", reward=None)[0] == "accepted"
    assert verdict("reward >= 1 and turns == 2", reward=None) == (
        "reward",
        "reward >= 1: a value is missing (reward is None)",
    )


@pytest.mark.parametrize(
    "text",
    [
        "reward > 'a'",
        "1 / turns > 0 and 1 % (turns - 1) > 0",
        "'a' * 1000000000 == ''",
        "len(reward) > 0",
        "metadata < 1",
    ],
)
def test_uncomputable_expression_is_no_error(text: str) -> None:
    assert verdict(text)[0] in ("reward", "expression")


def test_each_session_has_one_reason() -> None:
    assert verdict("reward >= 1", reward=0.0) == ("reward", "reward >= 1 does not hold (reward is 0.0)")
    assert verdict("reward >= 1 and turns > 9") == ("expression", "turns > 9 does not hold")
    assert verdict(
        "reward >= 1", outcome=Outcome(status="timeout", clock="run", reason="long"), reward=0.0
    ) == (
        "timeout",
        "timeout (run): long; reward >= 1 does not hold",
    )
    assert (
        verdict(
            "reward >= 1", outcome=Outcome(status="error", boundary="runtime", reason="gone"), reward=None
        )[0]
        == "error"
    )
    # what it left behind is what counts
    assert verdict("reward >= 1", outcome=Outcome(status="timeout", clock="run"))[0] == "accepted"
    assert verdict("turns >= 0", outcome=Outcome(status="cancelled"))[0] == "cancelled"
    assert verdict("turns >= 0", outcome=Outcome(status="interrupted"))[0] == "interrupted"
    assert verdict("turns >= 0", turns=())[0] == "empty"
    assert verdict("turns >= 0", traces=())[0] == "no trace"


def test_wordless_session_is_empty() -> None:
    session = make_trajectory("s", turns=2)
    silent = tuple(
        evolve(turn, answer=evolve(turn.answer, parts=()))
        for turn in session.turns
        if turn.answer is not None
    )
    assert not has_no_answer(session)
    assert has_no_answer(evolve(session, turns=silent))
    assert has_no_answer(evolve(session, turns=(evolve(silent[0], answer=None),)))
    assert not has_no_answer(evolve(session, turns=(silent[0], session.turns[1])))


TEXTS = st.recursive(
    st.sampled_from([*COLUMNS, "1", "0", "'a'", "None", "True", "0.5", "[1, 2]"]),
    lambda inner: (
        st.tuples(
            inner, st.sampled_from(["<", "==", "in", "is not", "+", "*", "/", "%", "and", "or"]), inner
        ).map(lambda found: f"({' '.join(found)})")
        | inner.map(lambda one: f"(not {one})")
        | inner.map(lambda one: f"abs({one})")
        | inner.map(lambda one: f"{one}['a']")
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(TEXTS, trajectories())
def test_judging_never_raises(text: str, trajectory: Trajectory) -> None:
    judged = judge(parse_acceptance(text), trajectory)
    assert judged.reason in REASONS
    assert judged.accepted or judged.because


@settings(deadline=None)
@given(TEXTS)
def test_unknown_spreads_only_as_needed(text: str) -> None:
    """Unknown is contagious only as far as it must."""
    found = evaluate(read_expression(f"({text}) or True", tuple(COLUMNS)), {})
    assert not isinstance(found, UnknownValue)
    assert found is not None


def test_every_column_is_documented() -> None:
    assert list(facts_of(make_trajectory("s"))) == list(COLUMNS)


# ── tables ────────────────────────────────────────────────────────────────────


def test_table_sums_its_groups() -> None:
    tally, acceptance = GenerationTable(by="repo"), parse_acceptance("reward >= 1")
    for number in range(12):
        repo = {"repo": ["moto", "mypy", None][number % 3]}
        status: Any = "timeout" if number == 3 else "completed"
        one = evolve(make_trajectory(f"s{number}", reward=float(number % 2), status=status), metadata=repo)
        tally.add(one, judge(acceptance, one))
    rows = {group.name: group for group in tally.rows()}
    assert list(rows)[-1] == ALL
    assert rows[ALL].attempts == 12 == sum(group.attempts for name, group in rows.items() if name != ALL)
    assert rows[ALL].accepted == 6
    assert all(group.attempts == group.reasons.total() for group in rows.values())
    assert set(rows) == {"moto", "mypy", "(none)", ALL}
    assert tally.seen() == ["reward"]  # the one that timed out was rewarded
    found: Any = tally.json()
    assert found["rows"][-1] == {
        "name": "all", "attempts": 12, "accepted": 6, "share": 0.5, "reasons": {"reward": 6}, "turns": 12, "sampled_tokens": 36, "run_s": 0.0,
    }  # fmt: skip


def test_grouping_uses_first_present_key() -> None:
    assert find_grouping([{"dataset": "x"}, {"repo": "y"}]) == "repo"
    assert find_grouping([{"dataset": "x"}]) == "dataset"
    assert find_grouping([{"name": "x"}]) is None
    assert find_grouping([]) is None
