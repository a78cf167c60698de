"""The whole model plane under real concurrency, in virtual time: clients of three APIs talk, leave, ask twice
and fork in one session while the weights change under their answers and, at some moment, the session closes.
What was recorded is what the engine was given and gave.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import trio
import trio.testing
from attrs import define, field, frozen
from hypothesis import given
from hypothesis import strategies as st
from plane_kit import AsgiClient, Stage, spelled, stage
from sample_kit import examples
from wire_kit import ANTHROPIC, CHAT, RESPONSES, Entry, Wire

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import FinishReason
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn, VersionSpan
from polarnode.merge.builders import per_request, prefix_merging, prompt_ids
from polarnode.merge.invariants import check

WHOLE = (
    "<think>",
    "\nHm, well.\n",
    "</think>",
    "\n\nOne, \u00fc\U0001f642.",
    "<tool_call>",
    '\n{"name": "look", "arguments": {"path": "a"}}\n',
    "</tool_call>",
    "<|im_end|>",
)
PIECE = 7  # tokens a second

How = Literal["stays", "seconds", "messages", "twice"]


@define(eq=False)
class Engine:
    """Some tokens a second of one answer, or of what is still to come of it; `version` may change between
    them.
    """

    orders: list[GenerateOrder] = field(factory=list)
    running: int = 0
    version: int = 0

    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        self.orders.append(order)
        self.running += 1
        try:
            await trio.lowlevel.checkpoint()
            yield Stream(self, order)
        finally:
            self.running -= 1


@define(eq=False)
class Stream:
    """One generation of it."""

    engine: Engine
    order: GenerateOrder
    rest: list[int] = field(init=False)
    spans: list[VersionSpan] = field(factory=list)
    given: int = 0

    def __attrs_post_init__(self) -> None:
        whole, prompt = spelled(*WHOLE), list(self.order.prompt)
        said = next(
            size for size in range(len(whole) - 1, -1, -1) if prompt[len(prompt) - size :] == whole[:size]
        )
        self.rest = whole[said:]

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Chunk:
        await trio.sleep(1)
        start, version = self.given, str(self.engine.version)
        piece = self.rest[start : start + PIECE]
        self.given += len(piece)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=self.given))
        ended: FinishReason | None = "stop" if self.given == len(self.rest) else None
        return Chunk(
            ids=ids(piece),
            logprobs=floats(-0.001 * token for token in piece),
            finish_reason=ended,
            version_spans=tuple(self.spans),
        )


@frozen(kw_only=True)
class Step:
    """One asking of a client: how it behaves, after how many seconds or messages, and whether it goes on from
    the answer or from before it.
    """

    how: How
    count: int
    stream: bool
    keeps: bool


@define(eq=False)
class Client:
    """One conversation over one API."""

    wire: Wire
    here: Stage
    name: str
    history: list[Entry] = field(factory=list)

    async def talk(self, steps: list[Step]) -> None:
        self.history = [*self.wire.said("system", "Be brief."), *self.wire.said("user", self.name)]
        for step in steps:
            await self.ask(step)

    async def ask(self, step: Step) -> None:
        asked = self.wire.ask(self.history, stream=step.stream)
        body = json.dumps(asked.body).encode()
        asgi = AsgiClient(leave_at=step.count if step.how == "messages" else None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asgi.request, self.here.app, asked.path, body)
            if step.how == "twice":
                await trio.sleep(step.count / 2)
                nursery.start_soon(AsgiClient().request, self.here.app, asked.path, body)
            if step.how == "seconds":
                await trio.sleep(step.count + 0.25)
                asgi.leave()
        if asgi.whole and asgi.status == 200 and step.keeps:
            entries = self.wire.answered(asgi.body, step.stream)
            calls = self.wire.calls(entries)
            self.history += [*entries, *self.wire.results(calls, ["result"] * len(calls))]


STEPS = st.lists(
    st.builds(
        Step,
        how=st.sampled_from(("stays", "stays", "seconds", "messages", "twice")),
        count=st.integers(0, 6),
        stream=st.booleans(),
        keeps=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
CLIENTS = st.lists(
    st.tuples(st.sampled_from((CHAT, ANTHROPIC, RESPONSES)), STEPS, st.integers(0, 5)), min_size=1, max_size=3
)


@examples(40)
@given(
    clients=CLIENTS,
    updates=st.lists(st.integers(1, 6), max_size=4),
    closes=st.none() | st.integers(1, 20),
    same=st.booleans(),
)
def test_concurrent_clients_keep_invariants(
    clients: Any, updates: list[int], closes: int | None, same: bool
) -> None:
    """Whatever clients do at once the session keeps every law."""
    engine = Engine()

    async def main() -> list[Turn]:
        here = stage(engine)  # type: ignore[arg-type]

        async def new_weights() -> None:
            for seconds in updates:
                await trio.sleep(seconds + 0.5)
                engine.version += 1

        async def close() -> None:
            await trio.sleep((closes or 0) + 0.75)
            await here.s1.close()

        async def begin(number: int, wire: Wire, steps: list[Step], delay: int) -> None:
            await trio.sleep(delay)
            await Client(wire, here, "Go." if same else f"Go {number}.").talk(steps)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(new_weights)
            if closes is not None:
                nursery.start_soon(close)
            for number, (wire, steps, delay) in enumerate(clients):
                nursery.start_soon(begin, number, wire, steps, delay)
        assert (engine.running, here.s1.calls.count) == (0, 0)
        assert here.s1.lineages._graph.plans == {}
        assert here.s1.retries._in_progress == {}
        return here.turns

    turns = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    given_prompts = Counter(tuple(order.prompt) for order in engine.orders)
    # each generation is one turn, however it ended
    assert Counter(tuple(prompt_ids(turns, turn.index)) for turn in turns) == given_prompts
    by_index = {turn.index: turn for turn in turns}
    for turn in turns:
        said, step = list(turn.sampled), turn
        while step.reason == "resumed" and step.parent is not None:
            step = by_index[step.parent]
            said = [*step.sampled, *said]
        assert said == spelled(*WHOLE)[: len(said)]
        assert (turn.state == "complete") == (said == spelled(*WHOLE))
        assert list(turn.logprobs) == list(floats(-0.001 * token for token in turn.sampled))
    for build in (prefix_merging, per_request):
        built = build(turns, {})
        left = {out.turn for out in built.left_out}
        assert check(turns, built).trainable == sum(
            len(turn.sampled) for turn in turns if turn.index not in left
        )
        assert all(by_index[index].state != "complete" for index in left)
