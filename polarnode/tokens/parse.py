"""Sampled ids back into text, thinking and tool calls, as they come.

By token id: a control string the model spelled in ordinary tokens is text. Strict: a call that can not be read is given back as the text it
was sampled as, and counted. Nothing here is ever encoded again; whoever edits this keeps streamed and whole answers the same.
"""

import codecs
from array import array
from collections.abc import Callable

from attrs import define, frozen

from polarnode.conversation import Answer, Delta, FinishReason, TokenLogprob, ToolCall
from polarnode.errors import Refused
from polarnode.ports import Tokenizer
from polarnode.tokens.calls import read_call
from polarnode.tokens.family import Family, Mode
from polarnode.tokens.flow import Flow, Told


@frozen(kw_only=True)
class Finished:
    """The end of an answer: the whole of it, and the deltas that `feed` had not given out yet."""

    answer: Answer
    deltas: tuple[Delta, ...]


@define(eq=False, init=False)
class Parser:
    """One sample, read as it is generated. `call_id(n)` names the answer's n-th call, from 0.

    A thought goes on to `think_close` or the end, whatever it holds; a call to `call_close` or the end. Control tokens with no meaning where
    they stand are shown as their text. `thinking_tokens` counts ids sampled inside thoughts, marks included.
    """

    malformed_calls: int
    thinking_tokens: int
    _tokenizer: Tokenizer
    _family: Family
    _call_id: Callable[[int], str]
    _marks: frozenset[int]
    _mode: Mode
    _ended: bool
    _calls: int
    _call: list[str]
    _call_told: list[TokenLogprob]
    _pending: list[TokenLogprob]  # tokens read whose text is still to come: a character may take several
    _decoder: codecs.IncrementalDecoder
    _flow: Flow

    def __init__(
        self, *, tokenizer: Tokenizer, family: Family, call_id: Callable[[int], str], opens_thinking: bool, stop: tuple[str, ...] = ()
    ) -> None:
        if "" in stop:
            raise Refused("an empty stop string stops nothing: leave it out", path="$.stop")
        self._tokenizer, self._family, self._call_id = tokenizer, family, call_id
        marks = (*family.stop_ids, family.think_open, family.think_close, family.call_open, family.call_close)
        self._marks = frozenset(mark for mark in marks if mark is not None)
        self._mode = "thinking" if opens_thinking else "text"
        self._ended, self._calls, self._call = False, 0, []
        self._call_told, self._pending = [], []
        self.malformed_calls = self.thinking_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._flow = Flow(stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that was hit in visible text; the caller then aborts the engine, and what comes after is not read."""
        return self._flow.stopped

    @property
    def calls(self) -> int:
        """How many whole calls were read."""
        return self._calls

    @property
    def thought_end(self) -> int | None:
        """The id that ends the thought that is being read, before the first too where the prompt opened one; None outside thoughts."""
        return self._family.think_close if self._mode == "thinking" else None

    def feed(self, ids: "array[int]", told: Told = ()) -> list[Delta]:
        """Read more sampled ids, int32. What can be shown now: text that is whole UTF-8, thinking, whole calls.

        `told`: the same tokens with their logprobs, where the deltas shall say them; they are then read one by one.
        """
        if told:
            for place, token in enumerate(told):
                self._pending.append(token)
                self._read(ids[place : place + 1])
        else:
            self._read(ids)
        return self._flow.take()

    def _read(self, ids: "array[int]") -> None:
        run = bytearray()
        for token in () if self._over else ids:
            if token in self._marks and (token in self._family.stop_ids or self._family.after(self._mode, token) != self._mode):
                told = [self._pending.pop()] if self._pending else []
                self._write(self._decoder.decode(bytes(run), final=True))
                self._pending.clear()
                run.clear()
                self._mark(token, told)
                if self._over:
                    break
            else:
                self.thinking_tokens += self._mode == "thinking"
                run += self._tokenizer.token_bytes(token)
        self._write(self._decoder.decode(bytes(run)))

    def finish(self, reason: FinishReason) -> Finished:
        """Read no more. A clean end with calls is "tool_calls", a stop string hit is "stop_string"; any other reason stands."""
        self._write(self._decoder.decode(b"", final=True))
        unfinished = self._mode == "call"
        if unfinished:
            self._give_back()
        self._flow.release(exactly=unfinished)
        deltas = tuple(self._flow.take())
        answer = Answer(
            parts=self._flow.parts,
            finish_reason=self._reason(reason),
            stop_string=self._flow.stopped,
            malformed_calls=self.malformed_calls,
            logprobs=self._flow.told,
        )
        return Finished(answer=answer, deltas=deltas)

    @property
    def _over(self) -> bool:
        """Whether what comes is not read any more: the turn ended, or a stop string was hit."""
        return self._ended or self._flow.stopped is not None

    def _reason(self, reason: FinishReason) -> FinishReason:
        if self._flow.stopped is not None:
            return "stop_string"
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _mark(self, token: int, told: list[TokenLogprob]) -> None:
        """Go from one mode to another, or end with the turn; a character that a mark breaks in two is U+FFFD."""
        self._ended |= token in self._family.stop_ids
        if self._over:
            return
        before, self._mode = self._mode, self._family.after(self._mode, token)
        self.thinking_tokens += "thinking" in (before, self._mode)
        if before == "call":
            self._call_told += told
            self._end_call(self._text(token))
        self._call, self._call_told = ([self._text(token)], told) if self._mode == "call" else ([], [])

    def _end_call(self, close: str) -> None:
        read = read_call("".join(self._call[1:]))
        if read is None:
            self._call.append(close)
            self._give_back()
        else:
            self._flow.call(ToolCall(id=self._call_id(self._calls), name=read.name, arguments=read.arguments))
            self._calls += 1

    def _give_back(self) -> None:
        """A call that can not be read becomes the visible text it was sampled as."""
        self._flow.write("text", "".join(self._call), tuple(self._call_told))
        self.malformed_calls += 1

    def _write(self, text: str) -> None:
        if self._mode == "call":
            self._call.append(text)
            self._call_told += self._pending
        elif text and (self._mode == "text" or self._mode == "thinking"):
            self._flow.write(self._mode, text, tuple(self._pending) if self._mode == "text" else ())
        if text or self._mode == "call":
            self._pending.clear()

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")
