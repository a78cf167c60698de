"""A toy model and a toy session for the merge tests: messages become ids by a rule anyone can check, samples
are whatever a test wants.

Ids below 1000 are the toy template's own; a word is 1000 and more. Nothing here is a double of our code: it
is the world around it.
"""

from array import array
from collections.abc import Mapping, Sequence
from zlib import crc32

from attrs import evolve, field, frozen

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import (
    Answer,
    Conversation,
    FinishReason,
    Message,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCall,
)
from polarnode.core.trajectory import NewMessages, Turn, TurnState, VersionSpan
from polarnode.merge.attach import Plan
from polarnode.merge.figures import DIVERGED_NOTE, new_messages_of, note_word
from polarnode.merge.lineage import Lineages

SECRET = b"merge toys, thirty-two bytes ok."
HEAD, START, END, ASK = 1, 2, 3, 4
ROLES = {"system": 11, "user": 12, "assistant": 13, "tool": 14}
BASH = Tool(
    name="bash",
    description="run",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}},
)


def words(text: str) -> list[int]:
    return [1000 + crc32(word.encode()) % 100_000 for word in text.split(" ")] if text else []


def rendered(messages: Sequence[Message]) -> list[int]:
    out: list[int] = []
    for message in messages:
        calls = [word for call in message.calls for word in words(f"{call.name} {call.arguments}")]
        out += [START, ROLES[message.role], *words(message.text), *calls, END]
    return out


def full(conversation: Conversation) -> list[int]:
    tools = [word for tool in conversation.tools for word in words(tool.name)]
    return [HEAD, *tools, *rendered(conversation.messages), START, ROLES["assistant"], ASK]


def suffix(messages: Sequence[Message]) -> list[int]:
    return [*rendered(messages), START, ROLES["assistant"], ASK] if messages else []


def system(text: str = "be good") -> Message:
    return Message(role="system", text=text)


def user(text: str = "do it") -> Message:
    return Message(role="user", text=text)


def said(text: str) -> Message:
    return Message(role="assistant", text=text)


def told(call: ToolCall | str, text: str) -> Message:
    return Message(role="tool", text=text, call_id=call if isinstance(call, str) else call.id)


def ask(*messages: Message, tools: tuple[Tool, ...] = (BASH,), thinking: bool | None = None) -> Conversation:
    return Conversation(messages=messages, tools=tools, thinking=thinking)


@frozen(kw_only=True)
class Pending:
    """A request being answered: its plan and the prompt the engine sees."""

    plan: Plan
    prompt: "array[int]"
    delta: "array[int]"
    new_messages: NewMessages = field(factory=NewMessages)


class Session:
    """A session as an exchange would run it: plan, render, sample, commit."""

    def __init__(self, session_id: str = "s-1") -> None:
        self.session_id = session_id
        self.lineages = Lineages(session_id=session_id, secret=SECRET)
        self.prompts: dict[int, array[int]] = {}
        self.samples = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.lineages.turns

    def begin(
        self, conversation: Conversation, *, request_key: str = "", hints: Mapping[str, str] | None = None
    ) -> Pending:
        plan = self.lineages.plan(conversation, request_key=request_key, hints=hints or {})
        history = self.lineages.history(plan)
        delta = ids(full(conversation) if plan.parent is None else self.close(plan) + suffix(plan.new))
        return Pending(
            plan=plan, prompt=history + delta, delta=delta, new_messages=new_messages_of(plan, conversation)
        )

    def close(self, plan: Plan) -> list[int]:
        parent = next(turn for turn in self.turns if turn.index == plan.parent)
        return [END] if plan.new and (not parent.sampled or parent.sampled[-1] != END) else []

    def answer(
        self,
        plan: Plan,
        text: str = "",
        calls: Sequence[tuple[str, str]] = (),
        thinking: str = "",
        finish: FinishReason = "stop",
    ) -> Answer:
        made = [
            ToolCall(id=self.lineages.references.call_id(plan.index, k), name=name, arguments=args)
            for k, (name, args) in enumerate(calls)
        ]
        parts = (*([ThinkingPart(thinking)] if thinking else []), *([TextPart(text)] if text else []), *made)
        return Answer(parts=parts, finish_reason="tool_calls" if made and finish == "stop" else finish)

    def sample(self, answer: Answer) -> list[int]:
        """Ids no encoder would give for this text, and never the same twice: a prompt that holds them was not
        encoded again.
        """
        self.samples += 1
        spelled = [-word for word in words(answer.thinking) + words(answer.text)]
        return [-self.samples, *spelled, *([END] if answer.finish_reason in ("stop", "tool_calls") else [])]

    def turn(
        self,
        pending: Pending,
        answer: Answer | None,
        *,
        state: TurnState = "complete",
        sampled: list[int] | None = None,
    ) -> Turn:
        plan = pending.plan
        sample = sampled if sampled is not None else self.sample(answer) if answer is not None else []
        return Turn(
            session_id=self.session_id,
            index=plan.index,
            provider="toy",
            lineage=plan.lineage,
            parent=plan.parent,
            kind=plan.kind,
            reason=plan.reason,
            role=plan.role,
            state=state,
            prompt_delta=pending.delta,
            prompt_length=len(pending.prompt),
            sampled=ids(sample),
            logprobs=floats(-0.25 * (place % 7 + 1) - plan.index for place in range(len(sample))),
            version_spans=versions(len(sample), plan.index),
            finish_reason=answer.finish_reason if answer is not None else "error",
            request_key=plan.request_key,
            before_key=plan.before_key,
            message_key=plan.after(answer) if answer is not None and state != "failed" else "",
            answer=answer,
            new_messages=pending.new_messages,
            notes=plan.notes,
        )

    def end(
        self,
        pending: Pending,
        answer: Answer | None,
        *,
        state: TurnState = "complete",
        sampled: list[int] | None = None,
    ) -> Turn:
        turn = self.turn(pending, answer, state=state, sampled=sampled)
        self.lineages.commit(turn)
        self.prompts[turn.index] = pending.prompt
        return turn

    def say(
        self,
        conversation: Conversation,
        text: str = "",
        calls: Sequence[tuple[str, str]] = (),
        **hows: object,
    ) -> tuple[Turn, Message]:
        """Ask and answer in one go. Returns the turn and the message a faithful client echoes."""
        state = hows.pop("state", "complete")
        finish = hows.pop("finish", "stop" if state == "complete" else "abort")
        thinking = str(hows.pop("thinking", ""))
        pending = self.begin(conversation, **hows)  # type: ignore[arg-type]
        answer = self.answer(pending.plan, text, calls, thinking, finish)  # type: ignore[arg-type]
        turn = self.end(pending, answer, state=state)  # type: ignore[arg-type]
        return turn, answer.as_message()


def versions(length: int, turn: int) -> tuple[VersionSpan, ...]:
    """Every other turn saw the weights change in the middle."""
    if length == 0:
        return ()
    if length == 1 or turn % 2:
        return (VersionSpan(version=f"v{turn}", start=0, end=length),)
    half = length // 2
    return (
        VersionSpan(version=f"v{turn}", start=0, end=half),
        VersionSpan(version=f"v{turn + 1}", start=half, end=length),
    )


def renamed(message: Message, old: str, new: str) -> Message:
    """A message whose call ids are spelled otherwise."""
    return evolve(message, calls=tuple(evolve(call, id=call.id.replace(old, new)) for call in message.calls))


def of_turns(notes: Sequence[str]) -> tuple[str, ...]:
    """A plan's notes but for what only requests that are still remembered tell."""
    return tuple(note for note in notes if note_word(note) != DIVERGED_NOTE)
