"""Answers that need no engine, in their dialect's words: one that was given before, and the empty one of a client that only warms up.

The rule for whoever edits it: what is said again is what was said, part for part; only its shape, streamed or whole, is the new request's.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

from polarnode.conversation import Answer, Delta, TextDelta, TextPart, ThinkingDelta, ThinkingPart, TokenLogprob, ToolCall, Usage
from polarnode.exchange.commands import Done, Outgoing, Send
from polarnode.providers.dialect import JSON_TYPE, Call, Dialect, Reply

NOTHING = Answer(parts=(), finish_reason="stop")


def speak(dialect: Dialect, call: Call, answers: Sequence[Answer], usage: Usage) -> list[Outgoing]:
    """An answer from its first byte to its last."""
    if not call.request.stream:
        return [Reply(status=200, headers=(("content-type", JSON_TYPE),), body=dialect.whole(call, answers, usage))]
    writer = dialect.stream(call)
    data = [writer.start(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)]
    for choice, answer in enumerate(answers):
        data += [writer.delta(delta, choice=choice) for delta in _deltas(answer)]
    return [Send(b"".join((*data, writer.end(answers, usage))), writer.content_type), Done()]


def silence(dialect: Dialect, call: Call) -> list[Outgoing]:
    """The answer to a request that is not to be generated."""
    return speak(dialect, call, [NOTHING] * call.request.choices, Usage())


def _deltas(answer: Answer) -> Iterator[Delta]:
    told: tuple[TokenLogprob, ...] = answer.logprobs
    for part in answer.parts:
        match part:
            case TextPart(text):
                yield TextDelta(text, told)
                told = ()
            case ThinkingPart(text):
                yield ThinkingDelta(text)
            case ToolCall():
                yield part
            case _:
                assert_never(part)
