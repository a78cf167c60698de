"""The words of a row, as OpenAI Chat has them: what was asked before the first sample of the row, and all that came after.

The rule for whoever edits it: nothing is read back from tokens; where words are missing there are none.
"""

from collections.abc import Iterable, Mapping

from attrs import frozen

from polarnode.conversation import Answer, Conversation, Json, Message
from polarnode.merge.transcript import transcript
from polarnode.records import Trace, Turn
from polarnode.tokens.shape import tools_shape
from polarnode.wire import plain


@frozen(kw_only=True)
class Words:
    """`known` is False where a turn of the row has no words: it was recorded by polarnode 0.1, or is not in the journal any more."""

    prompt: tuple[Message, ...] = ()
    response: tuple[Message, ...] = ()
    tools: Json = None
    known: bool = False


def words_of(trace: Trace, turns: Mapping[int, Turn]) -> Words:
    """The words of a row."""
    if not trace.turn_spans:
        return Words()
    whole = transcript(turns, trace.turn_spans[-1].turn)
    asked = asked_of(turns, first_sampled(trace))
    if whole is None or asked is None:
        return Words()
    at = len(asked.messages)
    return Words(prompt=whole.messages[:at], response=whole.messages[at:], tools=tools_json(whole), known=True)


def first_sampled(trace: Trace) -> int:
    """The turn whose sample is where the row's answer begins."""
    return next((span.turn for span in trace.turn_spans if span.start >= trace.prompt_length), trace.turn_spans[-1].turn)


def asked_of(turns: Mapping[int, Turn], index: int) -> Conversation | None:
    """What a turn answered, without its answer; None where words are missing."""
    turn = turns.get(index)
    if turn is None or turn.heard is None:
        return None
    if turn.parent is None:
        whole = transcript(turns, index)
        return None if whole is None else Conversation(messages=turn.heard.messages, tools=whole.tools)
    before = transcript(turns, turn.parent)
    return None if before is None else Conversation(messages=(*before.messages, *turn.heard.messages), tools=before.tools)


def tools_json(said: Conversation) -> Json:
    """The tools the model was shown; null for none."""
    found: Json = plain(tools_shape(said.tools))
    return found or None


def messages_json(messages: Iterable[Message]) -> list[Json]:
    """Messages as OpenAI Chat writes them: the arguments of a call are text."""
    return [_message_json(message) for message in messages]


def _message_json(message: Message) -> Json:
    said: dict[str, Json] = {"role": message.role, "content": message.text}
    if message.thinking:
        said["reasoning_content"] = message.thinking
    if message.calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
        ]
    if message.call_id is not None:
        said["tool_call_id"] = message.call_id
    return said


def answer_json(answer: Answer | None) -> Json:
    """An answer as the message a client got."""
    return _message_json(answer.as_message() if answer is not None else Message(role="assistant"))
