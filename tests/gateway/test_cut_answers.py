"""Answers that were cut and calls that could not be read, through the whole plane in the four APIs: what the
client is told, and what the turn notes.
"""

import json
from typing import Any

import pytest
import trio.testing
from plane_kit import AsgiClient, spelled, stage
from test_model_plane_calls import CALL, CHAT, GEMINI, HI, MESSAGES, RESPONSES, SCHEMA, TOOLS, scripted

from polarnode.core.conversation import Sampling

HALF = '|\n|<tool_call>|\n{"name": "look", "arguments": {"path": "b'
LOOK: Any = {"name": "look", "description": "Read a file."}
BODIES: dict[str, Any] = {
    CHAT: {"model": "m", "messages": [HI], "tools": TOOLS},
    MESSAGES: {"model": "m", "max_tokens": 99, "messages": [HI], "tools": [LOOK | {"input_schema": SCHEMA}]},
    RESPONSES: {
        "model": "m",
        "input": "hi",
        "store": False,
        "tools": [LOOK | {"type": "function", "parameters": SCHEMA}],
    },
    GEMINI: {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [LOOK | {"parametersJsonSchema": SCHEMA}]}],
    },
}
CUT = {CHAT: "length", MESSAGES: "max_tokens", RESPONSES: "incomplete", GEMINI: "MAX_TOKENS"}
ENDED = {CHAT: "tool_calls", MESSAGES: "tool_use", RESPONSES: "completed", GEMINI: "STOP"}


def told(path: str, body: Any) -> str:
    """Why the answer ended, as the client is told."""
    reads = {
        CHAT: lambda: body["choices"][0]["finish_reason"],
        MESSAGES: lambda: body["stop_reason"],
        RESPONSES: lambda: body["status"],
        GEMINI: lambda: body["candidates"][0]["finishReason"],
    }
    return str(reads[path]())


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("calls_first", [False, True])
async def test_length_cut_beside_calls(
    autojump_clock: trio.testing.MockClock, path: str, calls_first: bool
) -> None:
    """An answer cut at its limit beside a call ends as its harness expects."""
    said = CALL + HALF
    here = stage(scripted(f"{said} and more"), sampling=Sampling(max_tokens=len(spelled(*said.split("|")))))
    here.s1.calls_first = calls_first
    asgi = AsgiClient()
    await asgi.request(here.app, path, json.dumps(BODIES[path]).encode())
    body = json.loads(asgi.body)
    assert told(path, body) == (ENDED if calls_first else CUT)[path]
    assert "tool_call>" not in asgi.body.decode().replace("tool_calls", "")
    (turn,) = here.turns
    assert (turn.finish_reason, len(turn.answer.calls), turn.answer.malformed_calls) == ("length", 1, 0)
    assert "cut call: the answer ended inside a call, which is not shown" in turn.notes


async def test_malformed_call_is_noted(autojump_clock: trio.testing.MockClock) -> None:
    engine = scripted('<tool_call>|\n{"name": "look"}\n|</tool_call>|\nand |</tool_call>')
    here = stage(engine)
    asgi = AsgiClient()
    await asgi.request(here.app, CHAT, json.dumps(BODIES[CHAT]).encode())
    (turn,) = here.turns
    assert turn.answer.malformed_calls == 2
    assert [note for note in turn.notes if note.startswith("malformed call: ")] == [
        "malformed call: it is no object of exactly name and arguments",
        "malformed call: </tool_call> without a call before it",
    ]
