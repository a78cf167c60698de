"""The four APIs as a harness uses them, as far as a benchmark needs: requests, and answers sent back.

History is kept as JSON text, made once: a harness's own work is not measured.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson
from attrs import frozen

Json = Any
PARAMETERS: Json = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "What to run."}},
    "required": ["command"],
}


@frozen(kw_only=True)
class Api:
    """One API. `before` and `after` enclose a request's history; `echo` is what of an answer a harness says
    again, with its calls' ids.
    """

    name: str
    path: Callable[[bool], str]
    key_header: str
    head: Callable[[str, Sequence[tuple[str, str]], bool], dict[str, Json]]
    history: str  # the field that holds it
    user: Callable[[str], Json]
    read: Callable[[Json], tuple[list[Json], list[tuple[str, str]]]]
    joined: Callable[[list[Json]], Json]
    result: Callable[[list[tuple[str, str]], str], Json]


# ── OpenAI Chat ───────────────────────────────────────────────────────────────


def _chat_head(system: str, tools: Sequence[tuple[str, str]], stream: bool) -> dict[str, Json]:
    functions = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": PARAMETERS}}
        for name, text in tools
    ]
    return {"model": "m", "stream": stream, "tools": functions}


def _chat_read(body: Json) -> tuple[list[Json], list[tuple[str, str]]]:
    message = body["choices"][0]["message"]
    return [message], [(call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ()]


def _chat_joined(events: list[Json]) -> Json:
    text, calls = [], []
    for event in events:
        for choice in event["choices"]:
            text.append(choice["delta"].get("content") or "")
            calls += [
                {key: value for key, value in call.items() if key != "index"}
                for call in choice["delta"].get("tool_calls") or ()
            ]
    return {"choices": [{"message": {"role": "assistant", "content": "".join(text), "tool_calls": calls}}]}


def _chat_result(calls: list[tuple[str, str]], text: str) -> Json:
    return [{"role": "tool", "tool_call_id": each[0], "content": text} for each in calls] or [
        {"role": "user", "content": text}
    ]


# ── Anthropic ─────────────────────────────────────────────────────────────────


def _messages_head(system: str, tools: Sequence[tuple[str, str]], stream: bool) -> dict[str, Json]:
    functions = [{"name": name, "description": text, "input_schema": PARAMETERS} for name, text in tools]
    return {"model": "m", "max_tokens": 4096, "stream": stream, "system": system, "tools": functions}


def _messages_read(body: Json) -> tuple[list[Json], list[tuple[str, str]]]:
    content = body["content"]
    return [{"role": "assistant", "content": content}], [
        (each["id"], each["name"]) for each in content if each["type"] == "tool_use"
    ]


def _messages_joined(events: list[Json]) -> Json:
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1]["json"] += delta.get("partial_json", "")
            if "text" in delta:
                blocks[-1]["text"] += delta["text"]
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = orjson.loads(arguments or "{}")
    return {"content": blocks}


def _messages_result(calls: list[tuple[str, str]], text: str) -> Json:
    results = [{"type": "tool_result", "tool_use_id": each[0], "content": text} for each in calls]
    return [{"role": "user", "content": results or text}]


# ── OpenAI Responses ──────────────────────────────────────────────────────────


def _responses_head(system: str, tools: Sequence[tuple[str, str]], stream: bool) -> dict[str, Json]:
    functions = [
        {"type": "function", "name": name, "description": text, "parameters": PARAMETERS, "strict": False}
        for name, text in tools
    ]
    return {"model": "m", "stream": stream, "store": False, "instructions": system, "tools": functions}


def _responses_read(body: Json) -> tuple[list[Json], list[tuple[str, str]]]:
    items = body["output"]
    return items, [(each["call_id"], each["name"]) for each in items if each["type"] == "function_call"]


def _responses_joined(events: list[Json]) -> Json:
    return events[-1]["response"]


def _responses_result(calls: list[tuple[str, str]], text: str) -> Json:
    results = [{"type": "function_call_output", "call_id": each[0], "output": text} for each in calls]
    return results or [_responses_user(text)]


def _responses_user(text: str) -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


# ── Google ────────────────────────────────────────────────────────────────────


def _google_head(system: str, tools: Sequence[tuple[str, str]], stream: bool) -> dict[str, Json]:
    functions = [
        {"name": name, "description": text, "parametersJsonSchema": PARAMETERS} for name, text in tools
    ]
    return {
        "systemInstruction": {"parts": [{"text": system}]},
        "tools": [{"functionDeclarations": functions}],
    }


def _google_read(body: Json) -> tuple[list[Json], list[tuple[str, str]]]:
    content = body["candidates"][0]["content"]
    calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
    return [content], [(call.get("id", ""), call["name"]) for call in calls]


def _google_joined(events: list[Json]) -> Json:
    parts: list[Json] = []
    for event in events:
        for part in event["candidates"][0].get("content", {}).get("parts", ()):
            if "text" in part and parts and parts[-1].keys() == {"text"} == part.keys():
                parts[-1]["text"] += part["text"]
            else:
                parts.append(part)
    return {"candidates": [{"content": {"role": "model", "parts": parts}}]}


def _google_result(calls: list[tuple[str, str]], text: str) -> Json:
    answers = [
        {
            "functionResponse": {
                "name": name,
                **({"id": number} if number else {}),
                "response": {"output": text},
            }
        }
        for number, name in calls
    ]
    return [{"role": "user", "parts": answers or [{"text": text}]}]


APIS: dict[str, Api] = {
    each.name: each
    for each in (
        Api(
            name="openai_chat", path=lambda stream: "/v1/chat/completions", key_header="authorization: Bearer ", head=_chat_head, history="messages",
            user=lambda text: {"role": "user", "content": text}, read=_chat_read, joined=_chat_joined, result=_chat_result,
        ),
        Api(
            name="anthropic", path=lambda stream: "/v1/messages", key_header="x-api-key: ", head=_messages_head, history="messages",
            user=lambda text: {"role": "user", "content": text}, read=_messages_read, joined=_messages_joined, result=_messages_result,
        ),
        Api(
            name="openai_responses", path=lambda stream: "/v1/responses", key_header="authorization: Bearer ", head=_responses_head, history="input",
            user=_responses_user, read=_responses_read, joined=_responses_joined, result=_responses_result,
        ),
        Api(
            name="google", path=lambda stream: f"/v1beta/models/m:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}",
            key_header="x-goog-api-key: ", head=_google_head, history="contents", user=lambda text: {"role": "user", "parts": [{"text": text}]},
            read=_google_read, joined=_google_joined, result=_google_result,
        ),
    )
}  # fmt: skip


def events(body: bytes) -> Iterable[Json]:
    """The data of a stream's events."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield orjson.loads(line[6:])
