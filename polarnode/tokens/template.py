"""A conversation into prompt ids; and the ids that follow a turn already sampled, so that the model is asked again.

The contract: a sampled token is never encoded again, and no text of a client ever becomes a control token. Rendered text is split on the
control strings, which become their ids; what stands between is encoded by the vocabulary alone. Whoever edits this keeps `suffix` free of
everything that came before: it is given the sampled ids only to see how they end.
"""

import re
from array import array
from collections.abc import Mapping, Sequence

from attrs import Factory, field, frozen

from polarnode.conversation import Conversation, Message, ToolCall
from polarnode.ports import Tokenizer
from polarnode.records import ids
from polarnode.tokens.audit import audit
from polarnode.tokens.family import Family, Mode
from polarnode.tokens.pieces import SHORTEST, Pieces
from polarnode.tokens.rendering import Rendered, Renderer


@frozen(kw_only=True)
class Suffix:
    """What follows the parent's sampled ids, int32[N]. The first `close_length` of them end a sample that was cut."""

    ids: "array[int]"
    close_length: int


@frozen(eq=False)
class Template:
    """A model's chat template in ids; safe to call from worker threads. Tokenising is slow: 100 KB take some 60 ms.

    It changes in nothing but what it remembers: long pieces of whole conversations, because sessions of a group share their heads.
    """

    tokenizer: Tokenizer
    family: Family
    _renderer: Renderer = field(init=False, default=Factory(lambda self: Renderer(self.tokenizer, self.family), takes_self=True))
    _control: "re.Pattern[str]" = field(init=False, default=Factory(lambda self: _pattern(self.tokenizer.control), takes_self=True))
    _pieces: Pieces = field(init=False, factory=Pieces)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a generation, the turn end first."""
        return self.family.stop_ids

    def root(self, conversation: Conversation) -> "array[int]":
        """The whole conversation, asking for the next turn: int32. Refused for one that the template does not take."""
        return self._encoded(self._renderer.whole(conversation), again=True)

    def suffix(self, new: Sequence[Message], *, conversation: Conversation, sampled: "array[int]") -> Suffix:
        """What follows a sampled turn so that the model is asked again with `new` messages.

        `conversation` is the whole new request, `sampled` the ids of the turn it extends (or all ids so far: only the last turn is looked at;
        needed where a thought may have been cut twice). A sample without turn end is closed first: an open thought, then the turn.
        With nothing new a cut sample goes on exactly where it ended (no ids), and an ended one is followed by the next turn's opening.
        """
        close = ids() if _ends_with(sampled, self.family.turn_ends) else self._close(sampled, conversation)
        if close and not new:
            return Suffix(ids=ids(), close_length=0)
        rendered = self._renderer.following(new, calls=_calls_before(new, conversation), thinking=conversation.thinking)
        return Suffix(ids=close + self._encoded(rendered), close_length=len(close))

    def opens_thinking(self, prompt: "array[int]") -> bool:
        """Whether a prompt ends inside a thought: the template opened it, or a cut thought goes on."""
        return self._mode(prompt, "text") == "thinking"

    def audit(self) -> tuple[str, ...]:
        """Try at load time whether this template's turns can be extended faithfully: ModelError if not, else what is worth knowing."""
        return audit(self._renderer)

    def _close(self, sampled: "array[int]", conversation: Conversation) -> "array[int]":
        opening = self._encoded(self._renderer.following((), calls=(), thinking=conversation.thinking))
        started: Mode = "thinking" if self.opens_thinking(opening) else "text"
        thought = self.family.think_close if self._mode(sampled, started) == "thinking" else None
        return ids(token for token in (thought, self.family.turn_end) if token is not None)

    def _mode(self, written: "array[int]", started: Mode) -> Mode:
        """What is being written at the end of some ids. `started`: at their beginning, unless a turn starts in them."""
        size = next((back for back, token in enumerate(reversed(written)) if token in self.family.turn_starts), None)
        mode = started if size is None else "text"
        for token in written if size is None else written[len(written) - size :]:
            mode = self.family.after(mode, token)
        return mode

    def _encoded(self, rendered: Rendered, *, again: bool = False) -> "array[int]":
        """Split on control strings while client text is inert, give the text back, encode what stands between.

        `again`: its long pieces may come again. A tool's result hardly does, and would only push a head out.
        """
        encoded = ids()
        for place, piece in enumerate(self._control.split(rendered.text)):
            if place % 2:
                encoded.append(self.tokenizer.control[piece])
            elif piece:
                text, encode = rendered.guard.show(piece), self.tokenizer.encode_plain
                encoded.extend(self._pieces.ids(text, encode) if again and len(text) >= SHORTEST else encode(text))
        return encoded


def _pattern(control: Mapping[str, int]) -> "re.Pattern[str]":
    """Control strings, the longest first: what transformers finds too."""
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) + ")")


def _ends_with(written: "array[int]", tokens: frozenset[int]) -> bool:
    return bool(written) and written[-1] in tokens


def _calls_before(new: Sequence[Message], conversation: Conversation) -> tuple[ToolCall, ...]:
    """The calls of the turn that `new` follows, as the client echoed them."""
    at = len(conversation.messages) - len(new) - 1
    return conversation.messages[at].calls if at >= 0 else ()
