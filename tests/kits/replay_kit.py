"""Recorded sessions made up for tests: long ones, in each dialect, with what harnesses do to a history on its
way back.

A talk is what was said, free of any dialect; a `Client` writes it as one harness would. The words are filler,
so that nothing can be known by what it says.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

from attrs import evolve, field, frozen

Dialect = Literal["openai_chat", "anthropic", "openai_responses", "google"]
DIALECTS: tuple[Dialect, ...] = ("openai_chat", "anthropic", "openai_responses", "google")
WORDS = ["alpha", "beta", "gamma", "delta", "item", "note", "path", "line", "rule", "task", "data", "step"]
Body = dict[str, Any]
Recording = dict[str, Any]


def prose(seed: int, length: int = 200) -> str:
    numbers = random.Random(seed)
    return " ".join(numbers.choice(WORDS) for _ in range(length // 5))


@frozen(kw_only=True)
class Said:
    """One message. `calls` are (id, name, arguments); `call` is the one a result answers."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    calls: tuple[tuple[str, str, Body], ...] = ()
    call: tuple[str, str] = ("", "")


def system(text: str) -> Said:
    return Said(role="system", text=text)


def user(text: str) -> Said:
    return Said(role="user", text=text)


def steps(seed: int, first: int, count: int) -> list[Said]:
    """Turns of an agent: each says something, calls one or two tools, and is told what came of it."""
    said: list[Said] = []
    for number in range(first, first + count):
        names = ["shell", "write"][: 1 + number % 2]
        calls = tuple(
            (f"call_{seed}_{number}_{k}", name, {"zeta": prose(seed + number, 40), "alpha": number})
            for k, name in enumerate(names)
        )
        said.append(
            Said(role="assistant", text="" if number % 3 == 2 else f" step {number} of {seed}\n", calls=calls)
        )
        said += [
            Said(role="tool", text=prose(seed * 1000 + number), call=(call_id, name))
            for call_id, name, _ in calls
        ]
    return said


@frozen(kw_only=True)
class Client:
    """A harness: its dialect, and how it writes a history."""

    dialect: Dialect
    parts: bool = False  # texts as lists of parts
    stripped: bool = False  # our text without the blanks around it
    sort_keys: bool = False
    bare_ids: bool = False  # call ids without separators
    tools: tuple[str, ...] = ("shell", "write")
    headers: dict[str, str] = field(factory=dict)
    extra: Body = field(factory=dict)

    def ask(self, talk: Sequence[Said], **more: Any) -> Recording:
        """A request of this talk."""
        body = _BODIES[self.dialect](self, talk) | self.extra | more
        return {
            "method": "POST",
            "target": _TARGETS[self.dialect],
            "headers": list(map(list, self.headers.items())),
            "body": body,
        }

    def text(self, message: Said) -> str:
        return message.text.strip() if self.stripped and message.role == "assistant" else message.text

    def id(self, call_id: str) -> str:
        return call_id.replace("_", "") if self.bare_ids else call_id

    def arguments(self, arguments: Body) -> str:
        return json.dumps(
            arguments, sort_keys=self.sort_keys, separators=(",", ":") if self.sort_keys else None
        )


_TARGETS: dict[Dialect, str] = {
    "openai_chat": "/sessions/s/v1/chat/completions",
    "anthropic": "/sessions/s/v1/messages?beta=true",
    "openai_responses": "/sessions/s/v1/responses",
    "google": "/sessions/s/v1beta/models/m:streamGenerateContent?alt=sse",
}
SCHEMA = {"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer"}}}


def _chat(client: Client, talk: Sequence[Said]) -> Body:
    tools = [
        {"type": "function", "function": {"name": name, "description": "do", "parameters": SCHEMA}}
        for name in client.tools
    ]
    return {
        "model": "m",
        "stream": True,
        "messages": [_chat_message(client, said) for said in talk],
        **({"tools": tools} if tools else {}),
    }


def _chat_message(client: Client, said: Said) -> Body:
    text: Any = client.text(said)
    if client.parts:
        text = [{"type": "text", "text": text}] if text else None
    message: Body = {"role": said.role, "content": text}
    if said.calls:
        message["tool_calls"] = [
            {
                "id": client.id(call_id),
                "type": "function",
                "function": {"name": name, "arguments": client.arguments(arguments)},
            }
            for call_id, name, arguments in said.calls
        ]
    return message | ({"tool_call_id": client.id(said.call[0])} if said.role == "tool" else {})


def _anthropic(client: Client, talk: Sequence[Said]) -> Body:
    messages: list[Body] = []
    for said in talk:
        role = "assistant" if said.role == "assistant" else "user"
        blocks = _anthropic_blocks(client, said)
        if said.role == "system":
            continue
        if (
            said.role == "tool"
            and messages
            and messages[-1]["role"] == "user"
            and messages[-1]["content"][0]["type"] == "tool_result"
        ):
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    tools = [{"name": name, "description": "do", "input_schema": SCHEMA} for name in client.tools]
    head = [{"type": "text", "text": said.text} for said in talk if said.role == "system"]
    return {
        "model": "m",
        "max_tokens": 99,
        "stream": True,
        "system": head,
        "messages": messages,
        **({"tools": tools} if tools else {}),
    }


def _anthropic_blocks(client: Client, said: Said) -> list[Body]:
    if said.role == "tool":
        return [{"type": "tool_result", "tool_use_id": client.id(said.call[0]), "content": said.text}]
    text = [{"type": "text", "text": client.text(said)}] if client.text(said) else []
    return text + [
        {"type": "tool_use", "id": client.id(call_id), "name": name, "input": arguments}
        for call_id, name, arguments in said.calls
    ]


def _responses(client: Client, talk: Sequence[Said]) -> Body:
    tools = [
        {"type": "function", "name": name, "description": "do", "parameters": SCHEMA} for name in client.tools
    ]
    items = [item for number, said in enumerate(talk) for item in _items(client, said, number)]
    return {
        "model": "m",
        "stream": True,
        "store": False,
        "input": items,
        **({"tools": tools} if tools else {}),
    }


def _items(client: Client, said: Said, number: int) -> list[Body]:
    if said.role == "tool":
        return [{"type": "function_call_output", "call_id": client.id(said.call[0]), "output": said.text}]
    kind = "output_text" if said.role == "assistant" else "input_text"
    role = "developer" if said.role == "system" else said.role
    message = {
        "type": "message",
        "id": f"msg_{number}",
        "role": role,
        "content": [{"type": kind, "text": client.text(said)}],
    }
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": client.id(call_id),
            "name": name,
            "arguments": client.arguments(arguments),
        }
        for call_id, name, arguments in said.calls
    ]
    return ([message] if client.text(said) else []) + calls


def _google(client: Client, talk: Sequence[Said]) -> Body:
    contents = [
        {"role": "model" if said.role == "assistant" else "user", "parts": _parts(client, said)}
        for said in talk
        if said.role != "system"
    ]
    head = [{"text": said.text} for said in talk if said.role == "system"]
    tools = [
        {
            "functionDeclarations": [
                {"name": name, "description": "do", "parametersJsonSchema": SCHEMA} for name in client.tools
            ]
        }
    ]
    instruction = {"systemInstruction": {"role": "user", "parts": head}} if head else {}
    return {
        "contents": contents,
        **instruction,
        **({"tools": tools} if client.tools else {}),
        "generationConfig": {"temperature": 1},
    }


def _parts(client: Client, said: Said) -> list[Body]:
    if said.role == "tool":
        return [
            {
                "functionResponse": {
                    "id": client.id(said.call[0]),
                    "name": said.call[1],
                    "response": {"output": said.text},
                }
            }
        ]
    text = [{"text": client.text(said)}] if client.text(said) else []
    return text + [
        {"functionCall": {"id": client.id(call_id), "name": name, "args": arguments}}
        for call_id, name, arguments in said.calls
    ]


_BODIES: dict[Dialect, Callable[[Client, Sequence[Said]], Body]] = {
    "openai_chat": _chat,
    "anthropic": _anthropic,
    "openai_responses": _responses,
    "google": _google,
}


# ── sessions ──────────────────────────────────────────────────────────────────

HEAD = (system(prose(1, 2_000)), user(prose(2)))


def turns_of(talk: Sequence[Said]) -> list[list[Said]]:
    """The requests of a talk: one where an assistant is to speak next."""
    return [list(talk[:place]) for place, said in enumerate(talk) if said.role == "assistant"] + [list(talk)]


def linear(client: Client, turns: int = 24, seed: int = 7) -> list[Recording]:
    """An undisturbed session."""
    return [client.ask(talk) for talk in turns_of([*HEAD, *steps(seed, 0, turns - 1)])]


def with_retries(client: Client, turns: int = 24) -> list[Recording]:
    """Every fifth request is sent three times, the last of them in another form of the same."""
    asked = linear(client, turns)
    again = [(one, one, evolve_body(one)) if number % 5 == 1 else (one,) for number, one in enumerate(asked)]
    return [one for ones in again for one in ones]


def evolve_body(recording: Recording) -> Recording:
    """The same question in another body: not streamed any more, or with a setting."""
    return recording | {
        "body": recording["body"]
        | ({} if "contents" in recording["body"] else {"stream": False})
        | {"temperature": 0.5}
    }


def volatile(client: Client, turns: int = 24) -> list[Recording]:
    """Each request ends with a user message that the next does not have."""
    asked = turns_of([*HEAD, *steps(7, 0, turns - 1)])
    return [client.ask([*talk, user(prose(9_000 + number))]) for number, talk in enumerate(asked)]


def volatile_end(client: Client, turns: int = 24) -> list[Recording]:
    """The last message is another while it is the last: a user's task with something of the moment
    beside it.
    """
    talk = [
        *HEAD,
        *steps(7, 0, 4),
        Said(role="assistant", text="well?"),
        user(prose(8)),
        *steps(7, 5, turns - 6),
    ]
    asked = turns_of(talk)
    return [
        client.ask([*one[:-1], user(prose(900 + number))] if one[-1].role == "user" else one)
        for number, one in enumerate(asked)
    ]


def probes() -> list[Recording]:
    """What Hermes asks a server before it speaks to it."""
    gets = ["/api/v1/models", "/api/tags", "/v1/props", "/props", "/version", "/v1/models", "/v1/models/m"]
    found = [{"method": "GET", "target": f"/sessions/s{path}", "headers": {}, "body": None} for path in gets]
    return [
        *found,
        {"method": "POST", "target": "/sessions/s/api/show", "headers": {}, "body": {"name": "m"}},
    ]


def titled_session(client: Client) -> list[Recording]:
    """A title is asked for first, without tools and in opencode's words."""
    asks = system(f"You are a title generator. You output ONLY a thread title. {prose(3)}")
    title = evolve(client, tools=()).ask([asks, user(prose(4)), user(prose(2))])
    return [title, *linear(client)]


def compacted(client: Client) -> list[Recording]:
    """After some turns a summary is asked for without tools, in Qwen Code's words, and the history begins again
    from it.
    """
    bare = evolve(client, tools=())
    before = linear(client, 8)
    asks = "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."
    summary = bare.ask([*HEAD, *steps(7, 0, 7), user(asks)])
    after = [client.ask(talk) for talk in turns_of([HEAD[0], user(prose(6)), *steps(8, 0, 7)])]
    return [*before, summary, *after]


def delegating_session(
    client: Client, marked: Callable[[Client, int], Client] = lambda client, _: client
) -> list[Recording]:
    """Two sub-agents at once, each under a head and a task of its own, interleaved with the main
    conversation.
    """
    tasks = [prose(50), prose(51)]
    spawn = Said(
        role="assistant",
        text="go",
        calls=tuple((f"call_s{k}", "shell", {"zeta": task, "alpha": k}) for k, task in enumerate(tasks)),
    )
    told = [Said(role="tool", text=f"started {k}", call=(f"call_s{k}", "shell")) for k in range(2)]
    main = turns_of([*HEAD, *steps(7, 0, 4), spawn, *told, *steps(7, 5, 6)])
    heads = [(system(prose(60 + k, 1_000)), user(f"{prose(70 + k)}\n{task}")) for k, task in enumerate(tasks)]
    agents = [
        [marked(client, k).ask(talk) for talk in turns_of([*head, *steps(20 + k, 0, 5)])]
        for k, head in enumerate(heads)
    ]
    asked = [client.ask(talk) for talk in main]
    together = [one for ones in zip(*agents, asked[6:], strict=False) for one in ones]
    return [*asked[:6], *together, *asked[6 + len(agents[0]) :]]


def resumed(client: Client) -> list[Recording]:
    """A stream that broke in mid-answer: what came of it is kept, and the model is told to go on."""
    history = [*HEAD, *steps(7, 0, 3)]
    cut = [*history, Said(role="assistant", text="half of an"), user("go on")]
    return [client.ask(talk) for talk in (*turns_of(history), cut, [*cut, *steps(7, 3, 1)])]
