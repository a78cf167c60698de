"""What a sample's text and marks make of it: visible text, thoughts and calls, and what is held back until it is known which.

The rule for whoever edits it: what is held back comes out as what it turned out to be, letter for letter, or was a separator; and nothing here
depends on how the text was cut into pieces. `parse.py` finds the marks among the ids, `flow.py` says what of it may be shown.
"""

from collections.abc import Callable

from attrs import Factory, define, field

from polarnode.conversation import TokenLogprob, Tool, ToolCall
from polarnode.ports import Tokenizer
from polarnode.tokens.calls import SPACE, ReadCall
from polarnode.tokens.family import Family, HarmonyMarks, Mode
from polarnode.tokens.flow import Flow, Kind
from polarnode.tokens.syntax import READERS, harmony
from polarnode.tokens.syntax.bare_json import Begun
from polarnode.tokens.syntax.body import Body, Region

_Told = list[TokenLogprob]


@define(eq=False, kw_only=True)
class Writing:
    """What is being written. `mode` changes with marks, and where a header turns out to be none; `spoken_ids` are the model's names for calls."""

    family: Family
    mode: Mode
    flow: Flow
    calls: int = field(default=0, init=False)
    malformed_calls: int = field(default=0, init=False)
    spoken_ids: list[str] = field(factory=list, init=False)
    _tokenizer: Tokenizer
    _tools: tuple[Tool, ...]
    _call_id: Callable[[int], str]
    _region: Region = field(factory=Region, init=False)  # what is held back: a call, a header, blanks between calls, a thought's label
    _body_at: int = field(default=0, init=False)  # where in it the call's body begins
    _label: str = field(default="", init=False)  # what may stand at the thought's head and is none of it
    _new_message: bool = field(default=False, init=False)  # whether the next text or thought is of another message than the one before
    _begun: Begun | None = field(init=False, default=Factory(lambda self: self._beginning(), takes_self=True))

    def _beginning(self) -> Begun | None:
        """What watches an answer that may still be a call without marks."""
        return Begun() if self.family.call_syntax == "bare_json" and self.mode == "text" else None

    def go_on(self, before: "Writing") -> None:
        """Begin where another ended, which was the prompt's: in the middle of a header, as a rule."""
        self.mode, self._region = before.mode, before._region
        self._region.hide()
        if self.mode == "call":  # its beginning is not of this sample, and the rest alone is no call
            self._region.clear()
            self.mode = "text"

    def text(self, text: str, told: _Told) -> None:
        """More text, and the tokens that wrote it."""
        match self.mode:
            case "call":
                self._region.add(text, told)
            case "header":
                self._region.add(text, told)
                if not harmony.may_be_header(self._body(0)):
                    self.mode = "text"
                    self._show_region()
            case "between":
                self._write_between(text, told)
            case "thinking" if self._label:
                self._write_label(text)
            case "text" if self._begun is not None:
                self._region.add(text, told)
                if not self._begun.goes_on(text):
                    self._let_go()
            case "text" | "thinking" as kind:
                self._say(kind, text, told)

    def mark(self, token: int, told: _Told) -> None:
        """A token that is no text where it stands: from one mode to another, or told apart inside a call or a header."""
        text = self._tokenizer.token_bytes(token).decode(errors="replace")
        if self.family.harmony is not None:
            self._mark_of_harmony(token, text, told, self.family.harmony)
        elif self.family.after(self.mode, token) == self.mode:
            self._region.add(text, told, mark=True)
        else:
            self._change(self.family.after(self.mode, token), text, told)

    def close(self, *, clean: bool) -> bool:
        """End what is being written; whether that ended with text that must stay as it was sampled. `clean`: the model ended it itself."""
        match self.mode:
            case "call":
                if clean and (self.family.harmony is not None or self.family.call_close is None):
                    return not self._end_call("", [])
                self._give_back()
                return True
            case "header" if not harmony.says_nothing(self._region.text):
                self._show_header()
                return True
            case "text" if self._begun is not None and clean and (read := self._read_calls(0)) is not None:
                self._show_calls(read)
            case _:
                self._let_go()
        return False

    # ── marks ──

    def _change(self, after: Mode, mark: str, told: _Told) -> None:
        """From one mode to another, in families other than Harmony."""
        if self.mode == "call":
            self._end_call(mark, told)
        else:
            self._let_go()
        self.mode = after
        if after == "call":
            self._region.add(mark, told, mark=True)
            self._body_at = len(mark)
        elif after == "thinking":
            self._label = self.family.think_label

    def _mark_of_harmony(self, token: int, text: str, told: _Told, marks: HarmonyMarks) -> None:
        match self.mode:
            case "header" if token in (marks.start, marks.end):  # the message ends before it began
                if token == marks.end:
                    self._region.add(text, told, mark=True)
                self._show_header()
                self._open_header(text, told, to="header" if token == marks.start else "between")
            case "header":
                self._region.add(text, told, mark=True)
                if token == marks.message:
                    self._enter()
            case "between":
                self._region.clear()
                self._open_header(text, told, to="header")
            case "call" if token != marks.end:
                self._region.add(text, told, mark=True)
            case "call":
                self._end_call(text, told)
                self.mode, self._new_message = "between", True
            case _:
                self.mode, self._new_message = "between", True

    def _open_header(self, mark: str, told: _Told, *, to: Mode) -> None:
        self.mode = to
        if to == "header":
            self._region.add(mark, told, mark=True)

    def _enter(self) -> None:
        """A header is whole: go on to what it says, or show it."""
        header = harmony.read_header(self._body(0))
        if header is None:
            self._show_header()
            return
        self.mode, self._body_at = header.mode, 0
        if header.mode != "call":
            self._region.clear()

    # ── what is held back ──

    def _body(self, start: int) -> Body:
        separator = b"" if self.family.separator is None else self._tokenizer.token_bytes(self.family.separator)
        return self._region.body(control=self._tokenizer.control, separator=separator.decode(errors="replace"), start=start)

    def _read_calls(self, start: int) -> tuple[ReadCall, ...] | None:
        return READERS[self.family.call_syntax](self._body(start), self._tools)

    def _end_call(self, close: str, told: _Told) -> bool:
        """Read the call that is held back; one that can not be read becomes the visible text it was sampled as."""
        read = self._read_calls(self._body_at)
        if read is None:
            self._region.add(close, told)
            self._give_back()
            return False
        self._show_calls(read)
        return True

    def _show_calls(self, read: tuple[ReadCall, ...]) -> None:
        for call in read:
            self.flow.call(ToolCall(id=self._call_id(self.calls), name=call.name, arguments=call.arguments))
            self.calls += 1
            self.spoken_ids += [] if call.spoken_id is None else [call.spoken_id]
        self._region.clear()

    def _give_back(self) -> None:
        self.malformed_calls += 1
        self._show_region()

    def _show_header(self) -> None:
        """A header that is none, or stands before nothing, is text; one that speaks to a tool was meant as a call."""
        self.malformed_calls += harmony.speaks_to(self._region.text)
        self.mode = "text"
        self._show_region()

    def _show_region(self) -> None:
        text, told = self._region.shown, self._region.told
        self._region.clear()
        self._say("text", text, told)

    def _let_go(self) -> None:
        """What might have been something else, is what it seems; blanks between calls were separators."""
        if self.mode == "thinking" and self._label:
            label, self._label = self._label, ""
            if self._region.text != label.rstrip(SPACE):
                self._say("thinking", self._region.text, [])
        elif self.mode == "text" and self._begun is not None:
            self.malformed_calls += self._begun.called
            self._begun = None
            self._show_region()
        self._region.clear()

    # ── text ──

    def _write_between(self, text: str, told: _Told) -> None:
        """Real text is shown wherever it stands; blanks at its edges are not."""
        size = len(text.rstrip(SPACE))
        self._region.add(text[:size], told)
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
        self._say("thinking", held.removeprefix(label), [])

    def _say(self, kind: Kind, text: str, told: _Told) -> None:
        """Show it; a blank line parts two messages of one kind."""
        if text and self._new_message:
            text, self._new_message = f"\n\n{text}", False
        if text:
            self.flow.write(kind, text, tuple(told) if kind == "text" else ())
