"""Decide which closing mark ends the call being written, because a call may hold that very mark as data.

A file that a call writes may contain `</tool_call>`, and a model samples it there as the control token that
ends a call. JSON and Gemma's braces show where a string ends, so a mark inside a string is data. In tags
nothing is escaped. There a mark ends the call only if the call can be read up to it. A later mark takes
precedence over an earlier one, as long as nothing else began between them, because the text between them then
belonged to a value.
"""

import re
from collections.abc import Callable, Container, Sequence
from typing import Final, Literal

from attrs import define, field, frozen

from polarnode.core.conversation import TokenLogprob
from polarnode.tokens.families import CallSyntax
from polarnode.tokens.syntax.tag_calls import QUOTE_MARK, VALUE_TAGS, ValueTags
from polarnode.tokens.tool_calls import SPACE, HeldRegion, ReadCall, RegionExtent

# data: the call is not finished. decides: the call ends here, whether it can be read or not. whole: the call
# may end here, unless a later mark takes precedence.
CloseKind = Literal["data", "decides", "whole"]

# The number of times that calls of one answer are read to find where they end, in syntaxes of tags. Each
# reading costs up to the length of the call. A file about this very syntax holds some dozens of unbalanced
# closing tags.
READINGS: Final = 64
_STRING_PATTERN: Final = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


@define(eq=False)
class StringTracker:
    """Whether a text, read piece by piece, ends inside a JSON string."""

    open: bool = False
    _escape: bool = field(default=False, init=False)  # whether the last letter escapes the next one

    def read(self, text: str) -> None:
        """Read more text."""
        at = 0
        if self._escape and text:
            at, self._escape = 1, False
        while at < len(text):
            if not self.open:
                quote = text.find('"', at)
                if quote < 0:
                    return
                self.open, at = True, quote + 1
                continue
            found = _STRING_PATTERN.match(text, at)
            at = len(text) if found is None else found.end()
            if at < len(text):  # Here is a quote, or the backslash that is the last letter of the text.
                self.open, self._escape = text[at] != '"', text[at] == "\\"
                at += 1


@frozen
class Close:
    """A closing mark that may be data: what the region held before it, and how many ids were kept to be read
    again, up to and including it.
    """

    spot: RegionExtent
    kept: int
    text: str
    logprobs: tuple[TokenLogprob, ...]


@define(eq=False, kw_only=True)
class CallEnds:
    """The closing marks of the call being written: the first that may be data, and the last up to which the
    call can be read. `readings` counts how often a call of this answer was read to find that out.
    """

    syntax: CallSyntax
    control: Container[str]  # the model's control strings
    readings: int = 0
    first: Close | None = field(default=None, init=False)
    whole: Close | None = field(default=None, init=False)
    read: tuple[ReadCall, ...] = field(default=(), init=False)  # the calls up to `whole`
    _strings: StringTracker = field(factory=StringTracker, init=False)
    _scanned: RegionExtent = field(default=RegionExtent(0, 0, 0, 0), init=False)
    _open_values: int = field(default=0, init=False)

    def kind(self, region: HeldRegion, read: Callable[[], tuple[ReadCall, ...] | None]) -> CloseKind:
        """What a closing mark after the region means. `read` reads the calls of the region."""
        pieces, self._scanned = region.since(self._scanned), region.spot
        tags = VALUE_TAGS.get(self.syntax)
        if tags is None:
            self._scan_pieces(pieces)
            return "data" if self._strings.open else "decides"
        if not self._may_be_whole(pieces, tags) or self.readings >= READINGS:
            return "data"
        self.readings += self.first is not None
        found = read()
        self.read = found or self.read
        return "data" if found is None else "whole"

    def keep(self, close: Close, *, whole: bool) -> None:
        """Remember a mark that may be data."""
        self.first = self.first or close
        self.whole = close if whole else self.whole

    def _scan_pieces(self, pieces: Sequence[tuple[str, bool]]) -> None:
        for piece, mark in pieces:
            if self.syntax != "braces":
                self._strings.read(piece)
            elif mark and piece == QUOTE_MARK:
                self._strings.open = not self._strings.open

    def _may_be_whole(self, pieces: Sequence[tuple[str, bool]], tags: ValueTags) -> bool:
        """Whether the call may be whole, judged by the text since the last closing mark: it ends with the
        last tag of a call, and no value is open.
        """
        if tags.last in self.control:
            pieces = [(text, mark) for text, mark in pieces if mark or not text.isspace()]
            tagged = [text for text, mark in pieces if mark]
            self._open_values += tagged.count("<arg_value>") - tagged.count(tags.closing)
            named = self.first is None and "<arg_key>" not in tagged
            return named or (pieces[-1:] == [(tags.last, True)] and self._open_values <= 0)
        text = "".join(text for text, _ in pieces)
        self._open_values += len(tags.opened.findall(text)) - text.count(tags.closing)
        named = self.syntax == "arg_xml" and self.first is None and "<arg_key>" not in text
        return named or (text.rstrip(SPACE).endswith(tags.last) and self._open_values <= 0)
