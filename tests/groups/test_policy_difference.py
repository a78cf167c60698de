"""What other weights give a session's tokens: each is scored once, and the figures are their formulas."""

from math import exp, fsum, log
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from trainers_kit import make_turn, publish

from polarnode.core.arrays import floats
from polarnode.core.conversation import Sampling
from polarnode.core.errors import Refused
from polarnode.core.status import ScoredRow
from polarnode.core.trajectory import ForkedFrom, Trajectory, Turn
from polarnode.groups.policy_difference import SessionDifference, compared, incomparable_turns, rows_to_score


def under(trajectory: Trajectory, shift: float, version: str = "9") -> SessionDifference:
    """Under weights that give each token `shift` nats more."""
    old = {turn.index: turn for turn in trajectory.turns}
    rows, scored = rows_to_score(trajectory.turns, inherited=trajectory.inherited), []
    for each in rows:
        new = [0.0] * len(each.row.token_ids)
        for index, start in each.samples.items():
            new[start : old[index].end] = [logprob + shift for logprob in old[index].logprobs]
        scored.append(ScoredRow(logprobs=floats(new), version=version))
    return compared(trajectory, rows, scored, engine="policy")


def tree() -> list[Turn]:
    """A root, two turns after it of which one goes on, and a sub-agent."""
    root = make_turn(0, None, [1, 2, 3], [4, 5])
    left = make_turn(1, root, [6], [7, 8], versions=[("7", 1), ("8", 1)])
    right = make_turn(2, root, [9], [10])
    last = make_turn(3, left, [11, 12], [13, 14, 15], versions=[("8", 3)])
    other = make_turn(4, None, [20], [21], lineage=1, role="subagent")
    return [root, left, right, last, other]


def test_difference_formulas_in_numbers() -> None:
    turn = make_turn(0, None, [1, 2], [3, 4], logprobs=[-1.0, -2.0])
    session = publish([turn])
    (asked,) = rows_to_score([turn])
    answer = ScoredRow(logprobs=floats([0, 0, -1.5, -1.9]), version="8")
    found = compared(session, [asked], [answer], engine="policy")
    assert found.total is not None
    down, up = -0.5, 0.1
    assert found.total.tokens == 2
    assert found.total.mean == pytest.approx((down + up) / 2, abs=1e-6)
    assert found.total.mean_absolute == pytest.approx(0.3, abs=1e-6)
    assert found.total.k1 == pytest.approx(-found.total.mean)
    k3 = fsum(exp(each) - 1 - each for each in (down, up)) / 2
    assert found.total.k3 == pytest.approx(k3, abs=1e-6)
    assert found.total.outside == 0.5, "exp(-0.5) is under 0.8; exp(0.1) is inside"
    assert (found.scored_by, found.versions) == (("8",), {"7": found.total})


def test_each_token_scored_in_fewest_rows() -> None:
    """Each sampled token is scored once, in the fewest rows."""
    turns = tree()
    rows = rows_to_score(turns)
    assert [sorted(each.samples) for each in rows] == [[0, 1, 3], [2], [4]], "one for each leaf"
    masks = [each.row.loss_mask for each in rows]
    assert sum(mask.count(1) for mask in masks if mask) == sum(len(turn.sampled) for turn in turns)
    for each in rows:
        for index, start in each.samples.items():
            sample = turns[index].sampled
            assert each.row.token_ids[start : start + len(sample)] == sample


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=10))
def test_any_tree_of_turns_is_scored_once(shape: list[tuple[int, int]]) -> None:
    turns: list[Turn] = []
    for index, (place, count) in enumerate(shape):
        parent = turns[place % (index + 1) - 1] if turns and place else None
        turns.append(make_turn(index, parent, [index, 7], range(count)))
    found: dict[int, int] = {}
    for each in rows_to_score(turns):
        for index, start in each.samples.items():
            assert index not in found
            found[index] = len(turns[index].sampled)
            mask = each.row.loss_mask or b""
            assert mask[start : start + found[index]].count(1) == found[index]
        assert (each.row.loss_mask or b"").count(1) == sum(found[index] for index in each.samples)
    assert found == {turn.index: len(turn.sampled) for turn in turns if turn.sampled}


def test_turn_across_update_has_version_rows() -> None:
    """A turn that an update cut has a row for each version."""
    found = under(publish(tree()), log(1.25))
    assert [(each.turn, each.version, each.start, each.end) for each in found.spans] == [
        *((0, "7", 0, 2), (1, "7", 0, 1), (1, "8", 1, 2)),
        *((2, "7", 0, 1), (3, "8", 0, 3), (4, "7", 0, 1)),
    ]
    assert {version: each.tokens for version, each in found.versions.items()} == {"7": 5, "8": 4}
    assert found.total is not None
    assert (found.total.tokens, found.total.outside) == (9, 1.0)
    assert found.total.k3 == pytest.approx(0.25 - log(1.25), abs=1e-5)
    assert {each.scored_by for each in found.spans} == {"9"}


def test_equal_weights_differ_by_nothing() -> None:
    """The same weights differ by nothing, and far ones overflow nothing."""
    same, far = under(publish(tree()), 0.0).total, under(publish(tree()), 5000.0).total
    assert same is not None
    assert far is not None
    assert (same.mean, same.mean_absolute, same.k3, same.outside) == (0, 0, 0, 0)
    assert far.outside == 1.0


@pytest.mark.parametrize(
    ("used", "words"),
    [
        (Sampling(temperature=0.7), "temperature 0.7, and scoring is at 1"),
        (Sampling(temperature=1.0, frequency_penalty=0.5), "with a penalty"),
        (Sampling(temperature=1.0, repetition_penalty=1.1), "with a penalty"),
    ],
)
def test_other_distribution_is_left_out(used: Sampling, words: str) -> None:
    """Tokens that were sampled from another distribution are left out."""
    root = make_turn(0, None, [1], [2, 3])
    other = evolve(make_turn(1, root, [4], [5]), used=used)
    last = make_turn(2, other, [6], [7])
    assert [(each.turn, words in each.reason) for each in incomparable_turns([root, other, last])] == [
        (1, True)
    ]
    found = under(publish([root, other, last]), 0.1)
    assert [each.turn for each in found.spans] == [0, 2]
    assert [each.turn for each in found.left_out] == [1]
    nothing = under(publish([evolve(root, used=used)]), 0.0)
    assert (nothing.total, nothing.spans) == (None, ())


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_truncated_distribution_has_no_kl(cut: dict[str, Any]) -> None:
    root = make_turn(0, None, [1], [2, 3])
    greedy = evolve(make_turn(1, root, [4], [5]), used=evolve(root.used, **cut))
    found = under(publish([root, greedy]), 0.1)
    assert [each.figures.k1 is None for each in found.spans] == [False, True]
    assert found.total is not None
    assert (found.total.k1, found.total.k3) == (None, None)
    assert found.total.mean == pytest.approx(0.1, abs=1e-6)


def test_inherited_turns_belong_to_parent() -> None:
    fork = ForkedFrom(session_id="p", turn=2, got=2, by="replay")
    turns = tree()
    hot = evolve(turns[0], used=Sampling(temperature=0.5))
    found = under(evolve(publish([hot, *turns[1:]]), forked_from=fork), 0.1)
    assert ([each.turn for each in found.spans], found.left_out) == ([2, 3, 4], ())


def test_turn_with_missing_ancestor_is_refused() -> None:
    with pytest.raises(Refused, match="turn 3 cannot be scored: a turn before it is missing"):
        rows_to_score(tree()[2:])
