"""Which sessions of a group are forked, and before which turns: k sessions and their forks in place of n.

Pure. Decided when a session has ended, from its turns alone, never from its reward: a choice by the reward
would bias the values of its tree. A session that is not usable is not forked, and its forks are not made up
for: a tree is smaller then, and the budget of sampled tokens is not exceeded.

Sources. `even`: forks at states spread over a session, as Tree-GRPO's random ones are in the mean (arXiv
2509.21240). `entropy`: where the policy was least certain, TreeRL's entropy-guided branching (arXiv
2506.11902); the mean of -logprob of a turn's sampled tokens estimates their entropy without bias.
"""

from collections.abc import Sequence
from math import fsum
from typing import Literal, assert_never

from attrs import field, frozen

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory, Turn

ForkRule = Literal["even", "entropy"]


@frozen(kw_only=True)
class ForkPolicy:
    """`per_session` forks of each session, before the turns of `at`, one after another and again from the
    first, or before turns that a rule chooses: `even` spreads them over the session, `entropy` takes the
    least certain.
    """

    at: tuple[int, ...] | ForkRule = "even"
    per_session: int = field(default=1)

    def __attrs_post_init__(self) -> None:
        if self.per_session < 1:
            raise Refused("must be at least 1: a group without forks has no policy", path="$.per_session")
        if not isinstance(self.at, str) and (not self.at or min(self.at) < 1):
            raise Refused(
                "name turns from 1 on: before turn 0 nothing is inherited, which is one more sample",
                path="$.at",
            )

    def sessions(self, num_samples: int) -> int:
        """How many sessions begin without a fork, so that they and their forks are `num_samples`."""
        count, left = divmod(num_samples, 1 + self.per_session)
        if left or not count:
            raise Refused(
                f"{num_samples} samples are no sessions with {self.per_session} forks each: give a multiple"
                f" of {1 + self.per_session}",
                path="$.num_samples",
            )
        return count

    def turns(self, trajectory: Trajectory) -> tuple[int, ...]:
        """The turns before which this session is forked, one for each fork, in order; none of a session that
        has no such turn. A turn may be named several times.
        """
        possible = forkable(trajectory.turns)
        if not possible:
            return ()
        numbers = [turn.index for turn in possible]
        match self.at:
            case "even":
                steps = self.per_session + 1
                # of the states in the middle: the first after the beginning, never the end
                places = [len(numbers) * step // steps for step in range(1, steps)]
                return tuple(numbers[place] for place in places)
            case "entropy":
                ranked = sorted(possible, key=lambda turn: (-uncertainty(turn), turn.index))
                chosen = [ranked[place % len(ranked)].index for place in range(self.per_session)]
                return tuple(sorted(chosen))
            case tuple():
                named = [turn for turn in self.at if turn in numbers]
                return tuple(
                    sorted(named[place % len(named)] for place in range(self.per_session)) if named else ()
                )
        assert_never(self.at)


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
