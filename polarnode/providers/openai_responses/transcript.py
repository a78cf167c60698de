"""Responses: read a list of items as the messages of a conversation.

Consecutive assistant items (thinking, text, calls) are one answer and become one message, joined as `Answer`
joins its parts. Everything else stays one to one, so that an append-only history stays append-only. Content
that cannot be shown to the model is reported by its path, except for images and files: the user means the
model to see them, so they are refused.

Requests repeat their items. What `read_known_item` reads from an item alone is the same wherever the item
stands, so it is read once. Any other item is read in its place.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final

from attrs import define, field, frozen

from polarnode.core.conversation import Json, Message, Tool, ToolCall
from polarnode.core.errors import Refused
from polarnode.providers import openai
from polarnode.providers.openai_responses.history import (
    MAX_UNSEALED_BYTES,
    SealedContent,
    item_digest,
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
    JsonObject,
    MessageItem,
    OutputItem,
    PartShape,
    ReasoningItem,
    SearchCallItem,
    SearchOutputItem,
)
from polarnode.providers.openai_responses.tools import ToolReader, describe_tools, full_name, structure_at
from polarnode.providers.shapes import (
    compact,
    non_text_error,
    paragraphs,
    replace_json_media,
    replace_media,
    unseen,
)

# ── items as messages ───────────────────────────────────────────────────────────────────────────────

_TEXT_TYPES: Final = frozenset(
    {"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"}
)
_NOT_TEXTS: Final = frozenset(
    {
        *("input_image", "input_file", "input_audio", "input_video", "image_url", "computer_screenshot"),
        *("image", "audio"),  # types of MCP
    }
)
# OpenAI's own server encrypts a message between agents as a Fernet token.
_FERNET_TOKEN: Final = re.compile(r"gAAAAA[\w-]{60,}=*")
NEW_TOOLS_TEXT: Final = "From here on these tools can be called too:"
FOUND_TOOLS_TEXT: Final = "Found these tools, which can be called from here on:"
NO_TOOLS_FOUND_TEXT: Final = "Found no tools."


@define(eq=False)
class Transcript:
    """The conversation in a list of items, which are read one by one. `head` holds the tools before the first
    message, `later` the tools that are added during the conversation, as text.
    """

    messages: list[Message] = field(factory=list)
    head: ToolReader = field(factory=ToolReader)
    later: list[Tool] = field(factory=list)
    ignored: list[str] = field(factory=list)
    notes: list[str] = field(factory=list)
    _texts: list[str] = field(factory=list, init=False)
    _thoughts: list[str] = field(factory=list, init=False)
    _calls: list[ToolCall] = field(factory=list, init=False)
    _refs: list[str] = field(factory=list, init=False)
    _answering: bool = field(default=False, init=False)
    _unsealed_room: int = field(default=MAX_UNSEALED_BYTES, init=False)
    _unsealed_bytes: int = field(default=0, init=False)  # the bytes of the sealed items after decompression

    def read(self, item: JsonObject, path: str) -> None:
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

    def take(self, item: JsonObject, path: str, known: "KnownItem | None") -> None:
        """Read one more item, or use what is known about it from an earlier request."""
        alone = None if known is None else known.alone
        if alone is None or alone.unsealed_bytes >= self._unsealed_room:
            self.read(item, path)
            return
        for message in alone.messages:
            self.add(message)
        self._answering = self._answering or alone.answering
        self._texts += alone.texts
        self._thoughts += alone.thoughts
        self._calls += alone.calls
        self._refs += alone.refs
        self._unsealed_room -= alone.unsealed_chars

    def plain(self) -> "PlainContent | None":
        """What was read, if it consists of messages and parts of answers only, none of which depends on a
        path; else None.
        """
        head = self.head
        if self.ignored or self.notes or self.later or head.tools or head.ignored or head.notes:
            return None
        return PlainContent(
            messages=tuple(self.messages),
            answering=self._answering,
            texts=tuple(self._texts),
            thoughts=tuple(self._thoughts),
            calls=tuple(self._calls),
            refs=tuple(self._refs),
            unsealed_chars=MAX_UNSEALED_BYTES - self._unsealed_room,
            unsealed_bytes=self._unsealed_bytes,
        )

    def add(self, message: Message) -> None:
        """Add a message that is not the assistant's. An open answer ends before it."""
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

    def message(self, item: JsonObject, path: str) -> None:
        shape = structure_at(item, MessageItem, path)
        texts = list(self._parts(shape.content, f"{path}.content"))
        if shape.role == "assistant":
            self._answering = True
            self._texts += texts
            self._refs.append(shape.id or "")
        else:
            self.add(Message(role="user" if shape.role == "user" else "system", text=paragraphs(texts)))

    def read_agent_message(self, item: JsonObject, path: str) -> None:
        """Read a message between Codex's agents. Codex assumes that the server encrypts these messages (a
        schema contains `encrypted`), and passes them on unread, as received. This node sends them in clear.
        They must be read, because a sub-agent gets its task in no other way.
        """
        shape = structure_at(item, AgentMessageItem, path)
        self.add(Message(role="user", text="".join(self._parts(shape.content, f"{path}.content"))))

    def reasoning(self, item: JsonObject, path: str) -> None:
        """Read thinking: what this node sealed, else the raw thinking, else its summary. Content that another
        server sealed is not opened, only kept as a reference. An item with nothing else is no answer.
        """
        shape = structure_at(item, ReasoningItem, path)
        ours = self._unseal_item(shape.encrypted_content)
        shown = paragraphs(self._parts(shape.content, f"{path}.content")) or paragraphs(
            self._parts(shape.summary, f"{path}.summary")
        )
        if ours is None and not shown:
            self.notes.append(
                f"{path.removeprefix('$.')}: the reasoning was not made by this node, or was left out, and"
                " cannot be read"
            )
        else:
            self._answering = True
        self._thoughts.append(shown if ours is None else ours.thinking or shown)
        self._refs += (shape.id or "", (shape.encrypted_content or "") if ours is None else ours.signature)

    def compaction(self, item: JsonObject, path: str) -> None:
        """Read this node's own summary of the earlier conversation. The summary of another server cannot be
        read, so the conversation then begins after it.
        """
        ours = self._unseal_item(structure_at(item, CompactionItem, path).encrypted_content)
        if ours is None or ours.summary is None:
            self.ignored.append(path)
            self.notes.append(
                f"{path.removeprefix('$.')}: the compaction was not made by this node and cannot be read"
            )
        else:
            self.add(Message(role="user", text=retold(ours.summary)))

    def _unseal_item(self, opaque: str | None) -> SealedContent | None:
        """The content that this node sealed, as long as all sealed items of a request together have room."""
        found = unseal(opaque or "", most=self._unsealed_room)
        if found is not None:
            self._unsealed_room -= len(found.thinking) + len(found.summary or "")
            self._unsealed_bytes += found.size
        return found

    # ── calls ─────────────────────────────────────────────────────────────────

    def function_call(self, item: JsonObject, path: str) -> None:
        shape = structure_at(item, FunctionCallItem, path)
        arguments = shape.arguments if isinstance(shape.arguments, str) else compact(shape.arguments or {})
        self._call(full_name(shape.name, shape.namespace), arguments, shape.call_id, shape.id)

    def read_custom_call(self, item: JsonObject, path: str) -> None:
        shape = structure_at(item, CustomCallItem, path)
        self._call(
            full_name(shape.name, shape.namespace), openai.arguments_of(shape.input), shape.call_id, shape.id
        )

    def read_action_call(self, item: JsonObject, path: str) -> None:
        """Read a call of `local_shell`, `shell` or `apply_patch` as the arguments that the model gave."""
        shape = structure_at(item, ActionCallItem, path)
        name = str(item["type"]).removesuffix("_call")
        action = (shape.operation if name == "apply_patch" else shape.action) or {}
        arguments: JsonObject = {
            key: value
            for key, value in action.items()
            if value is not None and (key, value) not in (("type", "exec"), ("env", {}))
        }
        self._call(name, compact(arguments), shape.call_id or shape.id, shape.id)

    def read_search_call(self, item: JsonObject, path: str) -> None:
        shape = structure_at(item, SearchCallItem, path)
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

    def output(self, item: JsonObject, path: str) -> None:
        shape = structure_at(item, OutputItem, path)
        text = (shape.status or "") if shape.output is None else self._result(shape.output, f"{path}.output")
        self.add(Message(role="tool", text=text, call_id=shape.call_id or shape.id or ""))

    def read_search_output(self, item: JsonObject, path: str) -> None:
        shape = structure_at(item, SearchOutputItem, path)
        if shape.execution == "server":
            self.ignored.append(path)
            return
        found = self._later(shape.tools or (), path)
        self.add(
            Message(
                role="tool",
                text=f"{FOUND_TOOLS_TEXT}\n{describe_tools(found)}" if found else NO_TOOLS_FOUND_TEXT,
                call_id=shape.call_id or "",
            )
        )

    def read_additional_tools(self, item: JsonObject, path: str) -> None:
        """Before the first message these are tools of the head, else a message at their place."""
        tools = structure_at(item, AdditionalToolsItem, path).tools or ()
        if not self._answering and all(message.role == "system" for message in self.messages):
            self.head.read(tools, f"{path}.tools")
            return
        found = self._later(tools, path)
        if found:
            self.add(Message(role="system", text=f"{NEW_TOOLS_TEXT}\n{describe_tools(found)}"))

    def _later(self, tools: tuple[Json, ...], path: str) -> list[Tool]:
        box = ToolReader(ignored=self.ignored, notes=self.notes)
        box.read(tools, f"{path}.tools")
        self.later += box.tools
        return box.tools

    def computer(self, item: JsonObject, path: str) -> None:
        """Refuse what was done on a screen, because the agent would go on without having seen it."""
        raise Refused(
            f"this model sees no screen, so a {item.get('type')} cannot be shown: leave out that tool",
            path=path,
        )

    def _result(self, output: Json, path: str) -> str:
        """A call's result in any format: text, parts, the streams of a shell, or any other JSON verbatim."""
        if isinstance(output, str):
            return replace_media(output)
        if isinstance(output, list) and any(
            isinstance(part, dict) and ("stdout" in part or "stderr" in part) for part in output
        ):
            return "\n".join(replace_media(_streams(part)) for part in output)
        if isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output):
            return paragraphs(
                self._parts(structure_at(output, tuple[PartShape, ...], path), path, of_tool=True)
            )
        return compact(replace_json_media(output))

    def _parts(self, content: Content, path: str, *, of_tool: bool = False) -> Iterator[str]:
        if isinstance(content, str):
            yield content
            return
        for index, part in enumerate(content or ()):
            if part.type in _NOT_TEXTS:
                if not of_tool:
                    raise Refused(str(non_text_error(part.type)), path=f"{path}[{index}]")
                yield unseen(part.type)
                continue
            text = _part_text(part)
            if text is None and part.type not in _TEXT_TYPES:
                self.ignored.append(f"{path}[{index}]")
            else:
                yield replace_media(text or "") if of_tool else text or ""


def _part_text(part: PartShape) -> str | None:
    if part.type == "encrypted_content":
        text = part.encrypted_content
        return None if text is None or _FERNET_TOKEN.fullmatch(text) else text
    return part.refusal if part.type == "refusal" else part.text


def _streams(part: Json) -> str:
    """The output and the outcome of one command of a shell."""
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


_READERS: Final[dict[str, Callable[[Transcript, JsonObject, str], None]]] = {
    "message": Transcript.message,
    "agent_message": Transcript.read_agent_message,
    "reasoning": Transcript.reasoning,
    "compaction": Transcript.compaction,
    "compaction_summary": Transcript.compaction,
    "context_compaction": Transcript.compaction,
    "function_call": Transcript.function_call,
    "custom_tool_call": Transcript.read_custom_call,
    "local_shell_call": Transcript.read_action_call,
    "shell_call": Transcript.read_action_call,
    "apply_patch_call": Transcript.read_action_call,
    "tool_search_call": Transcript.read_search_call,
    "computer_call": Transcript.computer,
    "computer_call_output": Transcript.computer,
    "function_call_output": Transcript.output,
    "custom_tool_call_output": Transcript.output,
    "local_shell_call_output": Transcript.output,
    "shell_call_output": Transcript.output,
    "apply_patch_call_output": Transcript.output,
    "tool_search_output": Transcript.read_search_output,
    "additional_tools": Transcript.read_additional_tools,
}


# ── items of earlier requests ───────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class PlainContent:
    """The content of an item, wherever the item stands. It uses tuples, because an empty tuple takes no
    memory and a list takes 56 bytes.
    """

    messages: tuple[Message, ...]
    answering: bool
    texts: tuple[str, ...]
    thoughts: tuple[str, ...]
    calls: tuple[ToolCall, ...]
    refs: tuple[str, ...]
    unsealed_chars: int
    unsealed_bytes: int


@frozen
class KnownItem:
    """An item that a session's requests repeat: its digest, and its content read `alone`. That is None if the
    content depends on the item's place, or is refused.
    """

    digest: bytes
    alone: PlainContent | None


def read_known_item(item: JsonObject) -> KnownItem:
    """What can be read from an item alone."""
    digest, alone = item_digest(item), Transcript()
    try:
        alone.read(item, "$")
    except Refused:  # The refusal needs the path of the item's place.
        return KnownItem(digest, None)
    return KnownItem(digest, alone.plain())
