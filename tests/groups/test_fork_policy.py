"""Which sessions are forked and before which turns."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from trainers_kit import make_turn, publish

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.fork_policy import ForkPolicy, ForkRule, forkable, uncertainty


def session(*logprobs: float) -> Trajectory:
    """A session with a turn of two tokens for each of these."""
    turns = []
    for index, each in enumerate(logprobs):
        turns.append(make_turn(index, turns[-1] if turns else None, [1], [2, 3], logprobs=[each, each]))
    return publish(turns)


SIX = session(-0.1, -0.2, -0.9, -0.1, -0.9, -0.3)


def test_so_many_sessions_and_their_forks_are_the_samples_of_a_group() -> None:
    assert ForkPolicy(per_session=3).sessions(8) == 2
    assert ForkPolicy().sessions(2) == 1
    for samples in (7, 0, 3):
        with pytest.raises(Refused, match="samples are no sessions with 3 forks each: give a multiple of 4"):
            ForkPolicy(per_session=3).sessions(samples)


@pytest.mark.parametrize(
    ("policy", "turns"),
    [
        (ForkPolicy(at=(2,), per_session=3), (2, 2, 2)),
        (ForkPolicy(at=(2, 4), per_session=3), (2, 2, 4)),
        (ForkPolicy(at=(4, 9), per_session=2), (4, 4)),
        (ForkPolicy(at=(9,), per_session=2), ()),
        (ForkPolicy(at="even", per_session=1), (3,)),
        (ForkPolicy(at="even", per_session=2), (2, 4)),
        (ForkPolicy(at="entropy", per_session=1), (2,)),
        (ForkPolicy(at="entropy", per_session=3), (2, 4, 5)),
        (ForkPolicy(at="entropy", per_session=6), (1, 2, 2, 3, 4, 5)),
    ],
)
def test_the_turns_of_a_session(policy: ForkPolicy, turns: tuple[int, ...]) -> None:
    assert policy.turns(SIX) == turns


def test_a_session_of_one_turn_is_not_forked() -> None:
    for rule in ("even", "entropy"):
        assert ForkPolicy(at=rule, per_session=2).turns(session(-1.0)) == ()


def test_turns_of_sub_agents_and_cut_ones_are_no_states_to_fork() -> None:
    root = make_turn(0, None, [1], [2])
    cut, other = make_turn(1, root, [1], [2], state="partial"), make_turn(2, None, [1], [2], role="subagent")
    last = make_turn(3, root, [1], [2], logprobs=[-2.0])
    assert [turn.index for turn in forkable([root, cut, other, last])] == [3]
    assert uncertainty(last) == 2.0


@given(st.integers(1, 30), st.integers(1, 8), st.sampled_from(["even", "entropy"]))
def test_as_many_forks_as_were_asked_for_at_states_that_there_are(
    turns: int, per_session: int, rule: ForkRule
) -> None:
    whole = session(*(-(index * 7 % 5) / 4 - 0.1 for index in range(turns)))
    found = ForkPolicy(at=rule, per_session=per_session).turns(whole)
    assert len(found) == (per_session if turns > 1 else 0)
    assert set(found) <= set(range(1, turns))
    assert list(found) == sorted(found)
    rewarded = evolve(whole, reward=0.0)
    assert ForkPolicy(at=rule, per_session=per_session).turns(rewarded) == found, "whatever the reward"


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(Refused, match="must be at least 1"):
        ForkPolicy(per_session=0)
    for at in ((), (0,), (3, 0)):
        with pytest.raises(Refused, match="name turns from 1 on"):
            ForkPolicy(at=at)
