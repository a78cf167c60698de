"""A recorded session planned as a live one would be: every request in its order, each answered before the next is asked.

Whoever edits this decides nothing here: kinds, lineages and roles are `merge`'s, prompts are the template's. A sample's ids are the
template's spelling of the answer that was shown, since nobody recorded what was sampled.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from attrs import define, field, frozen

from polarnode.conversation import Answer, Conversation, Message, ModelRequest
from polarnode.errors import PolarnodeError, Refused, boundary
from polarnode.merge.lineage import Lineages, Plan
from polarnode.merge.roles import recast
from polarnode.merge.transcript import heard_of
from polarnode.records import Turn, VersionSpan, floats, ids
from polarnode.replay.answers import Found, find_answers
from polarnode.replay.recording import Recorded, sentence
from polarnode.tokens.template import Template

_SECRET: Final = bytes(32)  # no id of a recording is ours, so none is ever proven
_QUESTION: Final = Message(role="user", text="u")


@frozen(kw_only=True)
class Line:
    """What became of one recorded request. `parent` is the file it extends; everything but `file` is None where nothing was asked."""

    file: str
    provider: str | None = None
    kind: str | None = None
    parent: str | None = None
    lineage: int | None = None
    reason: str | None = None
    role: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    error: str | None = None


def replay_session(recorded: Sequence[Recorded], template: Template) -> list[Line]:
    """One line a request, in their order."""
    asked = [each for each in recorded if each.request is not None]
    requests = [each.request for each in asked if each.request is not None]
    found = find_answers([request.conversation for request in requests], [each.failed for each in asked])
    player = _Player(Speaker(template))
    for each, request, ended in zip(asked, requests, found, strict=True):
        player.play(each, request, ended)
    lines = player.lines()
    return [lines.get(each.file) or Line(file=each.file, provider=each.provider, error=each.error) for each in recorded]


@define(eq=False)
class Speaker:
    """Ids of prompts and of answers. A prompt asked again is rendered once."""

    template: Template
    _roots: dict[str, "array[int]"] = field(factory=dict)

    def prompt(self, plan: Plan, conversation: Conversation, parent: Turn | None) -> "tuple[array[int], int]":
        """The ids a plan adds to its parent's, and how many of them close the parent's sample."""
        if parent is not None:
            suffix = self.template.suffix(plan.new, conversation=conversation, sampled=parent.sampled)
            return suffix.ids, suffix.close_length
        if plan.before_key not in self._roots:
            self._roots[plan.before_key] = self.template.root(conversation)
        return self._roots[plan.before_key], 0

    def sample(self, answer: Answer, conversation: Conversation) -> "array[int]":
        """An answer as the template writes it, its turn end included."""
        asked = Conversation(messages=(_QUESTION,), thinking=conversation.thinking)
        before = self.template.root(asked)
        both = self.template.root(Conversation(messages=(_QUESTION, answer.as_message()), thinking=conversation.thinking))
        opening = self.template.suffix((), conversation=asked, sampled=ids(self.template.stop_ids[:1])).ids
        same = next((place for place, pair in enumerate(zip(before, both, strict=False)) if pair[0] != pair[1]), len(before))
        return both[same : len(both) - len(opening)]


@define(eq=False)
class _Player:
    """The lineages of one recorded session, and which file each turn was."""

    speaker: Speaker
    _lineages: Lineages = field(factory=lambda: Lineages(session_id="replay", secret=_SECRET))
    _turns: dict[int, Turn] = field(factory=dict)
    _files: dict[int, Recorded] = field(factory=dict)
    _errors: list[Line] = field(factory=list)

    def play(self, recorded: Recorded, request: ModelRequest, ended: Found) -> None:
        """Plan one request, render it, and end it as it ended."""
        try:
            with boundary(Refused, "it can not be planned"):  # one file of thousands must not end the others
                self._turn(recorded, request, ended)
        except PolarnodeError as error:
            self._errors.append(Line(file=recorded.file, provider=recorded.provider, error=sentence(error)))

    def _turn(self, recorded: Recorded, request: ModelRequest, ended: Found) -> None:
        plan = self._lineages.plan(request.conversation, request_key=recorded.key, hints=request.hints)
        try:
            turn = self._ended(plan, request, ended)
        except BaseException:
            self._lineages.abandon(plan)
            raise
        self._lineages.commit(turn)
        self._turns[turn.index], self._files[turn.index] = turn, recorded

    def _ended(self, plan: Plan, request: ModelRequest, ended: Found) -> Turn:
        parent = None if plan.parent is None else self._turns[plan.parent]
        delta, close_length = self.speaker.prompt(plan, request.conversation, parent)
        answer = ended.answer
        sampled = ids() if answer is None else self.speaker.sample(answer, request.conversation)
        before = 0 if parent is None else parent.end
        return Turn(
            session_id="replay",
            index=plan.index,
            provider=request.provider,
            lineage=plan.lineage,
            parent=plan.parent,
            kind=plan.kind,
            reason=plan.reason,
            role=plan.role,
            state="failed" if ended.asked_again else "complete",
            prompt_delta=delta,
            prompt_length=before + len(delta),
            close_length=close_length,
            sampled=sampled,
            logprobs=floats([0.0] * len(sampled)),
            version_spans=(VersionSpan(version="recorded", start=0, end=len(sampled)),) if sampled else (),
            request_key=plan.request_key,
            before_key=plan.before_key,
            message_key="" if answer is None else plan.after(answer),
            answer=answer,
            heard=heard_of(plan, request.conversation),
            notes=plan.notes,
        )

    def lines(self) -> dict[str, Line]:
        """What became of each file that asked for something."""
        played = {line.file: line for line in self._errors}
        return played | {line.file: line for line in map(self._line, recast(tuple(self._turns.values())))}

    def _line(self, turn: Turn) -> Line:
        recorded = self._files[turn.index]
        return Line(
            file=recorded.file,
            provider=recorded.provider,
            kind=turn.kind,
            parent=None if turn.parent is None else self._files[turn.parent].file,
            lineage=turn.lineage,
            reason=turn.reason,
            role=turn.role,
            prompt_tokens=turn.prompt_length,
            new_tokens=len(turn.prompt_delta),
        )


@frozen(kw_only=True)
class Totals:
    """What a session, or all of them, add up to."""

    requests: int
    turns: int
    lineages: int
    main_lineages: int
    prompt_tokens: int
    new_tokens: int
    errors: int


def total(lines: Sequence[Line]) -> Totals:
    """The sums of one session's lines."""
    turns = [line for line in lines if line.kind is not None]
    return Totals(
        requests=len(lines),
        turns=len(turns),
        lineages=len({line.lineage for line in turns}),
        main_lineages=len({line.lineage for line in turns if line.role == "main"}),
        prompt_tokens=sum(line.prompt_tokens or 0 for line in turns),
        new_tokens=sum(line.new_tokens or 0 for line in turns),
        errors=sum(line.error is not None for line in lines),
    )


def added(totals: Sequence[Totals]) -> Totals:
    """The sums of several sessions."""
    return Totals(**{name: sum(getattr(each, name) for each in totals) for name in _names()})


def _names() -> Iterator[str]:
    yield from ("requests", "turns", "lineages", "main_lineages", "prompt_tokens", "new_tokens", "errors")
