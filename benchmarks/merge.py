"""Measure merging by shape and size of a session: time of each turn and of the rows, memory, losses.

    python benchmarks/merge.py                          a minute: every shape small, two of them at 1,000 turns and 128k tokens
    python benchmarks/merge.py --full                   half an hour: every shape from 10 turns to 5,000
    python benchmarks/merge.py 1000:128000 --shape mixed --path text

`text` is a session of the node's model plane: each request echoes its agent's whole history, as harnesses do,
and goes through `Lineages`. `tokens` is the same session as another gateway would have recorded it, merged as
`polarnode merge` does: prompt ids, one JSON line per call. Reading the line is counted, writing it is not;
building includes checks, and its rows are JSON. Times are CPU times, which a busy machine raises less than
wall times. `build peak` is the peak memory of building over the size of its result. Exit code 1 if rows or
trained tokens are not as expected.
"""

import argparse
import gc
import multiprocessing
import pickle
import random
import resource
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy
import orjson
from attrs import define, evolve, field, frozen
from merge_shapes import SHAPES, Ask, rows_due

from polarnode.core.arrays import floats
from polarnode.core.conversation import Answer, Conversation, Message, TextPart, Tool, ToolCall
from polarnode.core.task import BuilderSpec
from polarnode.core.trajectory import Built, Turn, VersionSpan
from polarnode.merge.attach import Plan
from polarnode.merge.builders import build
from polarnode.merge.invariants import check
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_forest import Sessions

Way = Literal["text", "tokens"]
BYTES_A_TOKEN: Final = 9  # of a row: an int32 id, a float32 logprob, a byte of mask
SECRET: Final = b"k" * 32
TOOLS: Final = (
    Tool(
        name="bash",
        description="Run a command. " * 12,
        parameters={"type": "object", "properties": {"command": {"type": "string"}}},
    ),
)
LARGEST_TRACED: Final = 1000  # turns: beyond it the second play, which counts what is kept, takes minutes


@frozen(kw_only=True)
class Case:
    """One row of the table to come."""

    shape: str
    turns: int
    tokens: int
    way: Way


@frozen(kw_only=True)
class Found:
    """What one session cost. Times in ms of the CPU, sizes in MB; `ingest` is a turn's mean, `peak` the
    build's over what it made, None unmeasured.
    """

    case: Case
    rows: int
    due: int
    share: float
    ingest: float
    build: float
    check: float | None
    output: float
    peak: float | None
    kept: float | None
    grown: float

    @property
    def right(self) -> bool:
        """Whether nothing is lost, in as few rows as can be."""
        return self.rows == self.due and self.share == 1.0


COLUMNS: Final = ("session", "turns", "tokens", "by", "rows", "trainable", "ingest ms/turn", "build ms", "check ms", "rows MB", "build peak",
                  "kept MB", "process +MB")  # fmt: skip
QUICK: Final = [(shape, 100, 32_000) for shape in SHAPES] + [
    (shape, 1000, 128_000) for shape in ("linear", "mixed")
]
FULL: Final = [
    (shape, *size)
    for size in ((10, 4_000), (100, 32_000), (1000, 128_000), (5000, 128_000))
    for shape in SHAPES
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", metavar="TURNS:TOKENS")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--shape", choices=[*SHAPES], action="append")
    parser.add_argument("--path", choices=["text", "tokens"])
    given = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    wrong = False
    for case in cases(given):
        found = alone(case)
        wrong |= not found.right
        print(shown(found), flush=True)
    return int(wrong)


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """What the command line asks for."""
    sizes = [tuple(map(int, size.split(":"))) for size in given.sizes]
    known = [(shape, *size) for size in sizes for shape in SHAPES] if sizes else FULL if given.full else QUICK
    for shape, turns, tokens in known:
        for way in ("text", "tokens"):
            if (given.shape is None or shape in given.shape) and given.path in (None, way):
                yield Case(shape=shape, turns=turns, tokens=tokens, way=way)


def alone(case: Case) -> Found:
    """A case in a process of its own, so that memory is its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, case).result()


def shown(found: Found) -> str:
    """A row of the table."""
    case = found.case
    rows = str(found.rows) if found.rows == found.due else f"**{found.rows}, not {found.due}**"
    figures = [
        f"{found.ingest:.3f}",
        f"{found.build:.1f}",
        _figure(found.check),
        f"{found.output:.1f}",
        _figure(found.peak, "×"),
        _figure(found.kept),
    ]
    return f"| {' | '.join((case.shape, str(case.turns), str(case.tokens), case.way, rows, f'{found.share:.0%}', *figures, f'{found.grown:.0f}'))} |"


def _figure(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:.1f}{unit}" if unit == "" else f"{value:.2f}{unit}"


# ── one case ──────────────────────────────────────────────────────────────────


def measure(case: Case) -> Found:
    """Play the session, make its rows, and play it once more to see what it keeps."""
    asks, before = list(SHAPES[case.shape](case.turns)), _resident()
    player = play(case, asks)
    player.merge()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    kept = _kept(case, asks) if case.turns <= LARGEST_TRACED else None
    return Found(
        case=case,
        rows=player.rows,
        due=rows_due(asks, by_tokens=case.way == "tokens"),
        share=player.trainable / player.sampled,
        ingest=player.spent / case.turns * 1e3,
        build=player.built * 1e3,
        check=None if player.checked is None else player.checked * 1e3,
        output=player.output / 1e6,
        peak=player.peak,
        kept=kept,
        grown=grown,
    )


def play(case: Case, asks: list[Ask]) -> "OurOwn | Elsewhere":
    """A whole session, half of each turn's tokens new in its prompt and half sampled."""
    numbers, half = random.Random(1), case.tokens // case.turns // 2
    player = OurOwn() if case.way == "text" else Elsewhere()
    for ask in asks:
        delta, sampled = (array("i", numbers.choices(range(150_000), k=half)) for _ in range(2))
        player.ask(ask, delta, sampled)
    return player


def _kept(case: Case, asks: list[Ask]) -> float:
    gc.collect()
    tracemalloc.start()
    player = play(case, asks)
    player.forget()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / 1e6


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@define(eq=False, kw_only=True)
class Player:
    """What both ways of playing measure. Seconds and bytes."""

    rows: int = 0
    sampled: int = 0
    trainable: int = 0
    spent: float = 0.0
    built: float = 0.0
    checked: float | None = None
    output: int = 0
    peak: float | None = None


# ── a session of our own ──────────────────────────────────────────────────────


@define(eq=False, kw_only=True)
class OurOwn(Player):
    """Requests as harnesses make them, to the lineages of a session."""

    lineages: Lineages = field(factory=lambda: Lineages(session_id="s", secret=SECRET))
    histories: dict[int, list[Message]] = field(factory=dict)
    known: dict[int, tuple[Message, Message]] = field(factory=dict)  # by the message's identity

    def ask(self, ask: Ask, delta: "array[int]", sampled: "array[int]") -> None:
        """One request, and its answer."""
        messages = self._messages(ask)
        body = tuple(map(self._read, messages))
        conversation = Conversation(messages=body, tools=TOOLS)
        hints = {"agent": f"a{ask.agent}"} if ask.agent else {}
        began = time.process_time()
        plan = self.lineages.plan(conversation, hints=hints)
        length = len(self.lineages.history(plan))
        between = time.process_time()
        turn = _turn(plan, self._answer(plan), length, delta, sampled)
        resumed = time.process_time()
        self.lineages.commit(turn)
        self.spent += between - began + time.process_time() - resumed
        self.sampled += len(sampled)
        if turn.answer is not None and not ask.again:
            result = Message(role="tool", text=f"result {plan.index}\n" * 12, call_id=turn.answer.calls[0].id)
            messages += [turn.answer.as_message(), result]

    def _read(self, message: Message) -> Message:
        """A message as a provider's reader returns it: in strings of its own when it is new, and the same
        value when a request repeats it. Where only memory is counted, the message itself.
        """
        if tracemalloc.is_tracing():
            return message
        if id(message) not in self.known:
            self.known[id(message)] = (message, pickle.loads(pickle.dumps(message)))
        return self.known[id(message)][1]

    def _messages(self, ask: Ask) -> list[Message]:
        head = [
            Message(role="system", text=f"You are agent {ask.agent}. " * 100),
            Message(role="user", text="do it"),
        ]
        messages = self.histories.setdefault(ask.agent, head)
        if ask.compacted:
            messages[:] = [
                head[0],
                Message(
                    role="user",
                    text="This session is being continued from a previous conversation: half is done",
                ),
            ]
        if ask.respelled and len(messages) > len(head):
            call = messages[-2].calls[0]
            messages[-2] = evolve(
                messages[-2], calls=(evolve(call, arguments=call.arguments.replace(": ", ":")),)
            )
        return messages

    def _answer(self, plan: Plan) -> Answer:
        call = ToolCall(
            id=self.lineages.references.call_id(plan.index, 0), name="bash", arguments='{"command": "ls -la"}'
        )
        return Answer(parts=(TextPart(f"step {plan.index} "), call), finish_reason="tool_calls")

    def merge(self) -> None:
        """Build the rows, check them, and see what building takes."""
        turns = self.lineages.turns
        made = build(BuilderSpec(), turns)
        self.rows, self.trainable = len(made.traces), check(turns, made).trainable
        self.output = sum(len(trace.token_ids) for trace in made.traces) * BYTES_A_TOKEN
        self.built = best(lambda: build(BuilderSpec(), turns))
        self.checked = best(partial(check, turns, made))
        del made  # so that only the next build is counted
        self.peak = peak(lambda: build(BuilderSpec(), turns))

    def forget(self) -> None:
        """Drop what is the harness's."""
        self.histories.clear()


def _turn(plan: Plan, answer: Answer, length: int, delta: "array[int]", sampled: "array[int]") -> Turn:
    return Turn(
        session_id="s",
        index=plan.index,
        provider="benchmark",
        lineage=plan.lineage,
        parent=plan.parent,
        kind=plan.kind,
        reason=plan.reason,
        role=plan.role,
        prompt_delta=delta,
        prompt_length=length + len(delta),
        sampled=sampled,
        logprobs=floats([-0.5] * len(sampled)),
        version_spans=(VersionSpan(version="0", start=0, end=len(sampled)),),
        before_key=plan.before_key,
        message_key=plan.after(answer),
        answer=answer,
    )


def best(call: Callable[[], Built | object]) -> float:
    """The least of three times, in seconds."""
    times = []
    for _ in range(3):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def peak(call: Callable[[], object]) -> float:
    """What a call holds at its most, over what its result holds."""
    gc.collect()
    tracemalloc.start()
    result = call()
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return most / held


# ── a session that another gateway recorded ───────────────────────────────────


@define(eq=False, kw_only=True)
class Elsewhere(Player):
    """Calls as lines of JSON, to `polarnode merge`. What a respelled answer was is another id in place of its
    last two.
    """

    sessions: Sessions = field(factory=Sessions)
    texts: dict[int, "array[int]"] = field(factory=dict)
    answered: set[int] = field(factory=set)
    calls: int = 0

    def ask(self, ask: Ask, delta: "array[int]", sampled: "array[int]") -> None:
        """One call, as it was recorded."""
        if ask.compacted or ask.agent not in self.texts:
            self.texts[ask.agent] = array("i", range(200_000 + 100 * self.calls, 200_050 + 100 * self.calls))
        elif ask.respelled and ask.agent in self.answered:
            self.texts[ask.agent][-2:] = array("i", [160_000 + self.calls])
        prompt = self.texts[ask.agent] + delta
        line = _line(self.calls, prompt, sampled)
        began = time.process_time()
        self.sessions.take(line, self.calls)
        self.spent += time.process_time() - began
        self.calls += 1
        self.answered.add(ask.agent)
        if not ask.again:
            self.texts[ask.agent] = prompt + sampled

    def merge(self) -> None:
        """Make the rows, which are checked on the way."""
        began = time.process_time()
        for row in self.sessions.rows():
            self.output += len(row)
        self.built = time.process_time() - began
        counts = self.sessions.counts
        self.rows, self.sampled, self.trainable = counts.rows, counts.sampled, counts.trainable

    def forget(self) -> None:
        """Drop what is the caller's."""
        self.texts.clear()


def _line(number: int, prompt: "array[int]", sampled: "array[int]") -> bytes:
    line: dict[str, Any] = {
        "session_id": "s",
        "turn_id": number,
        "prompt_ids": numpy.frombuffer(prompt, dtype=numpy.int32),
        "sampled_ids": numpy.frombuffer(sampled, dtype=numpy.int32),
        "logprobs": numpy.full(len(sampled), -0.25, dtype=numpy.float32),
        "weight_version": "0",
    }
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)


if __name__ == "__main__":
    sys.exit(main())
