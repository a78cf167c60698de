"""The sessions that merging is measured with: order of agents, replaced histories, re-tokenized answers.

A shape is a sequence of asks without texts or ids, so the same session can be played to the node's lineages
and to `polarnode merge`. When you add a shape, add the rows it must give: `rows_due` counts them from the
asks alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from attrs import frozen


@frozen(kw_only=True)
class Ask:
    """One model call. `agent` 0 is the main one.

    `compacted`: its agent's history was replaced by a summary. `respelled`: its agent's last answer comes
    back in other tokens (and its JSON with other spaces). `again`: it will be asked once more, and that
    answer be used.
    """

    agent: int = 0
    compacted: bool = False
    respelled: bool = False
    again: bool = False


def linear(turns: int) -> Iterator[Ask]:
    """One agent, only appended to."""
    return (Ask() for _ in range(turns))


def interleaved(turns: int) -> Iterator[Ask]:
    """Four agents in turn."""
    return (Ask(agent=turn % 4) for turn in range(turns))


def sub_agents(turns: int) -> Iterator[Ask]:
    """A main agent, and between any two of its calls one of one of its four sub-agents."""
    return (Ask(agent=_under_main(turn)) for turn in range(turns))


def compaction(turns: int) -> Iterator[Ask]:
    """A history that is replaced four times."""
    every = max(turns // 5, 1)
    return (Ask(compacted=0 < turn <= 4 * every and turn % every == 0) for turn in range(turns))


def retries(turns: int) -> Iterator[Ask]:
    """Every tenth call is the ninth again, whose answer was not used."""
    return (Ask(again=turn % 10 == 8) for turn in range(turns))


def respelled(turns: int) -> Iterator[Ask]:
    """Every twentieth call holds the answer before it in other tokens."""
    return (Ask(respelled=turn % 20 == 7) for turn in range(turns))


def mixed(turns: int) -> Iterator[Ask]:
    """A main agent that is compacted once, its four sub-agents, and every twentieth call with an answer in
    other tokens.
    """
    half = turns // 2 - turns // 2 % 2
    return (
        Ask(agent=_under_main(turn), compacted=turn == half, respelled=turn % 20 == 17)
        for turn in range(turns)
    )


def _under_main(turn: int) -> int:
    return 0 if turn % 2 == 0 else 1 + turn // 2 % 4


SHAPES: Final[Mapping[str, Callable[[int], Iterator[Ask]]]] = {
    "linear": linear,
    "interleaved": interleaved,
    "sub-agents": sub_agents,
    "compaction": compaction,
    "retries": retries,
    "re-tokenised": respelled,
    "mixed": mixed,
}


def rows_due(asks: Sequence[Ask], *, by_tokens: bool) -> int:
    """The fewest rows: one an agent, a compaction and a call asked again; by tokens alone also one for each
    answer in other tokens.
    """
    agents = len({ask.agent for ask in asks})
    compacted, again = sum(ask.compacted for ask in asks), sum(ask.again for ask in asks)
    answered: set[int] = set()
    broken = 0
    for ask in asks:
        broken += ask.respelled and ask.agent in answered and not ask.compacted
        answered.add(ask.agent)
    return agents + compacted + again + (broken if by_tokens else 0)
