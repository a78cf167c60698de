"""Four harnesses that hold their histories as their APIs write them: what each asks, what it keeps of an
answer, how it tells a result.

An entry is what one API lists (a message, an item, a content). `answered` gives the entries a faithful client
keeps of the bytes it got, streamed or whole; nothing of ours is used to read them.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen
from talk_kit import Ask

Entry = dict[str, Any]
SCHEMA: Any = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "number"}},
    "required": ["path"],
}


@frozen(kw_only=True)
class Wire:
    """One API as its client writes it. `calls` are the (id, name) of an answer's calls, `results` the entries
    that answer them.
    """

    name: str
    path: Callable[[bool], str]
    body: Callable[[Sequence[Entry], Sequence[str], bool], Any]
    said: Callable[[str, str], list[Entry]]  # role (system, user), text
    answered: Callable[[bytes, bool], list[Entry]]
    calls: Callable[[Sequence[Entry]], list[tuple[str, str]]]
    results: Callable[[Sequence[tuple[str, str]], Sequence[str]], list[Entry]]
    ours: Callable[[Entry], bool]  # whether an entry is the assistant's

    def ask(
        self, history: Sequence[Entry], *, tools: Sequence[str] = ("look",), stream: bool = False, **more: Any
    ) -> Ask:
        return Ask(path=self.path(stream), body=self.body(history, tools, stream) | more)


def events(data: bytes) -> list[Any]:
    lines = [line for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


# ── Chat Completions ──────────────────────────────────────────────────────────


def _chat_body(history: Sequence[Entry], tools: Sequence[str], stream: bool) -> Any:
    listed = [
        {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": SCHEMA}}
        for name in tools
    ]
    return {"model": "m", "messages": list(history), "stream": stream} | ({"tools": listed} if listed else {})


def chat_choices(data: bytes, stream: bool) -> list[Entry]:
    """The message of each choice."""
    if not stream:
        return [choice["message"] for choice in json.loads(data)["choices"]]
    told: dict[int, Entry] = {}
    for event in events(data):
        for choice in event["choices"]:
            message = told.setdefault(
                choice["index"],
                {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []},
            )
            for name in ("content", "reasoning_content"):
                message[name] += choice["delta"].get(name) or ""
            message["tool_calls"] += [
                {k: v for k, v in call.items() if k != "index"}
                for call in choice["delta"].get("tool_calls", [])
            ]
    return [told[index] for index in sorted(told)]


def _chat_results(calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Entry]:
    return [
        {"role": "tool", "tool_call_id": call_id, "content": text}
        for (call_id, _), text in zip(calls, texts, strict=True)
    ]


CHAT = Wire(
    name="openai_chat",
    path=lambda stream: "/v1/chat/completions",
    body=_chat_body,
    said=lambda role, text: [{"role": role, "content": text}],
    answered=lambda data, stream: chat_choices(data, stream)[:1],
    calls=lambda entries: [
        (call["id"], call["function"]["name"]) for entry in entries for call in entry.get("tool_calls") or ()
    ],
    results=_chat_results,
    ours=lambda entry: entry["role"] == "assistant",
)

# ── Messages ──────────────────────────────────────────────────────────────────


def _messages_body(history: Sequence[Entry], tools: Sequence[str], stream: bool) -> Any:
    head = [block for entry in history if entry["role"] == "system" for block in entry["content"]]
    said = [entry for entry in history if entry["role"] != "system"]
    listed = [{"name": name, "description": f"Does {name}.", "input_schema": SCHEMA} for name in tools]
    return (
        {"model": "m", "max_tokens": 9999, "messages": said, "stream": stream}
        | ({"system": head} if head else {})
        | ({"tools": listed} if listed else {})
    )


def _messages_answered(data: bytes, stream: bool) -> list[Entry]:
    if not stream:
        return [{"role": "assistant", "content": json.loads(data)["content"]}]
    blocks: list[Any] = []
    for event in events(data):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            _grow(blocks[event["index"]], event["delta"])
    return [{"role": "assistant", "content": blocks}]


def _grow(block: Any, delta: Any) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            block["input"] = json.loads(delta["partial_json"])


def _messages_results(calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Entry]:
    blocks = [
        {"type": "tool_result", "tool_use_id": call_id, "content": text}
        for (call_id, _), text in zip(calls, texts, strict=True)
    ]
    return [{"role": "user", "content": blocks}] if blocks else []


ANTHROPIC = Wire(
    name="anthropic",
    path=lambda stream: "/v1/messages",
    body=_messages_body,
    said=lambda role, text: [{"role": role, "content": [{"type": "text", "text": text}]}],
    answered=_messages_answered,
    calls=lambda entries: [
        (block["id"], block["name"])
        for entry in entries
        for block in entry["content"]
        if block["type"] == "tool_use"
    ],
    results=_messages_results,
    ours=lambda entry: entry["role"] == "assistant",
)

# ── Responses ─────────────────────────────────────────────────────────────────


def _responses_body(history: Sequence[Entry], tools: Sequence[str], stream: bool) -> Any:
    listed = [
        {"type": "function", "name": name, "description": f"Does {name}.", "parameters": SCHEMA}
        for name in tools
    ]
    asked = {
        "model": "m",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "stream": stream,
        "input": list(history),
    }
    return asked | ({"tools": listed} if listed else {})


def _responses_answered(data: bytes, stream: bool) -> list[Entry]:
    if not stream:
        return list(json.loads(data)["output"])
    return [event["item"] for event in events(data) if event["type"] == "response.output_item.done"]


RESPONSES = Wire(
    name="openai_responses",
    path=lambda stream: "/v1/responses",
    body=_responses_body,
    said=lambda role, text: [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
    ],
    answered=_responses_answered,
    calls=lambda entries: [
        (item["call_id"], item["name"]) for item in entries if item["type"] == "function_call"
    ],
    results=lambda calls, texts: [
        {"type": "function_call_output", "call_id": call_id, "output": text}
        for (call_id, _), text in zip(calls, texts, strict=True)
    ],
    ours=lambda item: item["type"] in ("reasoning", "function_call") or item.get("role") == "assistant",
)

# ── generateContent ───────────────────────────────────────────────────────────


def _google_body(history: Sequence[Entry], tools: Sequence[str], stream: bool) -> Any:
    head = [part for entry in history if entry["role"] == "system" for part in entry["parts"]]
    contents = [entry for entry in history if entry["role"] != "system"]
    listed = [
        {
            "functionDeclarations": [
                {"name": name, "description": f"Does {name}.", "parametersJsonSchema": SCHEMA}
                for name in tools
            ]
        }
    ]
    asked = {"contents": contents, "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    return (
        asked
        | ({"systemInstruction": {"parts": head}} if head else {})
        | ({"tools": listed} if tools else {})
    )


def _google_answered(data: bytes, stream: bool) -> list[Entry]:
    """As the official SDK's chats keep it: every chunk of a stream is a content of its own."""
    chunks = events(data) if stream else [json.loads(data)]
    contents = [candidate["content"] for chunk in chunks for candidate in chunk["candidates"]]
    return (
        contents
        if not stream
        else [content for content in contents if content["parts"] != [{"text": ""}]] or contents[:1]
    )


def _google_results(calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Entry]:
    parts = [
        {"functionResponse": {"id": call_id, "name": name, "response": {"output": text}}}
        for (call_id, name), text in zip(calls, texts, strict=True)
    ]
    return [{"role": "user", "parts": parts}] if parts else []


def _google_calls(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    called = [part["functionCall"] for entry in entries for part in entry["parts"] if "functionCall" in part]
    return [(call["id"], call["name"]) for call in called]


GOOGLE = Wire(
    name="google",
    path=lambda stream: (
        f"/v1beta/models/m:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}"
    ),
    body=_google_body,
    said=lambda role, text: [{"role": role, "parts": [{"text": text}]}],
    answered=_google_answered,
    calls=_google_calls,
    results=_google_results,
    ours=lambda entry: entry["role"] == "model",
)

WIRES = (CHAT, ANTHROPIC, RESPONSES, GOOGLE)
