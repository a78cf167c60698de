"""What the tests of judged rewards share: a session that was had, as its evaluator sees it."""

from typing import Any, TypeVar

import merge_toys as toys
from attrs import evolve
from fakes_runtime import MemoryRuntime
from judge_kit import ScriptedJudge

from polarnode.core.conversation import Json, ToolCall
from polarnode.core.ports import Runtime
from polarnode.core.trajectory import Outcome, Turn, Verdict
from polarnode.evaluators.contract import Finished
from polarnode.rollouts.evaluation import NodeClock

Quiet = TypeVar("Quiet", bound=MemoryRuntime)


def session(*answers: str, calls: Any = (), told: str = "ok") -> tuple[Turn, ...]:
    """A conversation: these answers, each told `told` before the next; `calls` are those of each answer."""
    made, history = toys.Session(), [toys.system(), toys.user("fix the bug")]
    for place, answer in enumerate(answers):
        _, message = made.say(toys.ask(*history), answer, calls[place] if place < len(calls) else ())
        results = [toys.told(call, told) for call in message.calls] or [toys.user(told)]
        history += [message, *results]
    return made.turns


def helper_turns() -> tuple[Turn, ...]:
    """Two turns of the main agent, one of another that it did not start, and a title nobody trains."""
    made = toys.Session()
    made.say(
        toys.ask(
            toys.system("You are a title generator. You output ONLY a thread title."),
            toys.user("x"),
            tools=(),
        ),
        "a title",
    )
    _, message = made.say(toys.ask(toys.system(), toys.user("fix the bug")), "looking")
    made.say(
        toys.ask(toys.system("search well"), toys.user("find the word kiwi in all files here")), "found it"
    )
    made.say(toys.ask(toys.system(), toys.user("fix the bug"), message, toys.user("go on")), "fixed")
    return made.turns


def edited(turns: tuple[Turn, ...], index: int, **answer: Any) -> tuple[Turn, ...]:
    """The turns with an answer changed: its fields, or with `turn_…` those of its turn."""
    fields = {name.removeprefix("turn_"): value for name, value in answer.items() if name.startswith("turn_")}
    rest = {name: value for name, value in answer.items() if not name.startswith("turn_")}
    return tuple(
        evolve(turn, answer=None if turn.answer is None else evolve(turn.answer, **rest), **fields)
        if turn.index == index
        else turn
        for turn in turns
    )


def finished(
    turns: tuple[Turn, ...] = (),
    config: dict[str, Json] | None = None,
    *,
    judge: Any = None,
    runtime: Runtime | None = None,
    **outcome: Any,
) -> Finished:
    shared = runtime or quiet(MemoryRuntime())
    return Finished(
        runtime=shared,
        left=shared,
        clock=NodeClock(),
        judge=judge or ScriptedJudge([]),
        outcome=Outcome(**{"status": "completed", "exit_code": 0, **outcome}),
        turns=turns,
        instruction="fix the bug",
        config=config or {},
        metadata={},
    )


def quiet(runtime: Quiet) -> Quiet:
    """A runtime in memory without its door, which nobody knocks at here."""
    runtime.endpoint.close()
    return runtime


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=arguments)


# ── functions as users write them ─────────────────────────────────────────────


def length_rewards(finished: Finished) -> dict[int, float]:
    return {turn.index: len(turn.sampled) / 10 for turn in finished.turns}


async def by_lineage(finished: Finished) -> dict[int, float]:
    return {turn.lineage: 0.5 for turn in finished.turns}


def unknown_turn_reward(finished: Finished) -> dict[int, float]:
    return {99: 1.0}


def no_mapping(finished: Finished) -> Any:
    return [1.0]


def raises_key_error(finished: Finished) -> Any:
    raise KeyError("mine")


NOT_CALLABLE = Verdict(reward=1.0)
