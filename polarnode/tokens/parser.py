"""Parse sampled ids into text, thinking and tool calls, as they arrive.

Marks are recognised by token id; a control string that the model spelled in ordinary tokens is text. A call
that cannot be read is returned as the text it was sampled as, and counted. Half a call at the end of a cut
answer is not shown. `watched` says which ids mean something in each mode, and `Family.after` (for Harmony the
parser) what they mean. Inside a call every control token is kept apart, because a tag is a tag only where it
was sampled as one.

Two things are known only later: whether a closing mark ended its call (`syntax.call_ends`), and whether a
call's opening tag in a thought began a call, which it did if the thought is never closed. Until then the ids
are kept and nothing of them is shown. They are read again once it is known.

Invariant: streamed and whole answers are the same, and nothing is encoded again.
"""

import codecs
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from attrs import define, field, frozen

from polarnode.core.arrays import ids as ids_of
from polarnode.core.conversation import Answer, Delta, FinishReason, TokenLogprob, Tool
from polarnode.core.errors import Refused
from polarnode.core.ports import Tokenizer
from polarnode.tokens.families import Family, HarmonyMarks, Mode
from polarnode.tokens.output_parser import Flow, OutputWriter, TokenLogprobs

# ── parser states ─────────────────────────────────────────────────────────────────────────────────

_PLAIN: tuple[Mode, ...] = ("text", "thinking", "call", "between", "draft")
# The number of ids of an answer that are read again because a mark was taken for data or for a call but was
# neither. Each such mark costs all that follows it, so 32,000 of them would block the event loop for seconds.
# Usual answers may have dozens. The last reading may exceed this by the answer itself.
MAX_REREAD_IDS: Final = 16_384
# The number of marks of an answer that are read, including those that are read again. What follows is text,
# except for the end of a thought and of the turn. A mark takes 20 us of the event loop, and an answer with
# 32,000 marks is noise. A hundred calls of four arguments have 1,800 marks in the family that marks each
# argument (GLM).
MAX_READ_MARKS: Final = 4_096
_THOUGHT: Final[tuple[Mode, ...]] = ("thinking", "draft")


def watched(family: Family, control: Iterable[int]) -> Mapping[Mode, frozenset[int]]:
    """For every mode, the ids that are not text in it. `control` are all control tokens of the model."""
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
    found: dict[Mode, frozenset[int]] = {
        mode: stops.union(mark for mark in marks if mark is not None and family.after(mode, mark) != mode)
        for mode in _PLAIN
    }
    # A closing mark without a call is counted as a malformed call, and a call's opening tag may end a
    # thought.
    ends, starts = (
        frozenset(mark for mark in one if mark is not None)
        for one in ((family.call_close,), (draft_start_id(family),))
    )
    more: dict[Mode, frozenset[int]] = {
        "text": found["text"] | ends,
        "between": found["between"] | ends,
        "thinking": found["thinking"] | starts,
        "call": found["call"] | every,
        "header": stops,
    }
    return found | more


def call_end_id(family: Family) -> int | None:
    """The id that ends a call; None where only a stop id does."""
    return family.call_close if family.harmony is None else family.harmony.end


def draft_start_id(family: Family) -> int | None:
    """The id that begins a call in a thought that is never closed. None if no id does."""
    if family.call_in_thought == "never":
        return None
    return family.call_open if family.section_open is None else family.section_open


def _harmony(
    marks: HarmonyMarks, stops: frozenset[int], every: frozenset[int]
) -> Mapping[Mode, frozenset[int]]:
    over = stops | {marks.end}
    header = over | every | {marks.start, marks.channel, marks.message, marks.constrain}
    return {
        "text": over,
        "thinking": over,
        "draft": over,
        "call": over | every,
        "header": header,
        "between": stops | {marks.start, marks.channel},
    }


# ── parser ────────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class ParsedAnswer:
    """The end of an answer: the whole answer, and the deltas that `feed` has not returned yet."""

    answer: Answer
    deltas: tuple[Delta, ...]


@define(eq=False)
class _KeptIds:
    """Ids that may be read again, with their logprobs if the deltas report them."""

    ids: "array[int]" = field(factory=ids_of)
    told: list[TokenLogprob] = field(factory=list)

    def add(self, ids: Sequence[int], told: Sequence[TokenLogprob]) -> None:
        self.ids.extend(ids)
        self.told.extend(told)


@define(eq=False, kw_only=True)
class _CallDraft:
    """The ids from a call's opening tag in a thought on. `trial` reads them as if the thought had ended
    there. `closed` is the place of the first closing mark of the thought that is inside one of these calls,
    where it may be data.
    """

    trial: "Parser"
    thinking_tokens: int  # the count before the tag
    kept: _KeptIds = field(factory=_KeptIds)
    closed: int | None = None
    _tried: int = field(default=0, init=False)

    def add(self, ids: Sequence[int], told: Sequence[TokenLogprob]) -> None:
        self.kept.add(ids, told)

    def try_calls(self) -> "Parser":
        """Read what was added. This is done only when something depends on it, because long stretches are
        read faster.
        """
        tried, self._tried = self._tried, len(self.kept.ids)
        self.trial.feed(self.kept.ids[tried:])
        return self.trial


@define(eq=False, init=False)
class Parser:
    """One sample, read as it is generated. `call_id(n)` names the n-th call of the answer, from 0; `tools`
    give the types of parameter values.

    A thought extends to its closing mark. If the model never closes it, it ends before the first call that
    begins in it, as the family says. A call extends to the closing mark that ends it (`syntax.call_ends`) or
    to the end of the sample. Control tokens without a meaning in the current mode are shown as text.
    `thinking_tokens` counts the ids sampled inside thoughts, marks included. `prompt` are the ids before the
    sample. Only Harmony needs them, because its header may begin there.
    """

    thinking_tokens: int
    _tokenizer: Tokenizer
    _family: Family
    _tools: tuple[Tool, ...]
    _watched: Mapping[Mode, frozenset[int]]
    _ended: bool
    # the tokens read whose text is incomplete, because a character may take several tokens
    _pending: list[TokenLogprob]
    _decoder: codecs.IncrementalDecoder
    _flow: Flow
    _writing: OutputWriter
    _kept: _KeptIds | None  # the ids after the first closing mark that may be data
    _draft: _CallDraft | None
    _drafts: bool  # whether a thought may turn out to hold a call; not while that is tried
    _read_again: int
    _marks: int

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
        self._tokenizer, self._family, self._tools = tokenizer, family, tuple(tools)
        self._watched = watched(family, tokenizer.control.values())
        self._ended, self._pending, self.thinking_tokens = False, [], 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._flow = Flow(stop)
        self._kept, self._draft, self._drafts, self._read_again = None, None, True, 0
        self._marks = 0
        mode: Mode = "thinking" if opens_thinking else "header" if family.harmony else "text"
        self._writing = OutputWriter(
            family=family,
            mode=mode,
            flow=self._flow,
            tokenizer=tokenizer,
            tools=self._tools,
            call_id=call_id,
        )
        if family.harmony is not None and prompt is not None:
            self._go_on(family.harmony.start, prompt)

    @property
    def stopped(self) -> str | None:
        """The stop string that was hit in visible text. The caller then aborts the engine; what follows is
        not read.
        """
        return self._flow.stopped

    @property
    def calls(self) -> int:
        """The number of whole calls that were read."""
        return self._writing.calls + self._writing.whole_calls

    @property
    def malformed_calls(self) -> int:
        """The number of calls that could not be read and are text."""
        return len(self._writing.faults)

    @property
    def notes(self) -> tuple[str, ...]:
        """What readers of the turn should know about its calls."""
        cut = "cut call: the answer ended inside a call, which is not shown"
        return (*(f"malformed call: {why}" for why in self._writing.faults), *[cut] * self._writing.cut)

    @property
    def model_call_ids(self) -> tuple[str, ...]:
        """The model's own ids of its calls, in order, in families that have such ids."""
        return tuple(self._writing.model_call_ids)

    @property
    def mode(self) -> Mode:
        """The current mode."""
        return self._writing.mode

    @property
    def thought_end(self) -> int | None:
        """The id that ends the current thought; None outside thoughts. If the prompt opened a thought, it is
        set before the first token.
        """
        if self.mode != "thinking":
            return None
        return self._family.think_close if self._family.harmony is None else self._family.harmony.end

    def feed(self, ids: "array[int]", logprobs: TokenLogprobs = ()) -> list[Delta]:
        """Read more sampled ids, int32. Returns what can be shown now: text that is whole UTF-8, thinking,
        whole calls.

        `logprobs` are the same tokens with their logprobs, if the deltas report them. Tokens are then read
        one by one.
        """
        self._read_with_logprobs(ids, logprobs)
        return self._flow.take()

    def finish(self, reason: FinishReason) -> ParsedAnswer:
        """End the sample. A proper end with calls becomes "tool_calls", and a stop string that was hit
        "stop_string". Any other reason remains.
        """
        self._flush()
        clean = self._ended or reason == "stop"
        while self._draft is not None or self._kept is not None:
            self._end_kept(clean=clean)
            self._flush()
        unfinished = self._writing.close(clean=clean)
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

    # ── ids ──

    def _read_with_logprobs(self, ids: "array[int]", told: Sequence[TokenLogprob]) -> None:
        """Read ids, one by one if their logprobs are reported."""
        if not told:
            self._read(ids)
        for place, token in enumerate(told):
            self._pending.append(token)
            self._read(ids[place : place + 1], (token,))

    def _read(self, ids: "array[int]", told: Sequence[TokenLogprob] = ()) -> None:
        sampled = ids[:0] if self._over else ids
        run, place, meant = bytearray(), 0, self._meaningful_ids
        while True:
            mark = _first(sampled, meant, place)
            # The bytes are joined at once, because a Python statement for each token would take most of the
            # time of reading a call.
            run += b"".join(map(self._tokenizer.token_bytes, sampled[place:mark]))
            self.thinking_tokens += mark - place if self.mode in _THOUGHT else 0
            self._keep(sampled[place:mark], told[place:mark])
            if mark == len(sampled):
                break
            token, place = sampled[mark], mark + 1
            if self._take_mark(token, run, told[mark:place]):
                if self._over:
                    break
                meant = self._meaningful_ids
            else:
                self.thinking_tokens += self.mode in _THOUGHT
                self._keep(sampled[mark:place], told[mark:place])
                run += self._tokenizer.token_bytes(token)
        self._write(self._decoder.decode(bytes(run)))

    @property
    def _meaningful_ids(self) -> frozenset[int]:
        """The ids that mean something in the current mode."""
        if self._marks < MAX_READ_MARKS:
            return self._watched[self.mode]
        ends = {self._family.think_close} if self.mode in _THOUGHT else set()
        return self._watched[self.mode] & ends.union(self._family.stop_ids)

    def _take_mark(self, token: int, run: bytearray, told: Sequence[TokenLogprob]) -> bool:
        """Handle a mark, once the text before it is written. Returns False if, after that text, the mark
        turns out to be text as well.

        A character that a mark breaks in two becomes U+FFFD.
        """
        self._marks += 1
        logprobs = [self._pending.pop()] if self._pending else []
        self._write(self._decoder.decode(bytes(run), final=True))
        self._pending.clear()
        run.clear()
        if not self._means(token):
            self._pending += logprobs
            return False
        self._ended |= token in self._family.stop_ids
        if not self._over:
            self._mark(token, logprobs, told)
        return True

    def _means(self, token: int) -> bool:
        """Whether an id means something here, now that the text before it is known."""
        if token not in self._watched[self.mode]:
            return False
        if self.mode != "thinking" or token != draft_start_id(self._family):
            return True
        begins = self._family.call_in_thought == "anywhere" or self._writing.at_line_start
        return begins and self._drafts and self._read_again < MAX_REREAD_IDS

    def _mark(self, token: int, logprobs: list[TokenLogprob], told: Sequence[TokenLogprob]) -> None:
        before, family = self.mode, self._family
        self.thinking_tokens += before in _THOUGHT
        if before == "draft":
            self._close_draft(token, told)
        elif before == "thinking" and token == draft_start_id(family):
            self._draft = _CallDraft(trial=self._trial_parser(), thinking_tokens=self.thinking_tokens - 1)
            self._draft.add(ids_of([token]), told)
            self._writing.mode = "draft"
        elif before == "call" and token == call_end_id(family):
            self._close_call(token, logprobs, told)
        elif before == "call" and self._writing.whole_calls and token in self._opening_ids:
            self._keep(ids_of([token]), told)
            self._settle()
        else:
            self._keep(ids_of([token]), told)
            self._writing.mark(token, logprobs)
            self.thinking_tokens += before not in _THOUGHT and self.mode == "thinking"

    @property
    def _opening_ids(self) -> tuple[int | None, ...]:
        """The ids that begin something other than the value of a call."""
        return (self._family.call_open, self._family.section_open, self._family.think_open)

    def _keep(self, ids: "array[int]", told: Sequence[TokenLogprob]) -> None:
        if self._draft is not None:
            self._draft.add(ids, told)
        elif self._kept is not None:
            self._kept.add(ids, told)

    def _write(self, text: str) -> None:
        if text:
            logprobs, self._pending = self._pending, []
            self._writing.text(text, logprobs)

    def _flush(self) -> None:
        """Write a character that is still incomplete."""
        self._write(self._decoder.decode(b"", final=True))

    @property
    def _over(self) -> bool:
        """Whether the rest is not read, because the turn ended or a stop string was hit."""
        return self._ended or self._flow.stopped is not None

    def _reason(self, reason: FinishReason) -> FinishReason:
        if self._flow.stopped is not None:
            return "stop_string"
        return "tool_calls" if reason == "stop" and self.calls else reason

    # ── ids that are read again ──

    def _close_call(self, token: int, logprobs: list[TokenLogprob], told: Sequence[TokenLogprob]) -> None:
        """A closing mark inside a call. It is the call's end, unless it is or may be data."""
        kind = "decides" if self._read_again >= MAX_REREAD_IDS else self._writing.close_kind()
        if kind == "decides" and (self._kept is None or self._writing.reads):
            self._kept = None
            self._writing.mark(token, logprobs)
            return
        first, self._kept = self._kept is None, self._kept or _KeptIds()
        if not first:
            self._kept.add(ids_of([token]), told)
        if kind == "decides":
            self._settle()
        else:
            kept = len(self._kept.ids)
            self._writing.keep_close(token, logprobs, kept=kept, whole=kind == "whole")

    def _settle(self) -> None:
        """End the call at the closing mark that ended it, and read what followed it."""
        kept, self._kept = self._kept or _KeptIds(), None
        whole = self._writing.whole_calls
        start = self._writing.settle()
        self._read_again += (
            0 if whole else len(kept.ids) - start
        )  # After a whole call nothing is read a third time.
        self._again(kept, start)

    def _again(self, kept: _KeptIds, start: int = 0) -> None:
        """Read kept ids again. If the turn has ended, its end comes after them."""
        ended, self._ended = self._ended, False
        self._read_with_logprobs(kept.ids[start:], kept.told[start:])
        self._ended = self._ended or ended

    def _trial_parser(self) -> "Parser":
        trial = Parser(
            tokenizer=self._tokenizer,
            family=self._family,
            call_id=str,
            opens_thinking=False,
            tools=self._tools,
        )
        trial._drafts = False
        return trial

    def _close_draft(self, token: int, told: Sequence[TokenLogprob]) -> None:
        """The closing mark of a thought in which a call was begun. What was begun is part of the thought,
        unless the mark is inside an unfinished call.
        """
        draft = self._draft
        if draft is None or draft.try_calls().inside_call:
            self._draft_goes_on(token, told)
            return
        self._draft = None
        self._write_thought(draft.kept.ids)
        self._writing.mark(token, [])

    def _draft_goes_on(self, token: int, told: Sequence[TokenLogprob]) -> None:
        draft = self._draft
        if draft is not None:
            draft.closed = len(draft.kept.ids) if draft.closed is None else draft.closed
            draft.add(ids_of([token]), told)

    def _write_thought(self, ids: "array[int]") -> None:
        """Write ids of a draft that are part of the thought."""
        self._writing.mode = "thinking"
        text = b"".join(map(self._tokenizer.token_bytes, ids)).decode(errors="replace")
        self._writing.text(text, [])

    @property
    def inside_call(self) -> bool:
        """Whether a call is open that cannot end here."""
        return self._writing.inside_call

    def _end_kept(self, *, clean: bool) -> None:
        """Decide at the end of the sample what the kept ids are."""
        kept, writing = self._kept, self._writing
        if self._draft is not None:
            self._end_draft(self._draft, clean=clean)
        elif kept is None or writing.whole_calls or not self._ends_unread(kept, clean=clean):
            self._settle()
        else:
            self._kept = None

    def _ends_unread(self, kept: _KeptIds, *, clean: bool) -> bool:
        """Whether a call whose closing marks are data ends with the sample: it can be read at its end, or it
        was cut.
        """
        if clean:
            return self._family.harmony is not None and self._writing.reads
        return self._family.call_open not in kept.ids

    def _end_draft(self, draft: _CallDraft, *, clean: bool) -> None:
        """The sample ended while the thought was open, or with its closing mark inside a call."""
        self._draft = None
        self._read_again += len(draft.kept.ids)
        read = draft.try_calls().finish("stop" if clean else "length").answer
        is_call = bool(read.calls) and not read.malformed_calls if draft.closed else bool(read.calls) or clean
        if is_call:
            self._writing.mode = "text"
            self.thinking_tokens = draft.thinking_tokens
            self._again(draft.kept)
            return
        self._write_thought(draft.kept.ids[: draft.closed])
        if draft.closed is not None:
            self.thinking_tokens -= len(draft.kept.ids) - draft.closed
            self._again(draft.kept, draft.closed)

    def _go_on(self, start: int, prompt: "array[int]") -> None:
        """Start where the prompt ends: read its last message, and show nothing of it."""
        begun = _last(prompt, frozenset([start]))
        before = Parser(tokenizer=self._tokenizer, family=self._family, call_id=str, opens_thinking=False)
        before.feed(prompt[len(prompt) if begun is None else begun :])
        self._writing.go_on(before._writing)


def model_call_ids(
    sampled: "array[int]", tokenizer: Tokenizer, family: Family, *, opens_thinking: bool = False
) -> tuple[str, ...]:
    """The model's own ids of a sampled turn's calls, in order. Empty in families whose calls have no such
    ids.

    If the ids are those of several turns, only the last turn is read.
    """
    if family.call_syntax != "numbered":
        return ()
    begun = _last(sampled, family.turn_starts)
    parser = Parser(tokenizer=tokenizer, family=family, call_id=str, opens_thinking=opens_thinking)
    parser.feed(sampled[0 if begun is None else begun + 1 :])
    parser.finish("stop")
    return parser.model_call_ids


def mode_at_end(written: "array[int]", tokenizer: Tokenizer, family: Family, started: Mode = "text") -> Mode:
    """The mode at the end of some ids. `started` is the mode at their beginning, unless a turn starts in
    them. Harmony reads its headers.

    After the end of a Harmony message this is "between", after `<|start|>assistant` it is "header".
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
    """The position of the first of these tokens from `start` on; the length if there is none. Most pieces
    have none at all, which is found at the speed of C.
    """
    if not start and tokens.isdisjoint(sampled):
        return len(sampled)
    return next((place for place in range(start, len(sampled)) if sampled[place] in tokens), len(sampled))


def _last(written: "array[int]", tokens: frozenset[int]) -> int | None:
    """The position of the last of these tokens; None if there is none. The search starts at the end, because
    the last turn of a prompt is short.
    """
    return next(
        (len(written) - back for back, token in enumerate(reversed(written), start=1) if token in tokens),
        None,
    )
