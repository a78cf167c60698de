"""What lineage and merging cost, as sessions grow: plan, history, commit per turn; build, check, restore per session.

    python benchmarks/merge.py [TURNS:TOKENS ...]     (default 29:32000 1000:128000)

The session is linear: each request echoes the whole history, as harnesses do, and adds one tool result.
"""

import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable

from attrs import evolve

from polarnode.conversation import Answer, Conversation, Message, TextPart, Tool, ToolCall
from polarnode.merge.builders import build
from polarnode.merge.checks import check
from polarnode.merge.lineage import Lineages, Plan
from polarnode.records import Turn, VersionSpan, floats
from polarnode.tasks import BuilderSpec

BYTES_A_TOKEN = 9  # of a trace: an int32 id, a float32 logprob, a byte of mask
TOOLS = (Tool(name="bash", description="Run a command. " * 12, parameters={"type": "object", "properties": {"command": {"type": "string"}}}),)
SECRET = b"k" * 32


def main() -> None:
    """Measure each size named on the command line."""
    for size in sys.argv[1:] or ["29:32000", "1000:128000"]:
        turns, _, tokens = size.partition(":")
        measure(int(turns), int(tokens))


def measure(turns: int, tokens: int) -> None:
    """One session of this many turns and tokens, and the figures it gives."""
    lineages = Lineages(session_id="s", secret=SECRET)
    spent = play(lineages, turns, tokens // turns)
    print(f"{turns} turns, {tokens} tokens")
    print("  a turn, mean:", ", ".join(f"{name} {seconds / turns * 1e3:.3f} ms" for name, seconds in spent.items()))
    kept = lineages.turns
    built = build(BuilderSpec(), kept)
    work: dict[str, Callable[[], object]] = {
        "build": lambda: build(BuilderSpec(), kept),
        "check": lambda: check(kept, built),
        "restore": lambda: Lineages.restore(session_id="s", secret=SECRET, turns=kept),
    }
    print("  a session, best of 3:", ", ".join(f"{name} {best(call) * 1e3:.2f} ms" for name, call in work.items()))
    size = sum(len(trace.token_ids) for trace in built.traces) * BYTES_A_TOKEN
    print(f"  rows {len(built.traces)}, {size / 1e6:.2f} MB; peak memory of the build {peak(work['build']) / size:.2f} times that")


def play(lineages: Lineages, turns: int, tokens_a_turn: int) -> dict[str, float]:
    """Seconds spent in each step over the whole session."""
    spent = dict.fromkeys(("plan", "history", "commit"), 0.0)
    messages = [Message(role="system", text="You are an agent. " * 100), Message(role="user", text="do it")]
    numbers = random.Random(1)
    for number in range(turns):
        echoed = said_again(messages)
        began = time.perf_counter()
        plan = lineages.plan(Conversation(messages=echoed, tools=TOOLS))
        planned = time.perf_counter()
        length = len(lineages.history(plan))
        known = time.perf_counter()
        turn = answered(lineages, plan, length, tokens_a_turn, numbers)
        told = time.perf_counter()
        lineages.commit(turn)
        spent["plan"] += planned - began
        spent["history"] += known - planned
        spent["commit"] += time.perf_counter() - told
        messages += [turn.answer.as_message(), Message(role="tool", text=f"result {number}\n" * 12)] if turn.answer else []
    return spent


def said_again(messages: list[Message]) -> tuple[Message, ...]:
    """The same messages in strings of their own, as they come from a body: equal, and nothing of them known yet."""
    return tuple(
        evolve(message, text=again(message.text), calls=tuple(evolve(call, arguments=again(call.arguments)) for call in message.calls))
        for message in messages
    )


def again(text: str) -> str:
    """A copy of a string, which Python would not make of a slice."""
    return text.encode().decode()


def answered(lineages: Lineages, plan: Plan, length: int, tokens: int, numbers: random.Random) -> Turn:
    """A finished turn of a plan: half of its tokens new in the prompt, half sampled."""
    delta, sampled = (array("i", numbers.choices(range(150_000), k=tokens // 2)) for _ in range(2))
    call = ToolCall(id=lineages.references.call_id(plan.index, 0), name="bash", arguments='{"command": "ls -la"}')
    answer = Answer(parts=(TextPart(f"step {plan.index} "), call), finish_reason="tool_calls")
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


def best(call: Callable[[], object]) -> float:
    """The least of three times, in seconds."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def peak(call: Callable[[], object]) -> int:
    """Bytes a call holds at its most."""
    tracemalloc.start()
    call()
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return held


if __name__ == "__main__":
    main()
