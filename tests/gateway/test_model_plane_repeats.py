"""A rollout that loops, through the whole plane: the call after `max_repeats` equal turns is refused, in every
dialect, and what makes progress never is.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import trio.testing
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, AsgiClient, Stage, answers, stage
from tokens_kit import model

CHAT, MESSAGES, RESPONSES, GEMINI = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1beta/models/m:generateContent",
)
SCHEMA: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
LOOK = {"name": "look", "description": "Read a file."}
MISSING = "cat: a.txt: No such file or directory"

# a dialect's request, and what follows an answer: the items that a client appends for its calls' result
Follow = Callable[[Any, str], list[Any]]


def chat(answer: Any, result: str) -> list[Any]:
    message = answer["choices"][0]["message"]
    called = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call in message.get("tool_calls") or ()
    ]
    return [message, *(called or [{"role": "user", "content": result}])]


def anthropic(answer: Any, result: str) -> list[Any]:
    called: list[Any] = [
        {"type": "tool_result", "tool_use_id": part["id"], "content": result}
        for part in answer["content"]
        if part["type"] == "tool_use"
    ]
    return [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": called or [{"type": "text", "text": result}]},
    ]


def responses(answer: Any, result: str) -> list[Any]:
    called: list[Any] = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": result}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return [*answer["output"], *(called or [{"role": "user", "content": result}])]


def google(answer: Any, result: str) -> list[Any]:
    content = answer["candidates"][0]["content"]
    called: list[Any] = [
        {"functionResponse": {**part["functionCall"], "response": {"output": result}}}
        for part in content["parts"]
        if "functionCall" in part
    ]
    for part in called:
        del part["functionResponse"]["args"]
    return [content, {"role": "user", "parts": called or [{"text": result}]}]


DIALECTS: dict[str, tuple[str, Any, Follow]] = {
    CHAT: ("messages", {"tools": [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}]}, chat),
    MESSAGES: ("messages", {"max_tokens": 99, "tools": [{**LOOK, "input_schema": SCHEMA}]}, anthropic),
    RESPONSES: ("input", {"tools": [{"type": "function", **LOOK, "parameters": SCHEMA}]}, responses),
    GEMINI: (
        "contents",
        {"tools": [{"functionDeclarations": [{**LOOK, "parameters": SCHEMA}]}]},
        google,
    ),
}


def a_look(path: str = "a.txt", text: str = "") -> str:
    return f'{text}{"|" if text else ""}<tool_call>|\n{{"name": "look", "arguments": {{"path": "{path}"}}}}\n|</tool_call>'


def scripted(*texts: str) -> ScriptedEngine:
    return ScriptedEngine(
        reply=answers(*texts), vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT
    )


async def until_refused(
    here: Stage, path: str = CHAT, *results: str, most: int = 9
) -> tuple[int, dict[str, Any]]:
    """How many calls were answered, of `most`, and the refusal of the next. `results` in order, the last for
    ever.
    """
    name, rest, follow = DIALECTS[path]
    first: Any = {"role": "user", "content": "hi"}
    history: list[Any] = [{"role": "user", "parts": [{"text": "hi"}]} if path == GEMINI else first]
    for number in range(most):
        asgi = AsgiClient()
        await asgi.request(here.app, path, json.dumps({"model": "m", name: history, **rest}).encode())
        if asgi.status != 200:
            assert asgi.status == 400
            return number, json.loads(asgi.body)["error"]
        history += follow(json.loads(asgi.body), results[min(number, len(results) - 1)])
    return most, {}


@pytest.mark.parametrize("path", list(DIALECTS))
async def test_same_call_and_result_is_refused(autojump_clock: trio.testing.MockClock, path: str) -> None:
    """The same call with the same result is refused in every dialect."""
    # what is written beside the call does not matter
    here = stage(scripted(*(a_look(text=f"Once more, {n}. ") for n in range(9))), max_repeats=3)
    answered, error = await until_refused(here, path, "a line")
    assert (answered, here.s1.budget.spent_clock) == (3, "repeats")
    assert "its budget of 3 equal turns in a row: stop" in error["message"]
    assert here.s1.metrics()["refusals"] == {"budget_spent": 1}


@pytest.mark.parametrize("path", list(DIALECTS))
async def test_same_error_refused_whatever_called(autojump_clock: trio.testing.MockClock, path: str) -> None:
    """The same error is refused, whatever was called."""
    here = stage(scripted(*(a_look(f"{n}.txt") for n in range(9))), max_repeats=4)
    answered, _ = await until_refused(here, path, "a line", MISSING)
    assert (answered, here.s1.budget.spent_clock) == (5, "repeats")


@pytest.mark.parametrize("path", list(DIALECTS))
@pytest.mark.parametrize("result", ["", "ok", "No matches found"])
async def test_other_calls_same_result_are_answered(
    autojump_clock: trio.testing.MockClock, path: str, result: str
) -> None:
    """Other calls with the same harmless result are answered."""
    here = stage(scripted(*(a_look(f"{n}.txt") for n in range(9))), max_repeats=2)
    assert await until_refused(here, path, result) == (9, {})
    assert here.s1.budget.spent_clock is None


async def test_loop_without_budget_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    assert await until_refused(stage(scripted(a_look())), CHAT, MISSING) == (9, {})


async def test_answers_without_calls_loop_too(autojump_clock: trio.testing.MockClock) -> None:
    here = stage(scripted("I am done."), max_repeats=3)
    assert (await until_refused(here, CHAT, "Call a tool."))[0] == 3


async def test_progress_resets_the_count(autojump_clock: trio.testing.MockClock) -> None:
    here = stage(scripted(a_look(), a_look(), a_look("b.txt"), a_look()), max_repeats=3)
    assert (await until_refused(here, CHAT, "a line"))[0] == 6


async def test_initial_history_does_not_count(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A history that came with the first request is not this session's."""
    here = stage(scripted("A.", "B.", "C."), max_repeats=2)
    foreign = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}]
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}, *foreign * 5]}
    asgi = AsgiClient()
    await asgi.request(here.app, CHAT, json.dumps(asked).encode())
    assert asgi.status == 200


async def test_one_looping_agent_ends_run(autojump_clock: trio.testing.MockClock) -> None:
    here = stage(scripted(a_look()), max_repeats=2)
    spent: list[str | None] = []
    here.s1.budget.on_spent = lambda: spent.append(here.s1.budget.spent_clock)
    assert (await until_refused(here, CHAT, MISSING))[0] == 2
    # another conversation of the session, and the same again
    assert [(await until_refused(here, path, "a line"))[0] for path in DIALECTS] == [0] * 4
    assert spent == ["repeats"]
    assert here.s1.metrics()["refusals"] == {"budget_spent": 5}


async def test_resent_request_is_no_repeat(autojump_clock: trio.testing.MockClock) -> None:
    here, history = stage(scripted(a_look()), max_repeats=2), [{"role": "user", "content": "hi"}]
    for _ in range(5):
        asgi = AsgiClient()
        await asgi.request(here.app, CHAT, json.dumps({"model": "m", "messages": history}).encode())
        assert asgi.status == 200
