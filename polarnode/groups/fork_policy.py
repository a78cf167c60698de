"""Which sessions of a group are forked, and before which turns: k sessions and their forks in place of n.

Pure. This is decided when a session has ended, from its turns alone and never from its reward, because a
choice by the reward would bias the values of its tree. A session that is not usable is not forked, and its
forks are not replaced by others. The tree is then smaller, and the budget of sampled tokens is not exceeded.

Sources. `even` forks at states that are spread evenly over a session, as the random states of Tree-GRPO are
on average (arXiv 2509.21240). `entropy` forks where the policy was least certain, as TreeRL's entropy-guided
branching does (arXiv 2506.11902). The mean of -logprob of a turn's sampled tokens estimates their entropy
without bias.
"""

from collections.abc import Collection, Sequence
from math import fsum
from typing import assert_never

from attrs import frozen

from polarnode.core.task import ForkPolicy, TaskSpec
from polarnode.core.trajectory import Turn


@frozen(kw_only=True)
class ForkPlace:
    """A place of a group that holds fork number `number`, from 0, of the session in place `root`."""

    policy: ForkPolicy
    root: int
    number: int


def fork_place(spec: TaskSpec, sample_index: int) -> ForkPlace | None:
    """Which fork the session in a place of a task is; None if the session begins without a root. The roots
    have the first places, and the forks follow in the order of their roots.
    """
    policy = spec.group.fork
    if policy is None or sample_index < policy.roots(spec.num_samples):
        return None
    root, number = divmod(sample_index - policy.roots(spec.num_samples), policy.per_session)
    return ForkPlace(policy=policy, root=root, number=number)


def fork_turns(
    policy: ForkPolicy, turns: Sequence[Turn], among: Collection[int] | None = None
) -> tuple[int, ...]:
    """The turns before which a session with these turns is forked, `per_session` of them in order. There are
    none if the session has no such turn. A turn may occur several times. `among` are the turns before which
    the session can be forked; None means all.
    """
    possible = [turn for turn in forkable_turns(turns) if among is None or turn.index in among]
    if not possible:
        return ()
    numbers = [turn.index for turn in possible]
    match policy.at:
        case "even":
            steps = policy.per_session + 1
            # The states are in the middle: the first after the beginning at the earliest, and never the end.
            places = [len(numbers) * step // steps for step in range(1, steps)]
            return tuple(numbers[place] for place in places)
        case "entropy":
            ranked = sorted(possible, key=lambda turn: (-turn_uncertainty(turn), turn.index))
            chosen = [ranked[place % len(ranked)].index for place in range(policy.per_session)]
            return tuple(sorted(chosen))
        case tuple():
            named = [turn for turn in policy.at if turn in numbers]
            return tuple(
                sorted(named[place % len(named)] for place in range(policy.per_session)) if named else ()
            )
    assert_never(policy.at)


def forkable_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The turns before which a session can be forked: the turns of its main agent that were sampled whole,
    except for the first.
    """
    return [
        turn
        for turn in turns
        if turn.index > 0 and turn.role == "main" and turn.state == "complete" and turn.sampled
    ]


def turn_uncertainty(turn: Turn) -> float:
    """The mean of -logprob of a turn's sampled tokens, in nats."""
    return -fsum(turn.logprobs) / len(turn.logprobs)
