"""The one model of the node, as its calls need it: an engine, and a template that is rendered without holding up the event loop.

The rule for whoever edits it: rendering is pure and may be abandoned in its thread; nothing it is given is changed by anyone meanwhile.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import trio
from attrs import define, evolve, field

from polarnode.conversation import Conversation, Message, Tool
from polarnode.exchange import Rendered
from polarnode.ports import Engine, Tokenizer
from polarnode.providers.dialect import ServedModel
from polarnode.tokens.family import Family
from polarnode.tokens.parse import Parser
from polarnode.tokens.template import Template
from polarnode.web.stream import Pace

T = TypeVar("T")

RENDERINGS: Final = 2  # at once, in threads: encoding leaves the GIL alone but rendering does not, and more only take the loop's turns
INLINE_CHARS: Final = 2_000  # new text up to this is rendered in place, in about 2 ms; a thread's way there and back costs as much under load


@define(eq=False, kw_only=True)
class Model:
    """What is served. `context_length` in tokens, `now` is wall seconds."""

    id: str
    engine: Engine
    template: Template
    tokenizer: Tokenizer
    family: Family
    context_length: int
    now: Callable[[], float]
    pace: Pace = field(factory=Pace)
    _renderings: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(RENDERINGS), init=False)

    @property
    def served(self) -> ServedModel:
        """As the lists of models show it."""
        return ServedModel(id=self.id, context_length=self.context_length)

    async def root(self, conversation: Conversation) -> "array[int]":
        """The whole conversation in ids, int32. Refused when the template does not take it."""
        long = bool(conversation.tools) or _is_long(conversation.messages)
        return await self._rendered(lambda: self.template.root(conversation), long=long)

    async def prompt(self, conversation: Conversation, new: tuple[Message, ...], history: "array[int] | None") -> Rendered:
        """A request in ids: `history`, what the turn it extends ends with (None for a root), and the messages after it.

        Refused when the template does not take what is new.
        """
        if history is None:
            root = await self.root(evolve(conversation, messages=new))  # with the thoughts that the client did not show
            return Rendered(prompt=root, delta=root, notes=self.template.limits.notes(new))
        suffix = await self._rendered(lambda: self.template.suffix(new, conversation=conversation, sampled=history), long=_is_long(new))
        return Rendered(prompt=history + suffix.ids, delta=suffix.ids, close_length=suffix.close_length, notes=suffix.notes)

    def parser(self, prompt: "array[int]", stop: tuple[str, ...], call_id: Callable[[int], str], tools: Sequence[Tool]) -> Parser:
        """What reads the sample that follows a prompt; `tools` are those it showed."""
        return Parser(
            tokenizer=self.tokenizer,
            family=self.family,
            call_id=call_id,
            opens_thinking=self.template.opens_thinking(prompt),
            stop=stop,
            tools=tools,
            prompt=prompt,
        )

    async def _rendered(self, render: Callable[[], T], *, long: bool) -> T:
        if not long:
            return render()
        return await trio.to_thread.run_sync(render, limiter=self._renderings, abandon_on_cancel=True)


def _is_long(messages: Sequence[Message]) -> bool:
    return sum(len(message.text) + sum(len(call.arguments) for call in message.calls) for message in messages) > INLINE_CHARS
