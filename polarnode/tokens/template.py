"""Turn conversations into prompt ids, and give the ids that follow a sampled turn.

`load_model` loads and audits a checkpoint's tokenizer, family and template. `Template.root` gives the ids of
a whole conversation, `Template.suffix` the ids between a sampled turn and the next. Rendered text is split at
the control strings, which become their ids. The text between them is encoded by the vocabulary alone.

Invariants: a sampled token is never replaced or encoded again, and no client text becomes a control token.
`suffix` depends on the sampled ids only by how they end. A turn boundary is the least that ends a cut turn:
the end of an open thought first, then the turn end, and nothing if what follows ends the turn. If the model
sees another token there than its template would write, a note says so.
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
from polarnode.tokens.rendering import AnsweredTurn, RenderedText, TemplateRenderer, argument_notes
from polarnode.tokens.tokenizer import MIN_CACHED_CHARS, LoadedTokenizer, TokenizationCache, load_tokenizer

# ── turn boundary ─────────────────────────────────────────────────────────────────────────────────

_MODEL_SEES: Final = "the model sees it so"


@frozen
class TurnClosing:
    """How a family's cut turns are closed."""

    family: Family

    def of(self, mode: Mode, opening: "array[int]") -> "array[int]":
        """The ids that close a turn in this mode. `opening` are the ids that follow."""
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
        """The ids that close a message of Harmony. All messages end alike. A header that was cut is completed
        as that of an empty message, so that the message can be ended.
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
    """The ids that follow a sample, without the boundary token if the sample already ended with it."""
    twice = bool(sampled) and bool(opening) and sampled[-1] in family.boundaries and sampled[-1] == opening[0]
    return opening[1:] if twice else opening


def differences(
    sampled: "array[int]", opening: "array[int]", ended: str, tokenizer: Tokenizer, family: Family
) -> tuple[str, ...]:
    """Notes on the turn boundary. `ended` is the turn end that the template writes there; empty if it writes
    none.
    """
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
                    f"the sample ends with {written!r} where the template goes on with {next_one!r}:"
                    f" {_MODEL_SEES},"
                    " both stand"
                ),
            )
        )
    if written == ended:
        return ()
    instead = f"writes {ended!r}" if ended else "goes on without a turn end"
    return (f"the sample ends with {written!r} where the template {instead}: {_MODEL_SEES}",)


# ── encoding up to a limit ────────────────────────────────────────────────────────────────────────

# Encoding takes 110 to 480 bytes of memory per character, so the tokens of a text longer than this are first
# counted in pieces.
MAX_WHOLE_CHARS: Final = 256 << 10
PIECE_CHARS: Final = 64 << 10
# Cutting a text adds fewer tokens than this, because it splits one word.
MAX_CUT_TOKENS: Final = 16


@frozen(kw_only=True)
class TokenRoom:
    """The tokens that a prompt may have. `used` of them precede what is encoded."""

    context_length: int
    used: int = 0

    def check(self, tokens: int, *, share: float) -> None:
        """Raise ContextTooLong if `tokens`, which are the tokens of this share of the text, do not fit."""
        if self.used + tokens > self.context_length:
            raise ContextTooLong(prompt_tokens=self.used + int(tokens / share), limit=self.context_length)

    def encode(self, text: str, *, encode: Callable[[str], list[int]], before: int) -> list[int]:
        """The ids of one text that follows `before` ids. A long text is refused as soon as enough of its
        tokens are counted. They are counted in pieces, whose memory is freed again, and in time proportional
        to the context.
        """
        if len(text) > MAX_WHOLE_CHARS:
            counted = before
            for start in range(0, len(text), PIECE_CHARS):
                counted += len(encode(text[start : start + PIECE_CHARS])) - MAX_CUT_TOKENS
                self.check(counted, share=min(1.0, (start + PIECE_CHARS) / len(text)))
        return encode(text)


# The text that a template writes between control tokens (a role, the end of a line) is the same in every
# prompt. Texts up to this length are cached.
MAX_MARK_CHARS: Final = 16
MARK_CACHE_BYTES: Final = 64 << 10  # the size of the cache of such short texts, some hundred of them

# ── template ──────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class PromptSuffix:
    """The ids that follow the parent's sampled ids, int32[N]. The first `close_length` of them end a sample
    that was cut.

    `notes` say where the model sees something other than its template would show or the client sent.
    """

    ids: "array[int]"
    close_length: int
    notes: tuple[str, ...] = ()


@frozen(eq=False)
class Template:
    """A model's chat template in ids. It is thread-safe. Tokenising is slow: 100 KB take some 60 ms.

    Its only state are caches of text pieces, because the sessions of a group begin with the same text.
    """

    tokenizer: Tokenizer
    family: Family
    _renderer: TemplateRenderer = field(
        init=False,
        default=Factory(lambda self: TemplateRenderer(self.tokenizer, self.family), takes_self=True),
    )
    limits: Limits = field(
        init=False, default=Factory(lambda self: Limits.of(self._renderer), takes_self=True)
    )
    _control: "re.Pattern[str]" = field(
        init=False, default=Factory(lambda self: _pattern(self.tokenizer.control), takes_self=True)
    )
    _piece_cache: TokenizationCache = field(init=False, factory=TokenizationCache)
    _marks: TokenizationCache = field(init=False, factory=lambda: TokenizationCache(MARK_CACHE_BYTES))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a generation, the turn end first."""
        return self.family.stop_ids

    def root(
        self, conversation: Conversation, *, context_length: int | None = None, prefill: str = ""
    ) -> "array[int]":
        """The ids (int32) of the whole conversation, up to the opening of the next turn and the text
        `prefill` in it. Raises Refused if the template cannot show it.

        Raises ContextTooLong for a long text as soon as more than `context_length` tokens are found; the
        number in the error is then an estimate.
        """
        messages = self.limits.settled(conversation.messages)
        self.limits.check(messages, conversation.tools)
        room = None if context_length is None else TokenRoom(context_length=context_length)
        prompt = self._encode_rendered(
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
    ) -> PromptSuffix:
        """The ids that follow a sampled turn, so that the model answers the `new` messages.

        `conversation` is the whole new request. `sampled` are the ids of the turn that it extends, or all ids
        so far. Only the last turn of them is read, and all of it is needed if a thought may have been cut
        twice. A sample without a turn end is closed first: an open thought, then the turn. A cut call is left
        open, because a made-up end would make it look complete. If nothing is new, a cut sample continues
        exactly where it ended (no ids), and an ended one is followed by the opening of the next turn. A
        boundary with which the sample ends is not written twice. `prefill` is as in `root`. `context_length`
        limits all ids, as in `root`; `sampled` must then be all ids so far.
        """
        if not new and not prefill and not (sampled and sampled[-1] in self.stop_ids):
            return PromptSuffix(ids=ids(), close_length=0)
        messages = self.limits.settled(new, follows=True)
        self.limits.check(messages, follows=True)
        rendered = self._renderer.following(
            messages, answered=self._answered(new, conversation, sampled), thinking=conversation.thinking
        )
        room = None if context_length is None else TokenRoom(context_length=context_length, used=len(sampled))
        opening = self._encode_rendered(rendered, room=room)
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
        return PromptSuffix(ids=written, close_length=len(close), notes=notes)

    def notes(self, messages: Sequence[Message], *, follows: bool = False) -> tuple[str, ...]:
        """Notes for the turn on messages that the model sees in another form than they were sent in."""
        return (
            *self.limits.notes(messages, follows=follows),
            *argument_notes(messages, self.family.manner),
        )

    def opens_thinking(self, prompt: "array[int]") -> bool:
        """Whether a prompt ends inside a thought, because the template opened it or a cut thought
        continues.
        """
        return mode_at_end(prompt, self.tokenizer, self.family) == "thinking"

    def drops_thinking_before(self, new: Sequence[Message]) -> bool:
        """Whether the template would leave out the thinking of earlier turns if these messages follow.
        Sampled ids are kept in any case.
        """
        return drops_thinking(self._renderer, new)

    def audit(self) -> tuple[str, ...]:
        """Check at load whether this template's turns can be extended faithfully. Raises ModelError if not,
        and otherwise returns notes.
        """
        return audit(self._renderer, self.limits)

    def _with_prefill(self, prompt: "array[int]", thinking: bool | None, prefill: str) -> "array[int]":
        """A prompt whose last turn is opened for visible text, followed by the text `prefill`. The template's
        opening without thinking replaces the opening that was rendered.
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
        """The ids that follow an assistant's turn if there are no new messages: the opening of the
        next turn.
        """
        return self._encode_rendered(self._renderer.following((), answered=AnsweredTurn(), thinking=thinking))

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
        return TurnClosing(self.family).of(
            mode_at_end(sampled, self.tokenizer, self.family, started), opening
        )

    def _encode_rendered(
        self, rendered: RenderedText, *, again: bool = False, room: TokenRoom | None = None
    ) -> "array[int]":
        """Split the text at control strings while client text is guarded, restore the client text, and encode
        what is between the control strings.

        `again`: cache the ids of long pieces. The result of a tool rarely recurs, and would only evict the
        head of a conversation. `room` is where a long text stops being encoded.
        """
        encoded, chars = ids(), 0
        bounded = room if len(rendered.text) > MAX_WHOLE_CHARS else None
        for place, piece in enumerate(self._control.split(rendered.text)):
            chars += len(piece)
            if place % 2:
                encoded.append(self.tokenizer.control[piece])
            elif piece:
                text, encode = rendered.guard.show(piece), self.tokenizer.encode_plain
                if bounded is not None:
                    encode = partial(bounded.encode, encode=encode, before=len(encoded))
                if len(text) <= MAX_MARK_CHARS:
                    encoded.extend(self._marks.ids(text, encode))
                else:
                    encoded.extend(
                        self._piece_cache.ids(text, encode)
                        if again and len(text) >= MIN_CACHED_CHARS
                        else encode(text)
                    )
            if bounded is not None and piece:
                bounded.check(len(encoded), share=chars / len(rendered.text))
        return encoded


def _pattern(control: Mapping[str, int]) -> "re.Pattern[str]":
    """The pattern of control strings, the longest first, because transformers searches them in this order."""
    return re.compile(
        "(" + "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) + ")"
    )


# ── loaded model ──────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class LoadedModel:
    """The tokenizer, family and template of one checkpoint. `notes` are those of the audit, `name` is the
    name of the folder.
    """

    name: str
    path: Path
    tokenizer: LoadedTokenizer
    family: Family
    template: Template
    notes: tuple[str, ...]


def load_model(path: Path) -> LoadedModel:
    """Load a checkpoint folder and audit its template. Call this in a thread, because it takes seconds
    (transformers is imported).
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
    """The number of ids that the model can sample; its embedding is often padded beyond its tokenizer. None
    if the config does not say.
    """
    with boundary(
        ModelError, f"{path / 'config.json'} cannot be read; name a folder with a Hugging Face checkpoint"
    ):
        config = json.loads((path / "config.json").read_text())
    size = config.get("vocab_size")
    return size if isinstance(size, int) else None
