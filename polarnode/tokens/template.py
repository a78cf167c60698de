"""Conversations into prompt ids, and the ids that follow a sampled turn.

`load_model` loads and audits a checkpoint's tokenizer, family and template. `Template.root` gives the ids of
a whole conversation, `Template.suffix` those between a sampled turn and the next. Rendered text is split on
the control strings, which become their ids; what stands between them is encoded by the vocabulary alone.

Invariants: a sampled token is never replaced or encoded again, and no client text becomes a control token.
`suffix` depends on the sampled ids only by how they end. A turn boundary is the least that ends a cut turn:
an open thought first, then the turn, nothing where what follows ends it. Where the model sees another token
there than its template would write, a note says so.
"""

import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, assert_never

from attrs import Factory, evolve, field, frozen

from polarnode.core.arrays import ids
from polarnode.core.conversation import Conversation, Message
from polarnode.core.errors import ContextTooLong, ModelError, Refused, boundary
from polarnode.core.ports import Tokenizer
from polarnode.tokens.audit import Limits, audit, drops_thinking
from polarnode.tokens.families import Family, HarmonyMarks, Mode, family_of
from polarnode.tokens.parser import mode_at_end, model_call_ids
from polarnode.tokens.rendering import AnsweredTurn, RenderedText, Renderer, argument_notes
from polarnode.tokens.tokenizer import SHORTEST, LoadedTokenizer, TokenizationCache, load_tokenizer

# ── turn boundary ─────────────────────────────────────────────────────────────────────────────────

_HERE: Final = "the model sees it so"


@frozen
class Closing:
    """How a family's cut turns are closed."""

    family: Family

    def of(self, mode: Mode, opening: "array[int]") -> "array[int]":
        """The ids that close a turn in this mode. `opening` is what follows."""
        if self.family.harmony is not None:
            return self._message(mode, self.family.harmony)
        thought = self.family.think_close if mode == "thinking" else None
        closed_by_next = bool(opening) and opening[0] in self.family.boundaries
        return ids(
            token
            for token in (thought, None if closed_by_next else self.family.turn_end)
            if token is not None
        )

    def _message(self, mode: Mode, harmony: HarmonyMarks) -> "array[int]":
        """Harmony's messages all end alike. A header that was cut is completed as that of an empty message,
        so that the message can be ended.
        """
        match mode:
            case "header":
                return ids((harmony.message, harmony.end))
            case "between":
                return ids()
            case "text" | "thinking" | "draft" | "call":
                return ids((harmony.end,))
            case _:
                assert_never(mode)


def joined(sampled: "array[int]", opening: "array[int]", family: Family) -> "array[int]":
    """The text after a sample, without the boundary token that the sample already ended with."""
    twice = bool(sampled) and bool(opening) and sampled[-1] in family.boundaries and sampled[-1] == opening[0]
    return opening[1:] if twice else opening


def differences(
    sampled: "array[int]", opening: "array[int]", ended: str, tokenizer: Tokenizer, family: Family
) -> tuple[str, ...]:
    """Notes on the turn boundary. `ended` is the turn end that the template writes there, empty for none."""
    last = sampled[-1] if sampled else None
    if last is None or last not in (*family.stop_ids, *family.turn_ends):
        return ()
    written = tokenizer.token_bytes(last).decode()
    if last in family.boundaries and opening and not ended:
        next_one = tokenizer.token_bytes(opening[0]).decode()
        return (
            ()
            if written == next_one
            else (
                (
                    f"the sample ends with {written!r} where the template goes on with {next_one!r}: {_HERE},"
                    " both stand"
                ),
            )
        )
    if written == ended:
        return ()
    instead = f"writes {ended!r}" if ended else "goes on without a turn end"
    return (f"the sample ends with {written!r} where the template {instead}: {_HERE}",)


# ── encoding up to a limit ────────────────────────────────────────────────────────────────────────

# Encoding takes 110 to 480 bytes a character, so the tokens of a longer text are counted in pieces first.
WHOLE_CHARS: Final = 256 << 10
PIECE_CHARS: Final = 64 << 10
# A cut adds fewer tokens than this to those of the uncut text: it splits one word.
CUT_TOKENS: Final = 16


@frozen(kw_only=True)
class TokenRoom:
    """The tokens that a prompt may have; `used` of them precede what is encoded."""

    context_length: int
    used: int = 0

    def check(self, tokens: int, *, share: float) -> None:
        """Raise ContextTooLong when `tokens` do not fit, which are those of this share of the text."""
        if self.used + tokens > self.context_length:
            raise ContextTooLong(prompt_tokens=self.used + int(tokens / share), limit=self.context_length)

    def encode(self, text: str, *, encode: Callable[[str], list[int]], before: int) -> list[int]:
        """The ids of one text that follows `before` ids. A long text is refused once enough of it is
        counted: in pieces, whose memory is given back, and in time proportional to the context.
        """
        if len(text) > WHOLE_CHARS:
            counted = before
            for start in range(0, len(text), PIECE_CHARS):
                counted += len(encode(text[start : start + PIECE_CHARS])) - CUT_TOKENS
                self.check(counted, share=min(1.0, (start + PIECE_CHARS) / len(text)))
        return encode(text)


# What a template writes between control tokens (a role, a line's end) is the same in every prompt.
MARK_CHARS: Final = 16
MARK_BYTES: Final = 64 << 10  # kept of them and of other short texts: some hundred

# ── template ──────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Suffix:
    """What follows the parent's sampled ids, int32[N]. The first `close_length` of them end a sample
    that was cut.

    `notes`: where the model sees something other than its template would show, or than the client sent.
    """

    ids: "array[int]"
    close_length: int
    notes: tuple[str, ...] = ()


@frozen(eq=False)
class Template:
    """A model's chat template in ids; thread-safe. Tokenising is slow: 100 KB take some 60 ms.

    Its only state is a cache of long pieces of whole conversations, because the sessions of a group
    share their heads.
    """

    tokenizer: Tokenizer
    family: Family
    _renderer: Renderer = field(
        init=False, default=Factory(lambda self: Renderer(self.tokenizer, self.family), takes_self=True)
    )
    limits: Limits = field(
        init=False, default=Factory(lambda self: Limits.of(self._renderer), takes_self=True)
    )
    _control: "re.Pattern[str]" = field(
        init=False, default=Factory(lambda self: _pattern(self.tokenizer.control), takes_self=True)
    )
    _tokenized: TokenizationCache = field(init=False, factory=TokenizationCache)
    _marks: TokenizationCache = field(init=False, factory=lambda: TokenizationCache(MARK_BYTES))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a generation, the turn end first."""
        return self.family.stop_ids

    def root(
        self, conversation: Conversation, *, context_length: int | None = None, prefill: str = ""
    ) -> "array[int]":
        """The ids of the whole conversation, up to the opening of the next turn and the text `prefill` in it:
        int32. Refused where the template cannot show it.

        ContextTooLong for a long text as soon as more than `context_length` tokens are found; its number is
        then an estimate.
        """
        messages = self.limits.settled(conversation.messages)
        self.limits.check(messages, conversation.tools)
        room = None if context_length is None else TokenRoom(context_length=context_length)
        prompt = self._encoded(
            self._renderer.whole(evolve(conversation, messages=messages)), again=True, room=room
        )
        return self._with_prefill(prompt, conversation.thinking, prefill) if prefill else prompt

    def suffix(
        self,
        new: Sequence[Message],
        *,
        conversation: Conversation,
        sampled: "array[int]",
        context_length: int | None = None,
        prefill: str = "",
    ) -> Suffix:
        """The ids that follow a sampled turn, so that the model answers `new` messages.

        `conversation` is the whole new request. `sampled` are the ids of the turn it extends, or all
        ids so far: only the last turn is read, and needed where a thought may have been cut twice. A
        sample without turn end is closed first: an open thought, then the turn. A cut call stays open,
        because a made-up end would make it look complete. With nothing new a cut sample continues
        exactly where it ended (no ids), and an ended one is followed by the next turn's opening. A
        boundary that the sample ends with is not written twice. `prefill` is as in `root`.
        `context_length` is for all ids, as in `root`; `sampled` must then be all ids so far.
        """
        if not new and not prefill and not (sampled and sampled[-1] in self.stop_ids):
            return Suffix(ids=ids(), close_length=0)
        messages = self.limits.settled(new, follows=True)
        self.limits.check(messages, follows=True)
        rendered = self._renderer.following(
            messages, answered=self._answered(new, conversation, sampled), thinking=conversation.thinking
        )
        room = None if context_length is None else TokenRoom(context_length=context_length, used=len(sampled))
        opening = self._encoded(rendered, room=room)
        close = (
            ids()
            if sampled and sampled[-1] in self.family.turn_ends
            else self._close(sampled, conversation, opening)
        )
        notes = (
            *differences(sampled, opening, rendered.ended, self.tokenizer, self.family),
            *self.notes(new, follows=True),
        )
        written = close + joined(sampled, opening, self.family)
        if prefill:
            written = self._with_prefill(written, conversation.thinking, prefill)
        return Suffix(ids=written, close_length=len(close), notes=notes)

    def notes(self, messages: Sequence[Message], *, follows: bool = False) -> tuple[str, ...]:
        """Notes for the turn on messages that the model sees in another form than they were sent."""
        return (
            *self.limits.notes(messages, follows=follows),
            *argument_notes(messages, self.family.manner),
        )

    def opens_thinking(self, prompt: "array[int]") -> bool:
        """Whether a prompt ends inside a thought: the template opened it, or a cut thought goes on."""
        return mode_at_end(prompt, self.tokenizer, self.family) == "thinking"

    def drops_thinking_before(self, new: Sequence[Message]) -> bool:
        """Whether the template would leave out the thinking of earlier turns when these messages
        follow. Sampled ids stay in any case.
        """
        return drops_thinking(self._renderer, new)

    def audit(self) -> tuple[str, ...]:
        """Check at load whether this template's turns can be extended faithfully: ModelError if not,
        else notes.
        """
        return audit(self._renderer, self.limits)

    def _with_prefill(self, prompt: "array[int]", thinking: bool | None, prefill: str) -> "array[int]":
        """A prompt whose last turn is opened for visible text, and this text in it. The template's opening
        without thinking takes the place of the one that was asked for.
        """
        asked, plain = (self._opening(wanted) for wanted in (thinking, False))
        shared = next(
            (place for place, (one, other) in enumerate(zip(asked, plain, strict=False)) if one != other),
            min(len(asked), len(plain)),
        )
        rest = len(asked) - shared
        opened = prompt[: len(prompt) - rest] + plain[shared:]
        if (harmony := self.family.harmony) is not None:
            final = self.tokenizer.encode_plain("final")
            opened += ids((harmony.channel, *final, harmony.message))
        known = prompt[len(prompt) - rest :] == asked[shared:]
        if not known or mode_at_end(opened, self.tokenizer, self.family) != "text":
            raise Refused(
                "this model's chat template begins each answer with a thought, so the last message cannot be"
                " the assistant's: end with a user's message",
                path="$.messages[-1]",
            )
        return opened + ids(self.tokenizer.encode_plain(prefill))

    def _opening(self, thinking: bool | None) -> "array[int]":
        """What follows an assistant's turn when nothing new is said: the opening of the next one."""
        return self._encoded(self._renderer.following((), answered=AnsweredTurn(), thinking=thinking))

    def _answered(
        self, new: Sequence[Message], conversation: Conversation, sampled: "array[int]"
    ) -> AnsweredTurn:
        """The turn that `new` follows, as the client echoed it."""
        at = len(conversation.messages) - len(new) - 1
        if at < 0:
            return AnsweredTurn()
        before = sum(len(message.calls) for message in conversation.messages[:at])
        calls = conversation.messages[at].calls
        return AnsweredTurn(
            calls=calls,
            model_ids=model_call_ids(sampled, self.tokenizer, self.family) if calls else (),
            calls_before=before,
        )

    def _close(
        self, sampled: "array[int]", conversation: Conversation, opening: "array[int]"
    ) -> "array[int]":
        """The ids that end a cut sample."""
        started = mode_at_end(self._opening(conversation.thinking), self.tokenizer, self.family)
        return Closing(self.family).of(mode_at_end(sampled, self.tokenizer, self.family, started), opening)

    def _encoded(
        self, rendered: RenderedText, *, again: bool = False, room: TokenRoom | None = None
    ) -> "array[int]":
        """Split on control strings while client text is guarded, restore the text, encode what stands
        between.

        `again`: cache the ids of long pieces. A tool's result rarely recurs, and would only evict a
        conversation's head. `room`: where to stop with a long text.
        """
        encoded, chars = ids(), 0
        bounded = room if len(rendered.text) > WHOLE_CHARS else None
        for place, piece in enumerate(self._control.split(rendered.text)):
            chars += len(piece)
            if place % 2:
                encoded.append(self.tokenizer.control[piece])
            elif piece:
                text, encode = rendered.guard.show(piece), self.tokenizer.encode_plain
                if bounded is not None:
                    encode = partial(bounded.encode, encode=encode, before=len(encoded))
                if len(text) <= MARK_CHARS:
                    encoded.extend(self._marks.ids(text, encode))
                else:
                    encoded.extend(
                        self._tokenized.ids(text, encode) if again and len(text) >= SHORTEST else encode(text)
                    )
            if bounded is not None and piece:
                bounded.check(len(encoded), share=chars / len(rendered.text))
        return encoded


def _pattern(control: Mapping[str, int]) -> "re.Pattern[str]":
    """Control strings, the longest first, as transformers finds them."""
    return re.compile(
        "(" + "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) + ")"
    )


# ── loaded model ──────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class LoadedModel:
    """Tokenizer, family and template of one checkpoint; `notes` are the audit's. `name` is the folder's."""

    name: str
    path: Path
    tokenizer: LoadedTokenizer
    family: Family
    template: Template
    notes: tuple[str, ...]


def load_model(path: Path) -> LoadedModel:
    """Load a checkpoint folder and audit its template. Takes seconds (transformers is imported): call
    it in a thread.
    """
    tokenizer = load_tokenizer(path, vocab_size=_embedding_size(path))
    family = family_of(tokenizer)
    template = Template(tokenizer, family)
    return LoadedModel(
        name=path.name,
        path=path,
        tokenizer=tokenizer,
        family=family,
        template=template,
        notes=template.audit(),
    )


def _embedding_size(path: Path) -> int | None:
    """The number of ids that the model can sample: its embedding is often padded beyond its tokenizer.
    None where the config does not have it.
    """
    with boundary(
        ModelError, f"{path / 'config.json'} cannot be read; name a folder with a Hugging Face checkpoint"
    ):
        config = json.loads((path / "config.json").read_text())
    size = config.get("vocab_size")
    return size if isinstance(size, int) else None
