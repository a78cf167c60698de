"""Random sequences of calls, to ask the same of two engines and compare what their caches had.

Everything is drawn from a seed before the first call; only the sampled tokens, which become part of the next
prompt of their session, are an engine's own.
"""

from array import array
from collections.abc import Callable, Sequence
from random import Random
from uuid import uuid4

import trio
from attrs import define, field, frozen

from polarnode.core.conversation import Sampling
from polarnode.core.ports import Engine, GenerateOrder

VOCABULARY = 900  # ids below it are plain words in every model of the tests


@frozen(kw_only=True)
class Call:
    """One turn of a session: `ids` follow what it knows. `parent`: it begins with what that session knows, as
    a sub-agent does. `last`: the session ends with it.
    """

    session: str
    ids: tuple[int, ...]
    sample: int
    parent: str = ""
    last: bool = False


@frozen(kw_only=True)
class Shape:
    """Sessions in turn. Sizes are in tokens; `at_once` calls are under way together."""

    sessions: int
    turns: int
    at_once: int = 1
    system: int = 200  # that all sessions share
    task: int = 300  # that the members of a group share
    group: int = 1
    first: tuple[int, int] = (100, 500)
    result: tuple[int, int] = (50, 250)
    sample: tuple[int, int] = (4, 12)
    children: float = 0.0  # the share of turns after which a sub-agent takes one


@define(eq=False)
class CacheCounts:
    """What the calls of a sequence had, in their order."""

    prompts: list[int] = field(factory=list)
    cached: list[int] = field(factory=list)
    known: list[int] = field(factory=list)  # what a cache without bounds would have had
    sampled: int = 0

    @property
    def share(self) -> float:
        """Of what was known."""
        return sum(self.cached) / max(sum(self.known), 1)


def rounds(shape: Shape, seed: str) -> list[list[Call]]:
    """Calls by round: those of a round are under way together, in this order."""
    chance = Random(seed)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(10, VOCABULARY) for _ in range(count))

    system, tasks = drawn(shape.system), [drawn(shape.task) for _ in range(shape.sessions)]
    calls = []
    for turn in range(shape.turns):
        for number in range(shape.sessions):
            name, sample = f"s{number}", chance.randint(*shape.sample)
            ids = drawn(chance.randint(*shape.result))
            if not turn:
                ids = (*system, *tasks[number // shape.group], *drawn(chance.randint(*shape.first)))
            calls.append(Call(session=name, ids=ids, sample=sample))
            if turn and chance.random() < shape.children:
                ids = drawn(chance.randint(*shape.result))
                child = Call(session=f"{name}-{turn}", ids=ids, sample=sample, parent=name)
                calls.append(child)
    found: list[list[Call]] = []
    for call in calls:
        # a session has one call at a time, and a sub-agent begins when its parent has called it
        names = {each.session for each in found[-1]} if found else set()
        if not found or len(found[-1]) == shape.at_once or {call.session, call.parent} & names:
            found.append([])
        found[-1].append(call)
    return found


def lives(at_once: int, total: int, seed: str) -> list[list[Call]]:
    """Sessions that begin and end, some of which wait long for their next turn: one call in each round."""
    chance, begun = Random(seed), 0
    turns: dict[str, int] = {}
    fresh: set[str] = set()
    found: list[list[Call]] = []

    def drawn(least: int, most: int) -> tuple[int, ...]:
        return tuple(chance.randrange(10, VOCABULARY) for _ in range(chance.randint(least, most)))

    system = drawn(200, 200)
    while begun < total or turns:
        while len(turns) < at_once and begun < total:
            turns[f"s{begun}"] = chance.randint(2, 6)
            fresh.add(f"s{begun}")
            begun += 1
        name = chance.choice([*turns])
        ids = (*system, *drawn(400, 900)) if name in fresh else drawn(50, 250)
        fresh.discard(name)
        turns[name] -= 1
        last = not turns[name]
        found.append([Call(session=name, ids=ids, sample=chance.randint(4, 12), last=last)])
        if last:
            del turns[name]
    return found


async def played(
    engine: Engine, asked: Sequence[Sequence[Call]], *, forget: Callable[[str], None] | None = None
) -> CacheCounts:
    """Ask an engine; a round begins when the one before has ended. With `forget` the calls have the names of
    their sessions, and it is called with each that has ended.
    """
    figures = CacheCounts()
    known: dict[str, list[int]] = {}
    for together in asked:
        results: dict[str, tuple[int, list[int]]] = {}
        prompts = {}
        for call in together:
            before = known.get(call.session) or known.get(call.parent) or []
            prompts[call.session] = [*before, *call.ids]
            figures.known.append(_shared(prompts[call.session], known))
        async with trio.open_nursery() as nursery:
            for call in together:
                name = "" if forget is None else call.session
                await nursery.start(started, engine, call, prompts[call.session], name, results)
        for call in together:
            cached, sampled = results[call.session]
            figures.prompts.append(len(prompts[call.session]))
            figures.cached.append(cached)
            figures.sampled += len(sampled)
            # of a sample's last token there are no keys and values, so it is read with what follows
            known[call.session] = [*prompts[call.session], *sampled]
            if forget is not None and call.last:
                forget(call.session)
    return figures


def _shared(prompt: Sequence[int], known: dict[str, list[int]]) -> int:
    """The longest prefix that some session knows, without the last token of its sample."""
    most = 0
    for other in known.values():
        end = min(len(prompt) - 1, len(other) - 1)
        same = next((at for at in range(end) if prompt[at] != other[at]), end)
        most = max(most, same)
    return most


async def started(
    engine: Engine,
    call: Call,
    prompt: Sequence[int],
    session: str,
    results: dict[str, tuple[int, list[int]]],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    order = GenerateOrder(
        request_id=uuid4().hex,
        prompt=array("i", prompt),
        sampling=Sampling(max_tokens=call.sample, temperature=1.0),
        stop_ids=(),
        affinity=session,
    )
    async with engine.generate(order) as stream:
        task_status.started()
        chunks = [chunk async for chunk in stream]
    sampled = [token for chunk in chunks for token in chunk.ids]
    results[call.session] = (chunks[0].cached_tokens, sampled)
