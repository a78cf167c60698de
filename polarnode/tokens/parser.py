"""Sampled ids into text, thinking and tool calls, as they arrive.

Marks are recognised by token id: a control string that the model spelled in ordinary tokens is text. A call
that cannot be read is returned as the text it was sampled as, and counted. `watched` says which ids mean
something in each parser state; `Family.after` or, for Harmony, the parser says what. Inside a call every
control token is kept apart, because a tag is a tag only where it was sampled as one.

Invariant: streamed and whole answers are the same, and nothing is encoded again.
"""

import codecs
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, frozen

from polarnode.core.conversation import Answer, Delta, FinishReason, TokenLogprob, Tool
from polarnode.core.errors import Refused
from polarnode.core.ports import Tokenizer
from polarnode.tokens.families import Family, HarmonyMarks, Mode
from polarnode.tokens.output_parser import Flow, TokenLogprobs, Writing

# ── parser states ─────────────────────────────────────────────────────────────────────────────────

_PLAIN: tuple[Mode, ...] = ("text", "thinking", "call", "between")


def watched(family: Family, control: Iterable[int]) -> Mapping[Mode, frozenset[int]]:
    """For every mode, the ids that are not text in it. `control` holds all control tokens of the model."""
    stops, every = frozenset(family.stop_ids), frozenset(control)
    if family.harmony is not None:
        return _harmony(family.harmony, stops, every)
    marks = (
        family.think_open,
        family.think_close,
        family.call_open,
        family.call_close,
        family.section_open,
        family.section_close,
    )
    found = {
        mode: stops.union(mark for mark in marks if mark is not None and family.after(mode, mark) != mode)
        for mode in _PLAIN
    }
    return found | {"call": found["call"] | every, "header": stops}


def _harmony(
    marks: HarmonyMarks, stops: frozenset[int], every: frozenset[int]
) -> Mapping[Mode, frozenset[int]]:
    over = stops | {marks.end}
    header = over | every | {marks.start, marks.channel, marks.message, marks.constrain}
    return {
        "text": over,
        "thinking": over,
        "call": over | every,
        "header": header,
        "between": stops | {marks.start, marks.channel},
    }


# ── parser ────────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class ParsedAnswer:
    """The end of an answer: the whole answer, and the deltas that `feed` had not returned yet."""

    answer: Answer
    deltas: tuple[Delta, ...]


@define(eq=False, init=False)
class Parser:
    """One sample, read as it is generated. `call_id(n)` names the answer's n-th call, from 0; `tools` give
    the types of parameter values.

    A thought or call extends to its closing mark or the end of the sample, regardless of its content. Control
    tokens without a meaning in the current mode are shown as text. `thinking_tokens` counts ids sampled
    inside thoughts, marks included. `prompt`: the ids before the sample, needed for Harmony alone, whose
    header may begin there.
    """

    thinking_tokens: int
    _tokenizer: Tokenizer
    _family: Family
    _watched: Mapping[Mode, frozenset[int]]
    _ended: bool
    _pending: list[TokenLogprob]  # tokens read whose text is still to come: a character may take several
    _decoder: codecs.IncrementalDecoder
    _flow: Flow
    _writing: Writing

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        family: Family,
        call_id: Callable[[int], str],
        opens_thinking: bool,
        stop: tuple[str, ...] = (),
        tools: Sequence[Tool] = (),
        prompt: "array[int] | None" = None,
    ) -> None:
        if "" in stop:
            raise Refused("an empty stop string stops nothing: leave it out", path="$.stop")
        self._tokenizer, self._family = tokenizer, family
        self._watched = watched(family, tokenizer.control.values())
        self._ended, self._pending, self.thinking_tokens = False, [], 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._flow = Flow(stop)
        mode: Mode = "thinking" if opens_thinking else "header" if family.harmony else "text"
        self._writing = Writing(
            family=family,
            mode=mode,
            flow=self._flow,
            tokenizer=tokenizer,
            tools=tuple(tools),
            call_id=call_id,
        )
        if family.harmony is not None and prompt is not None:
            self._go_on(family.harmony.start, prompt)

    @property
    def stopped(self) -> str | None:
        """The stop string that was hit in visible text. The caller then aborts the engine; what follows
        is not read.
        """
        return self._flow.stopped

    @property
    def calls(self) -> int:
        """How many whole calls were read."""
        return self._writing.calls

    @property
    def malformed_calls(self) -> int:
        """How many calls could not be read and are text."""
        return self._writing.malformed_calls

    @property
    def model_call_ids(self) -> tuple[str, ...]:
        """The model's own ids of its calls, in order, in families that have them."""
        return tuple(self._writing.model_call_ids)

    @property
    def mode(self) -> Mode:
        """The current mode."""
        return self._writing.mode

    @property
    def thought_end(self) -> int | None:
        """The id that ends the current thought, before the first token too where the prompt opened one;
        None outside thoughts.
        """
        if self.mode != "thinking":
            return None
        return self._family.think_close if self._family.harmony is None else self._family.harmony.end

    def feed(self, ids: "array[int]", logprobs: TokenLogprobs = ()) -> list[Delta]:
        """Read more sampled ids, int32. Returns what can be shown now: text that is whole UTF-8,
        thinking, whole calls.

        `logprobs`: the same tokens with their logprobs, where the deltas report them; tokens are then
        read one by one.
        """
        if logprobs:
            for place, token in enumerate(logprobs):
                self._pending.append(token)
                self._read(ids[place : place + 1])
        else:
            self._read(ids)
        return self._flow.take()

    def finish(self, reason: FinishReason) -> ParsedAnswer:
        """End the sample. A clean end with calls is "tool_calls", a stop string hit is "stop_string";
        any other reason stays.
        """
        self._write(self._decoder.decode(b"", final=True))
        unfinished = self._writing.close(clean=self._ended or reason == "stop")
        self._flow.release(exactly=unfinished)
        deltas = tuple(self._flow.take())
        answer = Answer(
            parts=self._flow.parts,
            finish_reason=self._reason(reason),
            stop_string=self._flow.stopped,
            malformed_calls=self.malformed_calls,
            logprobs=self._flow.logprobs,
        )
        return ParsedAnswer(answer=answer, deltas=deltas)

    def _read(self, ids: "array[int]") -> None:
        sampled = ids[:0] if self._over else ids
        run, place, meant = bytearray(), 0, self._watched[self.mode]
        while True:
            mark = _first(sampled, meant, place)
            # at once: a Python statement for each token would take most of a call's reading
            run += b"".join(map(self._tokenizer.token_bytes, sampled[place:mark]))
            self.thinking_tokens += mark - place if self.mode == "thinking" else 0
            if mark == len(sampled):
                break
            token, place = sampled[mark], mark + 1
            if self._is_mark(token, run):
                if self._over:
                    break
                meant = self._watched[self.mode]
            else:
                self.thinking_tokens += self.mode == "thinking"
                run += self._tokenizer.token_bytes(token)
        self._write(self._decoder.decode(bytes(run)))

    def _is_mark(self, token: int, run: bytearray) -> bool:
        """Handle a mark, once the text before it is written. Returns False if that text makes the mark text
        as well.

        A character that a mark breaks in two is U+FFFD.
        """
        logprobs = [self._pending.pop()] if self._pending else []
        self._write(self._decoder.decode(bytes(run), final=True))
        self._pending.clear()
        run.clear()
        if token not in self._watched[self.mode]:
            self._pending += logprobs
            return False
        self._ended |= token in self._family.stop_ids
        if not self._over:
            before = self.mode
            self._writing.mark(token, logprobs)
            self.thinking_tokens += "thinking" in (before, self.mode)
        return True

    def _write(self, text: str) -> None:
        if text:
            logprobs, self._pending = self._pending, []
            self._writing.text(text, logprobs)

    @property
    def _over(self) -> bool:
        """Whether the rest is not read: the turn ended, or a stop string was hit."""
        return self._ended or self._flow.stopped is not None

    def _reason(self, reason: FinishReason) -> FinishReason:
        if self._flow.stopped is not None:
            return "stop_string"
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _go_on(self, start: int, prompt: "array[int]") -> None:
        """Start where the prompt ends: read its last message, and show nothing of it."""
        begun = _last(prompt, frozenset([start]))
        before = Parser(tokenizer=self._tokenizer, family=self._family, call_id=str, opens_thinking=False)
        before.feed(prompt[len(prompt) if begun is None else begun :])
        self._writing.go_on(before._writing)


def model_call_ids(
    sampled: "array[int]", tokenizer: Tokenizer, family: Family, *, opens_thinking: bool = False
) -> tuple[str, ...]:
    """The model's own ids of a sampled turn's calls, in order; empty in families whose calls have none.

    Of the ids of several turns only the last turn is read.
    """
    if family.call_syntax != "numbered":
        return ()
    begun = _last(sampled, family.turn_starts)
    parser = Parser(tokenizer=tokenizer, family=family, call_id=str, opens_thinking=opens_thinking)
    parser.feed(sampled[0 if begun is None else begun + 1 :])
    return parser.model_call_ids


def mode_at_end(written: "array[int]", tokenizer: Tokenizer, family: Family, started: Mode = "text") -> Mode:
    """The mode at the end of some ids. `started` is the mode at their beginning, unless a turn starts
    in them; Harmony reads its headers.

    After a Harmony message's end this is "between", after `<|start|>assistant` it is "header".
    """
    if family.harmony is not None:
        parser = Parser(tokenizer=tokenizer, family=family, call_id=str, opens_thinking=started == "thinking")
        parser.feed(written[_last(written, frozenset([family.harmony.start])) or 0 :])
        return parser.mode
    begun = _last(written, family.turn_starts)
    mode = started if begun is None else "text"
    for token in written if begun is None else written[begun + 1 :]:
        mode = family.after(mode, token)
    return mode


def _first(sampled: "array[int]", tokens: frozenset[int], start: int) -> int:
    """The position of the first of these tokens from `start` on; the length where there is none. Most pieces
    have none at all, which is seen at C's speed.
    """
    if not start and tokens.isdisjoint(sampled):
        return len(sampled)
    return next((place for place in range(start, len(sampled)) if sampled[place] in tokens), len(sampled))


def _last(written: "array[int]", tokens: frozenset[int]) -> int | None:
    """The position of the last of these tokens. The search starts at the end, because a prompt's last turn is
    short.
    """
    return next(
        (len(written) - back for back, token in enumerate(reversed(written), start=1) if token in tokens),
        None,
    )
