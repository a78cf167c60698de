"""Advantages of a group, and what they and a token's weight come to whatever way a session was cut
into rows.
"""

from collections.abc import Sequence
from math import fsum, isclose, sqrt
from typing import Any, get_args

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.arrays import floats, ids
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Outcome, Trace, Trajectory, TurnSpan
from polarnode.groups import (
    Estimator,
    Group,
    LossMean,
    Member,
    Row,
    advantages_of,
    group_normalised,
    leave_one_out,
    rows_of,
)
from polarnode.groups.training_rows import SPREAD_EPSILON, scales
from polarnode.groups.training_rows import Row as RowOfModule

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
REWARDS = st.lists(st.floats(-100, 100).map(lambda value: round(value, 6)), min_size=1, max_size=16)
estimators = st.sampled_from(ESTIMATORS)


# ── advantages ────────────────────────────────────────────────────────────────


def test_advantage_formulas_in_numbers() -> None:
    assert leave_one_out([1.0, 0.0, 0.0, 1.0]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert leave_one_out([3.0, 1.0]) == pytest.approx([2.0, -2.0])
    assert group_normalised([1.0, 0.0, 0.0, 1.0], std=False) == (0.5, -0.5, -0.5, 0.5)
    spread = sqrt(4 * 0.25 / 3) + SPREAD_EPSILON
    assert group_normalised([1.0, 0.0, 0.0, 1.0]) == pytest.approx(
        [0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread]
    )


@given(REWARDS, estimators)
def test_they_sum_to_zero(rewards: list[float], estimator: Estimator) -> None:
    found = advantages_of(rewards, estimator)
    assert isclose(fsum(found), 0.0, abs_tol=1e-9 * (1 + fsum(abs(each) for each in found)))


@given(st.floats(-1e6, 1e6), st.integers(1, 40), estimators)
def test_equal_rewards_have_zero_advantage(reward: float, count: int, estimator: Estimator) -> None:
    """Equal rewards and one alone are exactly zero."""
    assert advantages_of([reward] * count, estimator) == (0.0,) * count


@given(REWARDS, estimators, st.randoms(use_true_random=False))
def test_they_follow_their_sessions_whatever_the_order(
    rewards: list[float], estimator: Estimator, random: Any
) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    moved = advantages_of([rewards[index] for index in order], estimator)
    assert moved == pytest.approx([advantages_of(rewards, estimator)[index] for index in order], abs=1e-9)


@given(st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=12), st.integers(-8, 8), estimators)
def test_constant_shift_changes_no_advantage(rewards: list[float], more: int, estimator: Estimator) -> None:
    """A constant added to all rewards changes nothing."""
    assert advantages_of([each + more for each in rewards], estimator) == pytest.approx(
        advantages_of(rewards, estimator), abs=1e-9
    )


@given(REWARDS.filter(lambda rewards: len(rewards) > 1))
def test_leave_one_out_uses_others_mean(rewards: list[float]) -> None:
    """Leaving one out compares with the mean of the others."""
    expected = [
        reward - fsum(rewards[:index] + rewards[index + 1 :]) / (len(rewards) - 1)
        for index, reward in enumerate(rewards)
    ]
    assert leave_one_out(rewards) == pytest.approx(expected, abs=1e-6)


def test_rounding_differences_stay_near_zero() -> None:
    assert all(abs(each) < 1e-6 for each in group_normalised([0.1 + 0.2, 0.3, 0.3]))
    assert scales([], "grpo") == ()


# ── a group of sessions with rows ─────────────────────────────────────────────


def trace(
    sampled: int,
    *,
    prompt: int = 2,
    reward: float | None = None,
    turns: Sequence[tuple[int, float | None]] = ((0, None),),
    lineage: int = 0,
) -> Trace:
    """A row whose turns have `sampled` tokens each, and as many of a prompt before each."""
    spans, mask = [], b""
    for turn, own in turns:
        start = len(mask) + prompt
        mask += b"\0" * prompt + b"\1" * sampled
        spans.append(TurnSpan(turn=turn, start=start, end=start + sampled, reward=own))
    return Trace(
        lineage=lineage,
        token_ids=ids(range(len(mask))),
        loss_mask=mask,
        logprobs=floats([-0.5 * trained for trained in mask]),
        prompt_length=prompt,
        turn_spans=tuple(spans),
        version_spans=(),
        reward=reward,
    )


def session(name: str, reward: float, *traces: Trace) -> Trajectory:
    return Trajectory(
        session_id=name,
        task_id="t",
        group_id="g",
        sample_index=0,
        outcome=Outcome(status="completed"),
        reward=reward,
        traces=traces,
        turns=(),
    )


def group(
    *sessions: Trajectory,
    state: Any = "complete",
    unusable: tuple[str, ...] = (),
    absent: tuple[Member, ...] = (),
) -> Group:
    members = tuple(
        Member(
            session_id=each.session_id,
            sample_index=index,
            status="completed",
            reward=each.reward,
            usable=each.session_id not in unusable,
            why=None,
        )
        for index, each in enumerate(sessions)
    )
    return Group(task_id="t", group_id="g", state=state, members=(*members, *absent), trajectories=sessions)


def by_session(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Of each session: the weight of all its trained tokens, and the sum of weight times advantage."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        weight, pull = found.get(row.session_id, (0.0, 0.0))
        found[row.session_id] = (weight + row.weight * row.tokens, pull + row.weight * fsum(row.advantages))
    return found


def cut(row: Trace) -> tuple[Trace, Trace]:
    """A row in two slices behind its first turn, as `max_row_tokens` cuts it."""
    at = row.turn_spans[0].end
    later = tuple(evolve(span, start=span.start - at, end=span.end - at) for span in row.turn_spans[1:])
    first = evolve(
        row,
        token_ids=row.token_ids[:at],
        loss_mask=row.loss_mask[:at],
        logprobs=row.logprobs[:at],
        turn_spans=row.turn_spans[:1],
        part=0,
        parts=2,
    )
    return first, evolve(
        row,
        token_ids=row.token_ids[at:],
        loss_mask=row.loss_mask[at:],
        logprobs=row.logprobs[at:],
        turn_spans=later,
        offset=at,
        part=1,
        parts=2,
    )


LOSSES: tuple[LossMean, ...] = get_args(LossMean)


def length_for(loss: LossMean) -> int | None:
    return 100 if loss == "fixed_length" else None


SHAPES = st.lists(
    st.tuples(st.integers(0, 3).map(float), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


@given(SHAPES, estimators, st.sampled_from(LOSSES), st.booleans())
def test_how_a_session_was_cut_moves_nothing(
    shapes: list[tuple[float, list[int]]], estimator: Estimator, loss: LossMean, process: bool
) -> None:
    """A row in one piece or in slices; a turn in rows of its own: weights, advantages and what a session
    pulls are the same.
    """
    numbered = list(enumerate(shapes))
    rewarded = [
        [trace(size, turns=((2 * turn, reward), (2 * turn + 1, None))) for turn, size in enumerate(sizes)]
        for _, (reward, sizes) in numbered
    ]
    whole = [session(f"s{index}", reward, *rewarded[index]) for index, (reward, _) in numbered]
    sliced = [evolve(each, traces=tuple(part for one in each.traces for part in cut(one))) for each in whole]
    how: dict[str, Any] = {
        "estimator": estimator,
        "loss": loss,
        "length": length_for(loss),
        "process": process,
    }
    before, after = rows_of([group(*whole)], **how), rows_of([group(*sliced)], **how)
    assert len(after) == 2 * len(before)
    assert [each for row in after for each in row.advantages] == [
        each for row in before for each in row.advantages
    ]
    assert by_session(after).keys() == by_session(before).keys()
    for name, figures in by_session(before).items():
        assert by_session(after)[name] == pytest.approx(figures)


@given(SHAPES)
def test_batch_weights_match_loss(shapes: list[tuple[float, list[int]]]) -> None:
    """The weights of a batch are what their loss says."""
    sessions = [
        session(f"s{index}", reward, *(trace(size) for size in sizes))
        for index, (reward, sizes) in enumerate(shapes)
    ]
    half = len(sessions) // 2
    batch = [group(*sessions[:half]), group(*sessions[half:])]
    total, count = sum(each.trainable_tokens for each in sessions), len(sessions)
    token, mean = by_session(rows_of(batch)), by_session(rows_of(batch, loss="session_mean"))
    fixed = by_session(rows_of(batch, loss="fixed_length", length=50))
    for each in sessions:
        assert token[each.session_id][0] == pytest.approx(each.trainable_tokens / total), "each token alike"
        assert mean[each.session_id][0] == pytest.approx(1 / count), (
            "each session alike, however many rows it has"
        )
        assert fixed[each.session_id][0] == pytest.approx(each.trainable_tokens / (50 * count)), (
            "each token alike in every batch"
        )


def test_session_weight_ignores_row_count() -> None:
    """The peer's broadcast of a reward to a hundred rows of one session weighs that session a hundred
    times.
    """
    many, one = session("many", 1.0, *[trace(5)] * 100), session("one", 0.0, trace(5))
    pulls = by_session(rows_of([group(many, one)], loss="session_mean"))
    assert pulls["many"][1] == pytest.approx(-pulls["one"][1]) == pytest.approx(0.5)


def test_teacher_advantage_is_logprob_difference() -> None:
    """A teacher's advantage is its logprob less the recorded one."""
    said = evolve(
        trace(3, prompt=1), logprobs=floats([0, -0.5, -1, -2]), teacher_logprobs=floats([0, -1, -0.5, -2])
    )
    plain, (known,) = trace(2), rows_of([group(session("a", 1.0, said))])
    assert known.teacher_advantages.tolist() == [0, -0.5, 0.5, 0]
    with pytest.raises(Refused, match=r"session b has no teacher's logprobs: set carry\.teacher"):
        _ = rows_of([group(session("b", 1.0, plain))])[0].teacher_advantages


# ── which rows, and whose reward ──────────────────────────────────────────────


def test_dropped_and_unusable_have_no_rows() -> None:
    """Only usable sessions of groups that are not dropped have rows."""
    a, b, c = session("a", 1.0, trace(3), trace(0)), session("b", 0.0, trace(3)), session("c", 0.0, trace(3))
    found = rows_of([group(a, b, c, unusable=("c",)), group(session("d", 1.0, trace(3)), state="dropped")])
    assert [(row.session_id, row.advantage, row.tokens) for row in found] == [
        ("a", 1.0, 3),
        ("b", -1.0, 3),
    ], "and no row without a trained token"
    assert isinstance(found[0], RowOfModule)
    assert rows_of([]) == ()
    assert rows_of([group(a, state="dropped")], loss="fixed_length", length=9) == ()


def test_absent_trajectory_still_counts_in_baseline() -> None:
    """A member without its trajectory still counts in the baseline."""
    far = Member(session_id="far", sample_index=2, status="completed", reward=0.0, usable=True)
    (row,) = rows_of([group(session("a", 1.0, trace(3)), absent=(far,))])
    assert row.advantage == 1.0
    assert row.weight == pytest.approx(1 / 3)


def test_row_reward_uses_sessions_baseline() -> None:
    """A row with a reward of its own is compared with its session's baseline."""
    a = session("a", 1.0, trace(2, reward=1.0), trace(2, reward=0.25, lineage=1))
    b = session("b", 0.0, trace(2))
    assert [row.advantage for row in rows_of([group(a, b)])] == [1.0, 0.25, -1.0]


def test_turn_rewards_normalise_and_add_up() -> None:
    """Rewards of turns are normalised over the group and added up to the end."""
    a = session("a", 1.0, trace(1, prompt=1, turns=((0, 1.0), (1, None), (2, 3.0))))
    b = session("b", 0.0, trace(1, prompt=1, turns=((0, 2.0), (1, 2.0))))
    plain, _ = rows_of([group(a, b)])
    assert list(plain.advantages) == [0, 1, 0, 1, 0, 1], "left alone unless asked for"
    first, second = rows_of([group(a, b)], process=True, estimator="grpo_without_std")
    assert list(first.advantages) == [0, 0, 0, 1, 0, 1], "-1 and +1; then +1 is yet to come; +1"
    assert list(second.advantages) == [0, 0, 0, 0]
    alone, _ = rows_of([group(a, b)], process=True)
    assert list(alone.advantages) == [0, 0, 0, 1, 0, 1], (
        "against the mean of the other session's turns, which is 2"
    )
    spread = sqrt(2 / 3) + SPREAD_EPSILON
    scaled, _ = rows_of([group(a, b)], process=True, estimator="grpo")
    assert list(scaled.advantages) == pytest.approx([0, 0, 0, 1 / spread, 0, 1 / spread])


def test_session_without_turn_rewards() -> None:
    """A session without rewards of turns has its own in every token."""
    a, b = session("a", 1.0, trace(2, turns=((0, 5.0),))), session("b", 0.0, trace(2))
    found = rows_of([group(a, b)], process=True)
    assert list(found[1].advantages) == [0, 0, -1, -1]
    assert list(found[0].advantages) == [0, 0, 0, 0], "the only one with such rewards is compared with itself"


@pytest.mark.parametrize(("loss", "length"), [("fixed_length", None), ("fixed_length", 0), ("token_mean", 9)])
def test_length_without_its_loss_is_refused(loss: LossMean, length: int | None) -> None:
    with pytest.raises(Refused, match="length is for fixed_length") as caught:
        rows_of([], loss=loss, length=length)
    assert caught.value.path == "$.length"
