"""Which sessions of a group are forked, and before which turns: k sessions and their forks in place of n.

Pure. Decided when a session has ended, from its turns alone, never from its reward: a choice by the reward
would bias the values of its tree. A session that is not usable is not forked, and its forks are not made up
for: a tree is smaller then, and the budget of sampled tokens is not exceeded.

Sources. `even`: forks at states spread over a session, as Tree-GRPO's random ones are in the mean (arXiv
2509.21240). `entropy`: where the policy was least certain, TreeRL's entropy-guided branching (arXiv
2506.11902); the mean of -logprob of a turn's sampled tokens estimates their entropy without bias.
"""

from collections.abc import Collection, Sequence
from math import fsum
from typing import assert_never

from attrs import frozen

from polarnode.core.task import ForkPolicy, TaskSpec
from polarnode.core.trajectory import Turn


@frozen(kw_only=True)
class ForkPlace:
    """A place of a group that is fork number `number`, from 0, of the session in place `root`."""

    policy: ForkPolicy
    root: int
    number: int


def fork_place(spec: TaskSpec, sample_index: int) -> ForkPlace | None:
    """Whose fork the session in a place of a task is; None for one that begins without a root. The roots have
    the first places, and the forks follow in the order of their roots.
    """
    policy = spec.group.fork
    if policy is None or sample_index < policy.roots(spec.num_samples):
        return None
    root, number = divmod(sample_index - policy.roots(spec.num_samples), policy.per_session)
    return ForkPlace(policy=policy, root=root, number=number)


def fork_turns(
    policy: ForkPolicy, turns: Sequence[Turn], among: Collection[int] | None = None
) -> tuple[int, ...]:
    """The turns before which a session with these turns is forked, `per_session` of them in order; none of a
    session that has no such turn. A turn may be named several times. `among`: the turns before which it can
    be, where not all.
    """
    possible = [turn for turn in forkable(turns) if among is None or turn.index in among]
    if not possible:
        return ()
    numbers = [turn.index for turn in possible]
    match policy.at:
        case "even":
            steps = policy.per_session + 1
            # of the states in the middle: the first after the beginning, never the end
            places = [len(numbers) * step // steps for step in range(1, steps)]
            return tuple(numbers[place] for place in places)
        case "entropy":
            ranked = sorted(possible, key=lambda turn: (-uncertainty(turn), turn.index))
            chosen = [ranked[place % len(ranked)].index for place in range(policy.per_session)]
            return tuple(sorted(chosen))
        case tuple():
            named = [turn for turn in policy.at if turn in numbers]
            return tuple(
                sorted(named[place % len(named)] for place in range(policy.per_session)) if named else ()
            )
    assert_never(policy.at)


def forkable(turns: Sequence[Turn]) -> list[Turn]:
    """The turns before which a session can be forked: those of its main agent but the first, that were
    sampled whole.
    """
    return [
        turn
        for turn in turns
        if turn.index > 0 and turn.role == "main" and turn.state == "complete" and turn.sampled
    ]


def uncertainty(turn: Turn) -> float:
    """The mean of -logprob of a turn's sampled tokens, in nats."""
    return -fsum(turn.logprobs) / len(turn.logprobs)
