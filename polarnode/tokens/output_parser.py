"""Visible text, thinking and calls of a sample, in order, and how much of them may be streamed already.

`OutputWriter` decides what text and marks mean, and holds back what is not decided yet. `Flow` decides what
may be shown. `parser` finds the marks among the ids. Newlines at the edges of a part are separators: leading
ones are dropped, and trailing ones are held until it is known whether the same part continues. Stop strings
are looked for only in visible text.

Invariants: text that is held back is later shown verbatim, or it was a separator. Nothing depends on how the
text was cut into pieces. The parts of an answer are made from the deltas themselves, so that a stream cannot
differ from the whole answer. Logprobs are shown, held back and dropped with the text that their tokens wrote.
"""

from collections.abc import Callable, Iterable
from itertools import chain, groupby
from typing import Literal, assert_never

from attrs import Factory, define, field

from polarnode.core.conversation import (
    Delta,
    Part,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    TokenLogprob,
    Tool,
    ToolCall,
)
from polarnode.core.ports import Tokenizer
from polarnode.tokens.families import Family, HarmonyMarks, Mode
from polarnode.tokens.syntax import READERS, harmony
from polarnode.tokens.syntax.call_ends import CallEnds, Close, CloseKind
from polarnode.tokens.syntax.call_faults import NO_CLOSING_TAG, fault_of
from polarnode.tokens.syntax.json_calls import BareCallScanner
from polarnode.tokens.tool_calls import SPACE, CallBody, HeldRegion, ReadCall

# ── what may be shown ─────────────────────────────────────────────────────────────────────────────

Kind = Literal["text", "thinking"]
TokenLogprobs = tuple[TokenLogprob, ...]  # the tokens that wrote a text; empty if they are not requested


@define(eq=False)
class _HeldTokens:
    """The tokens that wrote the held text: stretches from the left, each with its tokens. A token belongs to
    the first character of its text that is shown.
    """

    _stretches: list[tuple[int, TokenLogprobs]] = field(factory=list)

    def add(self, length: int, logprobs: TokenLogprobs) -> None:
        if logprobs or self._stretches:
            self._stretches.append((length, logprobs))

    def take(self, length: int) -> TokenLogprobs:
        """Remove the first `length` characters and return their tokens."""
        taken: list[TokenLogprob] = []
        while length > 0 and self._stretches:
            size, logprobs = self._stretches.pop(0)
            taken += logprobs
            if size > length:
                self._stretches.insert(0, (size - length, ()))
            length -= size
        return tuple(taken)

    def clear(self) -> None:
        self._stretches.clear()


@define(eq=False)
class Flow:
    """The text written so far. `stopped` is the stop string that was hit; nothing is accepted after it."""

    _stop: tuple[str, ...] = ()
    stopped: str | None = field(default=None, init=False)
    _kind: Kind | None = field(default=None, init=False)
    _held: str = field(default="", init=False)
    _only_newlines: bool = field(default=False, init=False)  # whether only newlines are held
    _writers: _HeldTokens = field(factory=_HeldTokens, init=False)
    _ready: list[Delta] = field(default=Factory(list), init=False)
    _taken: list[Delta] = field(default=Factory(list), init=False)

    def write(self, kind: Kind, text: str, logprobs: TokenLogprobs = ()) -> None:
        """Add text of one kind. It is shown once it cannot be a separator or the beginning of a
        stop string.
        """
        if self.stopped is not None:
            return
        if kind != self._kind:
            text = text.lstrip("\n")
            if not text:
                return
            self.release()
            self._kind = kind
        self._held += text
        self._writers.add(len(text), logprobs)
        if kind == "text":
            self._watch()
        if self._only_newlines and not text.strip("\n") and self.stopped is None:
            # Newlines wait with those before them. Examining all of them each time would take quadratic time.
            return
        self._show(self._showable_length())
        self._only_newlines = not self._held.strip("\n")

    def call(self, call: ToolCall) -> None:
        """Add a whole call. It ends the part before it, whose trailing newlines were separators."""
        if self.stopped is None:
            self.release()
            self._ready.append(call)

    def release(self, *, exactly: bool = False) -> None:
        """End the part being written. Text that was held because of a stop string is shown. Trailing newlines
        are dropped, except in text that must remain as it was sampled (`exactly`).
        """
        self._show(len(self._held if exactly else self._held.rstrip("\n")))
        self._kind, self._held = None, ""
        self._writers.clear()

    def take(self) -> list[Delta]:
        """The deltas that became final since the last call of this method."""
        ready, self._ready = joined(self._ready), []
        self._taken += ready
        return ready

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all deltas taken. Neighbours of one kind are joined."""
        return fold(self._taken)

    @property
    def logprobs(self) -> TokenLogprobs:
        """The tokens of all visible text that was taken."""
        return tuple(
            token for delta in self._taken if isinstance(delta, TextDelta) for token in delta.logprobs
        )

    def _watch(self) -> None:
        """Cut the held text at the stop string that is complete first (the longest of several), as a search
        character by character would.
        """
        found = [
            (at + len(stop), -len(stop), stop) for stop in self._stop if (at := self._held.find(stop)) >= 0
        ]
        if found:
            end, length, self.stopped = min(found)
            self._held = self._held[: end + length].rstrip("\n")

    def _showable_length(self) -> int:
        """How many characters of the held text can be shown."""
        watched = self._kind == "text" and self.stopped is None
        end = len(self._held) - (
            max((_begun(self._held, stop) for stop in self._stop), default=0) if watched else 0
        )
        return len(self._held[:end].rstrip("\n"))

    def _show(self, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if not text or self._kind is None:
            return
        logprobs = self._writers.take(length)
        self._ready.append(TextDelta(text, logprobs) if self._kind == "text" else ThinkingDelta(text))


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text could be the beginning of a stop string."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
    )


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas, with neighbours of one kind joined, because each delta costs a stream event."""
    out: list[Delta] = []
    for kind, run in groupby(deltas, key=type):
        same = list(run)
        if kind is ToolCall or len(same) == 1:
            out += same
            continue
        written = [delta for delta in same if not isinstance(delta, ToolCall)]
        text = "".join(delta.text for delta in written)
        told = chain.from_iterable(delta.logprobs for delta in written if isinstance(delta, TextDelta))
        out.append(TextDelta(text, tuple(told)) if kind is TextDelta else ThinkingDelta(text))
    return out


def fold(deltas: list[Delta]) -> tuple[Part, ...]:
    """The parts that deltas add up to."""
    parts: list[Part] = []
    run: list[str] = []
    for place, delta in enumerate(deltas):
        if isinstance(delta, ToolCall):
            parts.append(delta)
            continue
        run.append(delta.text)
        if place + 1 == len(deltas) or type(deltas[place + 1]) is not type(delta):
            parts.append(_part(delta, "".join(run)))
            run = []
    return tuple(parts)


def _part(delta: TextDelta | ThinkingDelta, text: str) -> Part:
    match delta:
        case TextDelta():
            return TextPart(text)
        case ThinkingDelta():
            return ThinkingPart(text)
        case _:
            assert_never(delta)


# ── what is being written ─────────────────────────────────────────────────────────────────────────

_LogprobList = list[TokenLogprob]


@define(eq=False, kw_only=True)
class OutputWriter:
    """The writer of a sample's output. `mode` changes with marks, and when a header turns out to be text.
    `model_call_ids` are the model's own ids of calls.
    """

    family: Family
    mode: Mode
    flow: Flow
    calls: int = field(default=0, init=False)
    # the reasons why calls could not be read, one for each call
    faults: list[str] = field(factory=list, init=False)
    # whether the answer ended inside a call, which is then not shown
    cut: bool = field(default=False, init=False)
    model_call_ids: list[str] = field(factory=list, init=False)
    _tokenizer: Tokenizer
    _tools: tuple[Tool, ...]
    _call_id: Callable[[int], str]
    # what is held back: a call, a header, blanks between calls, the label of a thought
    _region: HeldRegion = field(factory=HeldRegion, init=False)
    _body_at: int = field(default=0, init=False)  # the place in the region where the body of the call begins
    _label: str = field(
        default="", init=False
    )  # the label that may stand at the beginning of a thought without being part of it
    # whether the next text or thought belongs to another message than the one before
    _new_message: bool = field(default=False, init=False)
    # the places where the call being written may end
    _ends: CallEnds = field(init=False, default=Factory(lambda self: self._call_ends(0), takes_self=True))
    _on_final_channel: bool = field(
        default=False, init=False
    )  # whether the call is a message on Harmony's final channel
    # whether a thought is at the start of a line, where a call may begin
    at_line_start: bool = field(default=True, init=False)
    _begun: BareCallScanner | None = field(
        init=False, default=Factory(lambda self: self._beginning(), takes_self=True)
    )

    def _call_ends(self, readings: int) -> CallEnds:
        return CallEnds(syntax=self.family.call_syntax, control=self._tokenizer.control, readings=readings)

    def _beginning(self) -> BareCallScanner | None:
        """The scanner of an answer that may still be a call without marks. None in other families."""
        return BareCallScanner() if self.family.call_syntax == "bare_json" and self.mode == "text" else None

    def go_on(self, before: "OutputWriter") -> None:
        """Continue where the message at the end of the prompt stopped, usually in the middle of a header."""
        self.mode, self._region = before.mode, before._region
        self._region.hide()
        # The beginning of this call is not part of the sample, and the rest alone is no call.
        if self.mode == "call":
            self._region.clear()
            self.mode = "text"

    def text(self, text: str, logprobs: _LogprobList) -> None:
        """Write more text, with the tokens that wrote it."""
        match self.mode:
            case "call":
                self._region.add(text, logprobs)
            case "header":
                self._region.add(text, logprobs)
                if not harmony.may_be_header(self._body(0)):
                    self.mode = "text"
                    self._show_region()
            case "between":
                self._write_between(text, logprobs)
            case "thinking" if self._label:
                self._write_label(text)
            case "text" if self._begun is not None:
                self._region.add(text, logprobs)
                if not self._begun.goes_on(text):
                    self._let_go()
            case "text" | "thinking" as kind:
                self.at_line_start = text.endswith("\n") if text else self.at_line_start
                self._write_flow(kind, text, logprobs)
            case "draft":  # The ids of a draft are read again once it is known what they are.
                pass

    def mark(self, token: int, logprobs: _LogprobList) -> None:
        """Handle a token that is not text here. It changes the mode, or it is recorded as a mark inside a
        call or a header.
        """
        text = self._tokenizer.token_bytes(token).decode(errors="replace")
        if self.family.harmony is not None:
            self._write_harmony_mark(token, text, logprobs, self.family.harmony)
        elif token == self.family.call_close and self.mode != "call":
            self.faults.append(f"{text} without a call before it")
            self.text(text, logprobs)
        elif self.family.after(self.mode, token) == self.mode:
            self._region.add(text, logprobs, mark=True)
        else:
            self._change(self.family.after(self.mode, token), text, logprobs)

    def close(self, *, clean: bool) -> bool:
        """End what is being written. Returns whether it ended with text that must remain as it was sampled.
        `clean`: the model ended the answer itself.
        """
        match self.mode:
            case "call":
                if clean and self._ends_with_turn:
                    return not self._end_call("", [])
                return self._end_open_call(clean=clean)
            case "header" if not harmony.is_message_start(self._region.text):
                if not clean and harmony.names_recipient(self._region.text):
                    self._drop_cut_call()
                    return False
                self._show_header()
                return True
            case "text" if self._begun is not None and clean and (read := self._read_calls(0)) is not None:
                self._show_calls(read)
            case "text" if self._begun is not None and self._begun.called and not clean:
                self._drop_cut_call()
            case _:
                self._let_go()
        return False

    @property
    def _ends_with_turn(self) -> bool:
        """Whether the end of a turn also ends a call."""
        return self.family.harmony is not None or self.family.call_close is None

    def _end_open_call(self, *, clean: bool) -> bool:
        """End a call that has no end. If the model ended its turn the call is malformed and is shown as text;
        if the turn was cut it is not shown. Returns whether it is shown.
        """
        if clean or self._on_final_channel:
            self._show_malformed(NO_CLOSING_TAG)
            return True
        self._drop_cut_call()
        return False

    def _drop_cut_call(self) -> None:
        """Drop what was written of a call, because half a call is no text for its reader."""
        self.cut = True
        self._region.clear()

    # ── marks that may be data ──

    def close_kind(self) -> CloseKind:
        """What a closing mark means at this place inside a call."""
        return self._ends.kind(self._region, lambda: self._read_calls(self._body_at))

    def keep_close(self, token: int, logprobs: _LogprobList, *, kept: int, whole: bool) -> None:
        """Continue the call after a closing mark that may be data. `kept` is the number of ids that are kept
        to be read again, this one included.
        """
        text = self._tokenizer.token_bytes(token).decode(errors="replace")
        self._ends.keep(Close(self._region.spot, kept, text, tuple(logprobs)), whole=whole)
        self._region.add(text, logprobs, mark=True)

    @property
    def reads(self) -> bool:
        """Whether the call that is held back can be read as it stands."""
        return self.mode == "call" and self._read_calls(self._body_at) is not None

    @property
    def inside_call(self) -> bool:
        """Whether a call is open that cannot end here."""
        return self.mode == "call" and self._ends.whole is None

    @property
    def whole_calls(self) -> int:
        """The number of calls that are whole but may still turn out to continue."""
        return 0 if self.mode != "call" or self._ends.whole is None else len(self._ends.read)

    def settle(self) -> int:
        """End the call at the last mark up to which it can be read, or show it up to its first closing mark.
        Returns how many of the kept ids belong to it.
        """
        close = self._ends.whole or self._ends.first
        if close is None:
            return 0
        self._region.back(close.spot)
        self._end_call(close.text, list(close.logprobs))
        harmony, section = self.family.harmony, self.family.section_open
        self.mode = "text" if harmony is None and section is None else "between"
        self._new_message = self._new_message or harmony is not None
        return close.kept

    # ── marks ──

    def _change(self, after: Mode, mark: str, logprobs: _LogprobList) -> None:
        """Change the mode, in families other than Harmony."""
        if self.mode == "call":
            self._end_call(mark, logprobs)
        else:
            self._let_go()
        self.mode = after
        if after == "call":
            self._ends = self._call_ends(self._ends.readings)
            self._region.add(mark, logprobs, mark=True)
            self._body_at = len(mark)
        elif after == "thinking":
            self.at_line_start = True
            self._label = self.family.think_label

    def _write_harmony_mark(self, token: int, text: str, logprobs: _LogprobList, marks: HarmonyMarks) -> None:
        match self.mode:
            case "header" if token in (marks.start, marks.end):  # The message ends before it began.
                if token == marks.end:
                    self._region.add(text, logprobs, mark=True)
                self._show_header()
                self._open_header(text, logprobs, to="header" if token == marks.start else "between")
            case "header":
                self._region.add(text, logprobs, mark=True)
                if token == marks.message:
                    self._enter()
            case "between":
                self._region.clear()
                self._open_header(text, logprobs, to="header")
            case "call" if token != marks.end:
                self._region.add(text, logprobs, mark=True)
            case "call":
                self._end_call(text, logprobs)
                self.mode, self._new_message = "between", True
            case _:
                self.mode, self._new_message = "between", True

    def _open_header(self, mark: str, logprobs: _LogprobList, *, to: Mode) -> None:
        self.mode = to
        if to == "header":
            self._region.add(mark, logprobs, mark=True)

    def _enter(self) -> None:
        """Enter the message that a complete header describes. A header that cannot be read is shown."""
        header = harmony.read_header(self._body(0))
        if header is None:
            self._show_header()
            return
        self.mode, self._body_at, self._on_final_channel = header.mode, 0, header.final
        self._ends = self._call_ends(self._ends.readings)
        if header.mode != "call":
            self._region.clear()
        elif header.final:  # If its message turns out to be no call, it is what the model says to the user.
            self._region.hide()
            self._region.logprobs.clear()

    # ── what is held back ──

    def _body(self, start: int) -> CallBody:
        separator = (
            b"" if self.family.separator is None else self._tokenizer.token_bytes(self.family.separator)
        )
        return self._region.body(
            control=self._tokenizer.control, separator=separator.decode(errors="replace"), start=start
        )

    def _read(self, body: CallBody) -> tuple[ReadCall, ...] | None:
        return READERS[self.family.call_syntax](body, self._tools)

    def _read_calls(self, start: int) -> tuple[ReadCall, ...] | None:
        return self._read(self._body(start))

    def _end_call(self, close: str, logprobs: _LogprobList) -> bool:
        """Read the call that is held back. A call that cannot be read becomes visible text, as it was
        sampled. Returns whether it could be read.
        """
        read = self._read_calls(self._body_at)
        if read is None:
            why = fault_of(self._body(self._body_at), self.family.call_syntax)
            if not self._on_final_channel:
                self._region.add(close, logprobs)
            self._show_malformed(why)
            return False
        self._show_calls(read)
        return True

    def _show_calls(self, read: tuple[ReadCall, ...]) -> None:
        for call in read:
            self.flow.call(ToolCall(id=self._call_id(self.calls), name=call.name, arguments=call.arguments))
            self.calls += 1
            self.model_call_ids += [] if call.model_id is None else [call.model_id]
        self._region.clear()

    def _show_malformed(self, why: str) -> None:
        self.faults.append(why)
        self._show_region()

    def _show_header(self) -> None:
        """Show a header that cannot be read, or has no message, as text. A header with a recipient counts as
        a malformed call.
        """
        if harmony.names_recipient(self._region.text):
            self.faults.append("the header that names its recipient can not be read")
        self.mode = "text"
        self._show_region()

    def _show_region(self) -> None:
        text, logprobs = self._region.shown, self._region.logprobs
        self._region.clear()
        self._write_flow("text", text, logprobs)

    def _let_go(self) -> None:
        """Release what is held back, as the kind it appears to be. Blanks between calls were separators and
        are dropped.
        """
        if self.mode == "thinking" and self._label:
            label, self._label = self._label, ""
            if self._region.text != label.rstrip(SPACE):
                self._write_flow("thinking", self._region.text, [])
        elif self.mode == "text" and self._begun is not None:
            if self._begun.called:
                self.faults.append(fault_of(self._body(0), self.family.call_syntax))
            self._begun = None
            self._show_region()
        self._region.clear()

    # ── text ──

    def _write_between(self, text: str, logprobs: _LogprobList) -> None:
        """Write text between calls. It is shown, without the blanks at its edges."""
        size = len(text.rstrip(SPACE))
        self._region.add(text[:size], logprobs)
        if size:
            self._show_region()
        self._region.add(text[size:], [])

    def _write_label(self, text: str) -> None:
        self._region.add(text, [])
        held = self._region.text
        if self._label.startswith(held) and held != self._label:
            return
        self._region.clear()
        label, self._label = self._label, ""
        self._write_flow("thinking", held.removeprefix(label), [])

    def _write_flow(self, kind: Kind, text: str, logprobs: _LogprobList) -> None:
        """Write text to the flow. A blank line separates two messages of one kind."""
        if text and self._new_message:
            text, self._new_message = f"\n\n{text}", False
        if text:
            self.flow.write(kind, text, tuple(logprobs) if kind == "text" else ())
