"""Responses: a request as a conversation, its tools, its sampling and its agent.

The agent is read from the headers of Codex and opencode and from what they repeat in the body. It has a name
only where its harness marks it as not the main one, because a second name for the main agent would make a
second agent of it.

An unknown field, item or tool is never a reason to refuse; what cannot be honoured and would be missed is.

Consecutive assistant items (thinking, text, calls) are one answer and become one message, joined as `Answer`
joins its parts; everything else stays one to one, so that an append-only history stays append-only. Content
that cannot be shown to the model is reported by its path, except images and files, which the user means it to
see: those are refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from attrs import define, field

from polarnode.core.codec.json import read_json
from polarnode.core.conversation import (
    Constraint,
    Conversation,
    Json,
    Message,
    ModelRequest,
    Sampling,
    Tool,
    ToolCall,
)
from polarnode.core.errors import Refused
from polarnode.providers import openai
from polarnode.providers.contract import Envelope, Memory
from polarnode.providers.openai_responses import history
from polarnode.providers.openai_responses.history import (
    INSTRUCTION,
    UNSEALED_BYTES,
    SealedContent,
    retold,
    unseal,
)
from polarnode.providers.openai_responses.shapes import (
    ActionCallItem,
    AdditionalToolsItem,
    AgentMessageItem,
    CompactionItem,
    Content,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    Object,
    OutputItem,
    PartShape,
    ReasoningItem,
    ReasoningShape,
    ResponsesRequest,
    SearchCallItem,
    SearchOutputItem,
    TextConfigShape,
)
from polarnode.providers.openai_responses.tools import Toolbox, describe_tools, full_name, shaped, tool_choice
from polarnode.providers.shapes import compact, not_text, paragraphs, read_body, unseen
from polarnode.providers.volatile import without_volatile

# ── items as messages ───────────────────────────────────────────────────────────────────────────────

_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"})
_NOT_TEXTS: Final = frozenset(
    {"input_image", "input_file", "input_audio", "input_video", "image_url", "computer_screenshot"}
)
# OpenAI's own server encrypts an agent's message as a Fernet token
_ENCRYPTED: Final = re.compile(r"gAAAAA[\w-]{60,}=*")
NEW_TOOLS: Final = "From here on these tools can be called too:"
FOUND_TOOLS: Final = "Found these tools, which can be called from here on:"
FOUND_NONE: Final = "Found no tools."


@define(eq=False)
class Transcript:
    """The conversation in a list of items, read one by one. `head` holds the tools before the first message,
    `later` the tools that are added in the conversation, as text.
    """

    messages: list[Message] = field(factory=list)
    head: Toolbox = field(factory=Toolbox)
    later: list[Tool] = field(factory=list)
    ignored: list[str] = field(factory=list)
    notes: list[str] = field(factory=list)
    _texts: list[str] = field(factory=list, init=False)
    _thoughts: list[str] = field(factory=list, init=False)
    _calls: list[ToolCall] = field(factory=list, init=False)
    _refs: list[str] = field(factory=list, init=False)
    _answering: bool = field(default=False, init=False)
    _unsealed_room: int = field(default=UNSEALED_BYTES, init=False)

    def read(self, item: Object, path: str) -> None:
        """Read one more item."""
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        reader = _READERS.get(str(kind))
        if reader is None:
            self.ignored.append(path)
            if str(kind).endswith(("_call", "_call_output", "_reference")) or str(kind).startswith("mcp_"):
                self.notes.append(
                    f"{path.removeprefix('$.')}: the {kind} belongs to another server and is kept out"
                )
        else:
            reader(self, item, path)

    def add(self, message: Message) -> None:
        """Add a message that is not the assistant's; an open answer ends before it."""
        self.close()
        self.messages.append(message)

    def close(self) -> None:
        """End the open answer, if there is one."""
        if self._answering:
            self.messages.append(
                Message(
                    role="assistant",
                    text="".join(self._texts),
                    calls=tuple(self._calls),
                    thinking="".join(self._thoughts),
                    refs=tuple(filter(None, self._refs)),
                )
            )
        self._answering = False
        self._texts, self._thoughts, self._calls, self._refs = [], [], [], []

    # ── messages ──────────────────────────────────────────────────────────

    def message(self, item: Object, path: str) -> None:
        shape = shaped(item, MessageItem, path)
        texts = list(self._parts(shape.content, f"{path}.content"))
        if shape.role == "assistant":
            self._answering = True
            self._texts += texts
            self._refs.append(shape.id or "")
        else:
            self.add(Message(role="user" if shape.role == "user" else "system", text=paragraphs(texts)))

    def agent_message(self, item: Object, path: str) -> None:
        """Read a message between Codex's agents. Codex assumes the server encrypts these messages (a schema
        contains `encrypted`) and passes them on unread, as received. This node sends them in clear. They must
        be read: a sub-agent has no other task.
        """
        shape = shaped(item, AgentMessageItem, path)
        self.add(Message(role="user", text="".join(self._parts(shape.content, f"{path}.content"))))

    def reasoning(self, item: Object, path: str) -> None:
        """Thinking: what this node sealed, else the raw thinking, else its summary. Content sealed by another
        server is not opened, only kept as a reference.
        """
        shape = shaped(item, ReasoningItem, path)
        ours = self._unsealed(shape.encrypted_content)
        shown = paragraphs(self._parts(shape.content, f"{path}.content")) or paragraphs(
            self._parts(shape.summary, f"{path}.summary")
        )
        self._answering = True
        self._thoughts.append(shown if ours is None else ours.thinking or shown)
        self._refs += (shape.id or "", (shape.encrypted_content or "") if ours is None else ours.signature)

    def compaction(self, item: Object, path: str) -> None:
        """This node's own summary of the earlier conversation. Another server's cannot be read: the
        conversation begins after it.
        """
        ours = self._unsealed(shaped(item, CompactionItem, path).encrypted_content)
        if ours is None or ours.summary is None:
            self.ignored.append(path)
            self.notes.append(
                f"{path.removeprefix('$.')}: the compaction was not made by this node and cannot be read"
            )
        else:
            self.add(Message(role="user", text=retold(ours.summary)))

    def _unsealed(self, opaque: str | None) -> SealedContent | None:
        """What this node sealed, as long as all of a request's sealed items have room together."""
        found = unseal(opaque or "", most=self._unsealed_room)
        if found is not None:
            self._unsealed_room -= len(found.thinking) + len(found.summary or "")
        return found

    # ── calls ─────────────────────────────────────────────────────────────────

    def function_call(self, item: Object, path: str) -> None:
        shape = shaped(item, FunctionCallItem, path)
        arguments = shape.arguments if isinstance(shape.arguments, str) else compact(shape.arguments or {})
        self._call(full_name(shape.name, shape.namespace), arguments, shape.call_id, shape.id)

    def custom_call(self, item: Object, path: str) -> None:
        shape = shaped(item, CustomCallItem, path)
        self._call(
            full_name(shape.name, shape.namespace), openai.arguments_of(shape.input), shape.call_id, shape.id
        )

    def action_call(self, item: Object, path: str) -> None:
        """A call of `local_shell`, `shell` or `apply_patch`, as the arguments that the model gave."""
        shape = shaped(item, ActionCallItem, path)
        name = str(item["type"]).removesuffix("_call")
        action = (shape.operation if name == "apply_patch" else shape.action) or {}
        arguments: Object = {
            key: value
            for key, value in action.items()
            if value is not None and (key, value) not in (("type", "exec"), ("env", {}))
        }
        self._call(name, compact(arguments), shape.call_id or shape.id, shape.id)

    def search_call(self, item: Object, path: str) -> None:
        shape = shaped(item, SearchCallItem, path)
        if shape.execution == "server":
            self.ignored.append(path)
            return
        arguments = shape.arguments if isinstance(shape.arguments, str) else compact(shape.arguments or {})
        self._call("tool_search", arguments, shape.call_id, shape.id)

    def _call(self, name: str, arguments: str, call_id: str | None, item_id: str | None) -> None:
        self._answering = True
        self._calls.append(ToolCall(id=call_id or "", name=name, arguments=arguments))
        self._refs += (call_id or "", item_id or "")

    # ── results ─────────────────────────────────────────────────────

    def output(self, item: Object, path: str) -> None:
        shape = shaped(item, OutputItem, path)
        text = (shape.status or "") if shape.output is None else self._result(shape.output, f"{path}.output")
        self.add(Message(role="tool", text=text, call_id=shape.call_id or shape.id or ""))

    def search_output(self, item: Object, path: str) -> None:
        shape = shaped(item, SearchOutputItem, path)
        if shape.execution == "server":
            self.ignored.append(path)
            return
        found = self._later(shape.tools or (), path)
        self.add(
            Message(
                role="tool",
                text=f"{FOUND_TOOLS}\n{describe_tools(found)}" if found else FOUND_NONE,
                call_id=shape.call_id or "",
            )
        )

    def additional_tools(self, item: Object, path: str) -> None:
        """Tools of the head before the first message, else a message at their place."""
        tools = shaped(item, AdditionalToolsItem, path).tools or ()
        if not self._answering and all(message.role == "system" for message in self.messages):
            self.head.read(tools, f"{path}.tools")
            return
        found = self._later(tools, path)
        if found:
            self.add(Message(role="system", text=f"{NEW_TOOLS}\n{describe_tools(found)}"))

    def _later(self, tools: tuple[Json, ...], path: str) -> list[Tool]:
        box = Toolbox(ignored=self.ignored, notes=self.notes)
        box.read(tools, f"{path}.tools")
        self.later += box.tools
        return box.tools

    def _result(self, output: Json, path: str) -> str:
        """A call's result, in every format: text, parts, a shell's streams, or any other JSON verbatim."""
        if isinstance(output, str):
            return output
        if isinstance(output, list) and any(
            isinstance(part, dict) and ("stdout" in part or "stderr" in part) for part in output
        ):
            return "\n".join(_streams(part) for part in output)
        if isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output):
            return paragraphs(self._parts(shaped(output, tuple[PartShape, ...], path), path, of_tool=True))
        return compact(output)

    def _parts(self, content: Content, path: str, *, of_tool: bool = False) -> Iterator[str]:
        if isinstance(content, str):
            yield content
            return
        for index, part in enumerate(content or ()):
            if part.type in _NOT_TEXTS:
                if not of_tool:
                    raise Refused(str(not_text(part.type)), path=f"{path}[{index}]")
                yield unseen(part.type)
                continue
            text = _part_text(part)
            if text is None and part.type not in _TEXTS:
                self.ignored.append(f"{path}[{index}]")
            else:
                yield text or ""


def _part_text(part: PartShape) -> str | None:
    if part.type == "encrypted_content":
        text = part.encrypted_content
        return None if text is None or _ENCRYPTED.fullmatch(text) else text
    return part.refusal if part.type == "refusal" else part.text


def _streams(part: Json) -> str:
    """One command of a shell: its output and its outcome."""
    if not isinstance(part, dict):
        return compact(part)
    outcome = part.get("outcome")
    ended = (
        f"exit code {outcome['exit_code']}"
        if isinstance(outcome, dict) and "exit_code" in outcome
        else "timed out"
    )
    streams = (text for name in ("stdout", "stderr") if isinstance(text := part.get(name), str) and text)
    return paragraphs([*streams, f"[{ended}]"] if outcome is not None else streams)


_READERS: Final[dict[str, Callable[[Transcript, Object, str], None]]] = {
    "message": Transcript.message,
    "agent_message": Transcript.agent_message,
    "reasoning": Transcript.reasoning,
    "compaction": Transcript.compaction,
    "compaction_summary": Transcript.compaction,
    "context_compaction": Transcript.compaction,
    "function_call": Transcript.function_call,
    "custom_tool_call": Transcript.custom_call,
    "local_shell_call": Transcript.action_call,
    "shell_call": Transcript.action_call,
    "apply_patch_call": Transcript.action_call,
    "tool_search_call": Transcript.search_call,
    "function_call_output": Transcript.output,
    "custom_tool_call_output": Transcript.output,
    "local_shell_call_output": Transcript.output,
    "shell_call_output": Transcript.output,
    "apply_patch_call_output": Transcript.output,
    "tool_search_output": Transcript.search_output,
    "additional_tools": Transcript.additional_tools,
}


# ── hints ────────────────────────────────────────────────────────────

_SESSION: Final = ("session-id", "session_id", "x-session-id", "x-litellm-session-id")
_METADATA: Final = "x-codex-turn-metadata"
# values of Codex's `request_kind`; the usual one is `turn`
_KINDS: Final = {"compaction": "compaction", "prewarm": "auxiliary"}


def hints(request: ResponsesRequest, headers: Mapping[str, str], *, compacts: bool) -> dict[str, str]:
    """What the request states about the agent that sent it. `compacts`: the request itself is a
    compaction.
    """
    body = _object(request.client_metadata)
    turn = _turn(headers.get(_METADATA)) or _turn(_text(body.get(_METADATA)))
    parent = (
        headers.get("x-codex-parent-thread-id")
        or _text(turn.get("parent_thread_id"))
        or headers.get("x-parent-session-id")
        or ""
    )
    helper = headers.get("x-openai-subagent") or _text(turn.get("subagent_kind"))
    session = next((headers[name] for name in _SESSION if headers.get(name)), "")
    session = session or _text(body.get("session_id")) or _text(request.prompt_cache_key)
    agent = (headers.get("thread-id") or _text(turn.get("thread_id")) or session) if parent or helper else ""
    named = {
        "session": session,
        "agent": agent,
        "parent": parent,
        "kind": "compaction" if compacts else _kind(turn, helper, parent),
    }
    present = {name: value for name, value in named.items() if value}
    return {"session": "", "agent": "", "parent": ""} | present if present else {}


def _kind(turn: Mapping[str, Json], helper: str, parent: str) -> str:
    """`compact` is Codex's own name for the helper that writes summaries."""
    if "compact" in helper:
        return "compaction"
    return _KINDS.get(_text(turn.get("request_kind"))) or ("subagent" if helper or parent else "")


def _turn(header: str | None) -> Mapping[str, Json]:
    """Codex's metadata of the turn, JSON in a header; empty where there is none."""
    try:
        return _object(read_json(header.encode("utf-8", "replace"))) if header else {}
    except Refused:
        return {}


def _object(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


# ── read ────────────────────────────────────────────────────────────

SEALED_THINKING: Final = "reasoning.encrypted_content"
LOGPROBS: Final = "message.output_text.logprobs"

# The request fields that a response echoes, with their values where the request has none.
_ECHOED: Final[Object] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def read(body: bytes, envelope: Envelope) -> ModelRequest:
    """Read a Responses body, or one whose conversation is to be compacted or counted. Raises Refused with the
    path of the field.
    """
    request, unknown = read_body(body, ResponsesRequest, envelope.parts)
    if request.model is None and envelope.operation == "generate":
        raise Refused("model is missing: it is required", path="$.model")
    items = list(_items(request, envelope.memory))
    compacts = envelope.operation == "compact" or _triggers(items)
    transcript = _transcript(request, items[:-1] if _triggers(items) else items, compacts=compacts)
    choice, notes = tool_choice(request.tool_choice, (*transcript.head.tools, *transcript.later))
    conversation = Conversation(
        messages=tuple(transcript.messages),
        tools=tuple(transcript.head.tools),
        tool_choice="none" if compacts else choice,
        thinking=_thinking(request),
    )
    return ModelRequest(
        provider="openai_responses",
        model=envelope.model or request.model or "",
        conversation=conversation,
        sampling=Sampling(
            temperature=request.temperature, top_p=request.top_p, max_tokens=request.max_output_tokens
        ),
        stream=bool(request.stream) and envelope.operation == "generate",
        hints=hints(request, envelope.headers, compacts=compacts),
        constraint=None if compacts else _constraint(request),
        logprobs=(request.top_logprobs or 0) if LOGPROBS in (request.include or ()) else None,
        one_call=request.parallel_tool_calls is False,
        generate=request.generate is not False,
        extras=_extras(request, envelope, [item for _, item in items], transcript, compacts=compacts),
        ignored=(*unknown, *_unused(request), *transcript.head.ignored, *transcript.ignored),
        notes=(*_remarks(request), *notes, *transcript.head.notes, *transcript.notes),
    )


# ── transcript ──────────────────────────────────────────────────────────────


def _items(request: ResponsesRequest, memory: Memory) -> Iterator[tuple[str, Object]]:
    """Every item of the conversation with its path, stored ones first, with references replaced by the items
    they name.
    """
    if request.previous_response_id is not None:
        for item in history.previous(memory, request.previous_response_id):
            yield "$.previous_response_id", item
    sent = request.input
    listed: tuple[Json, ...] = ({"role": "user", "content": sent},) if isinstance(sent, str) else sent or ()
    for index, value in enumerate(listed):
        path = f"$.input[{index}]"
        item = shaped(value, Object, path)
        name = item.get("id")
        refers = item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item)
        found = history.referenced(memory, name, path) if refers and isinstance(name, str) else None
        yield path, item if found is None else found


def _triggers(items: list[tuple[str, Object]]) -> bool:
    """Whether the last item asks for a compaction of the items before it."""
    return bool(items) and items[-1][1].get("type") == "compaction_trigger"


def _transcript(request: ResponsesRequest, items: list[tuple[str, Object]], *, compacts: bool) -> Transcript:
    transcript = Transcript()
    transcript.head.read(request.tools or (), "$.tools")
    if request.instructions:
        transcript.add(Message(role="system", text=request.instructions))
    for path, item in items:
        transcript.read(item, path)
    transcript.close()
    transcript.messages, volatile = _steady(transcript.messages)
    transcript.ignored += ["$.input[-1]"] if volatile else []
    if not transcript.messages and request.generate is not False:
        raise Refused("input is empty: send at least one item", path="$.input")
    if compacts:
        transcript.add(Message(role="user", text=INSTRUCTION))
    return transcript


def _steady(messages: list[Message]) -> tuple[list[Message], bool]:
    """The messages without a harness's volatile context, and whether there was any."""
    kept, volatile = without_volatile(tuple(messages))
    return list(kept), volatile


# ── settings ──────────────────────────────────────────────────────────────────


def _thinking(request: ResponsesRequest) -> bool | None:
    """Whether to think. An effort other than none leaves it to the template."""
    shape = shaped(request.reasoning or {}, ReasoningShape, "$.reasoning")
    return False if shape.effort == "none" else None


def _constraint(request: ResponsesRequest) -> Constraint | None:
    shape = shaped(request.text or {}, TextConfigShape, "$.text").format
    if shape is None or shape.type == "text":
        return None
    if shape.type == "json_object":
        return Constraint(kind="json_schema", text='{"type":"object"}')
    if shape.schema is None:
        raise Refused(
            "text.format.schema is missing: it is required with json_schema", path="$.text.format.schema"
        )
    return Constraint(kind="json_schema", text=compact(shape.schema))


def _unused(request: ResponsesRequest) -> Iterator[str]:
    """The paths of fields without effect. Logprobs are shown only when `include` asks for them, as in the API
    itself.
    """
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        yield "$.top_logprobs"
    if request.text and request.text.get("verbosity") is not None:
        yield "$.text.verbosity"


def _remarks(request: ResponsesRequest) -> Iterator[str]:
    if request.truncation not in (None, "disabled"):
        yield (
            f"truncation {request.truncation!r} was asked: nothing is ever dropped, a conversation that is"
            " too long is refused"
        )


# ── extras for the writer ────────────────────────────────────────────────


def _extras(
    request: ResponsesRequest,
    envelope: Envelope,
    items: list[Object],
    transcript: Transcript,
    *,
    compacts: bool,
) -> Object:
    """What the writer needs of the request: the echoed fields; whether thinking is sealed; the format of
    tools that were added later; what to store, or what a compaction keeps visible.
    """
    extras: Object = {"echo": _echo(request), "seals": SEALED_THINKING in (request.include or ())}
    if transcript.later:
        extras["later"] = {tool.name: dict(tool.spelling) for tool in transcript.later}
    if compacts:
        extras["compacts"] = True
    if envelope.operation == "compact":
        extras["sent"] = [
            item for item in items if item.get("role") == "user" and item.get("type") in (None, "message")
        ]
    elif envelope.operation == "generate" and request.store is not False:
        # A conversation after a compaction begins with its one item, which replaces all before it.
        extras["keeps"] = history.to_keep(envelope.memory, [] if compacts else items).as_json()
    return extras


def _echo(request: ResponsesRequest) -> Object:
    echoed: Object = {name: value for name in _ECHOED if (value := getattr(request, name)) is not None}
    text: Object = {"format": {"type": "text"}}
    reasoning: Object = {"effort": None, "summary": None}
    more: Object = {
        "text": text | (request.text or {}),
        "reasoning": reasoning | (request.reasoning or {}),
        "tools": list(request.tools or ()),
    }
    return _ECHOED | echoed | more
