"""Which sessions are forked and before which turns."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from trainers_kit import make_turn, publish

from polarnode.core.task import ForkPolicy, ForkRule, GroupSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.groups.fork_policy import ForkPlace, fork_place, fork_turns, forkable_turns, turn_uncertainty


def session(*logprobs: float) -> Trajectory:
    """A session with a turn of two tokens for each of these."""
    turns = []
    for index, each in enumerate(logprobs):
        turns.append(make_turn(index, turns[-1] if turns else None, [1], [2, 3], logprobs=[each, each]))
    return publish(turns)


SIX = session(-0.1, -0.2, -0.9, -0.1, -0.9, -0.3)


def test_group_samples_include_forks() -> None:
    """The samples of a group are some sessions and the forks of each."""
    policy = ForkPolicy(per_session=2)
    spec = TaskSpec(instruction="do it", harness=HarnessSpec(), num_samples=6, group=GroupSpec(fork=policy))
    assert policy.roots(6) == 2
    assert [fork_place(spec, index) for index in range(6)] == [
        None,
        None,
        *(ForkPlace(policy=policy, root=root, number=number) for root in (0, 1) for number in (0, 1)),
    ]
    assert fork_place(evolve(spec, group=GroupSpec()), 5) is None


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
def test_policy_chooses_fork_turns(policy: ForkPolicy, turns: tuple[int, ...]) -> None:
    assert fork_turns(policy, SIX.turns) == turns


def test_resumed_forks_need_a_snapshot() -> None:
    """Only states with a snapshot are chosen where forks are resumed."""
    assert fork_turns(ForkPolicy(at="entropy", per_session=2), SIX.turns, {1, 3, 5}) == (1, 5)
    assert fork_turns(ForkPolicy(at="even", per_session=2), SIX.turns, {2, 5}) == (2, 5)
    assert fork_turns(ForkPolicy(at=(2, 3), per_session=2), SIX.turns, {3}) == (3, 3)
    assert fork_turns(ForkPolicy(at="even", per_session=2), SIX.turns, {0, 9}) == ()


def test_single_turn_session_not_forked() -> None:
    for rule in ("even", "entropy"):
        assert fork_turns(ForkPolicy(at=rule, per_session=2), session(-1.0).turns) == ()


def test_subagent_and_cut_turns_not_forked() -> None:
    root = make_turn(0, None, [1], [2])
    cut, other = make_turn(1, root, [1], [2], state="partial"), make_turn(2, None, [1], [2], role="subagent")
    last = make_turn(3, root, [1], [2], logprobs=[-2.0])
    assert [turn.index for turn in forkable_turns([root, cut, other, last])] == [3]
    assert turn_uncertainty(last) == 2.0


@given(st.integers(1, 30), st.integers(1, 8), st.sampled_from(["even", "entropy"]))
def test_requested_forks_at_existing_states(turns: int, per_session: int, rule: ForkRule) -> None:
    """As many forks as were asked for at states that there are."""
    whole = session(*(-(index * 7 % 5) / 4 - 0.1 for index in range(turns)))
    found = fork_turns(ForkPolicy(at=rule, per_session=per_session), whole.turns)
    assert len(found) == (per_session if turns > 1 else 0)
    assert set(found) <= set(range(1, turns))
    assert list(found) == sorted(found)
