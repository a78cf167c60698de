"""Replay a recorded session: plan its requests in their order, as a live session would, each answered before
the next.

A request's answer is found in the requests that follow it. Requests are compared by the keys of their paths,
as lineages compare them, so a harness may trim, sort and rename. An answer belongs to the last request with
its path before the answer was first shown. Earlier requests with that path had no answer, or the harness
would not have repeated them.

`merge` decides kinds, lineages and roles, and the template renders the prompts. The ids of a sample are the
template's rendering of the shown answer, because the sampled ids were not recorded.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from attrs import define, field, frozen

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Answer, Conversation, Message, ModelRequest, TextPart, ThinkingPart
from polarnode.core.errors import PolarnodeError, Refused, boundary
from polarnode.core.trajectory import Turn, VersionSpan
from polarnode.gateway.recorded_request import RecordedRequest, sentence
from polarnode.merge.attach import RESUMED, Plan
from polarnode.merge.figures import new_messages_of
from polarnode.merge.fingerprint import FingerprintCache, advance, root_key, thinking_letter
from polarnode.merge.lineage import Lineages
from polarnode.tokens.template import Template

# ── answers ────────────────────────────────────────────────────────────

_NO_REQUEST: Final = 1 << 60


@frozen(kw_only=True)
class RecordedEnding:
    """How a request ended: with an answer that a later request shows, without an answer (the request was sent
    again), or in an unknown way.
    """

    answer: Answer | None = None
    asked_again: bool = False


@frozen(kw_only=True)
class RequestPath:
    """A request's messages and the keys of its path; there is one key more than messages."""

    messages: tuple[Message, ...]
    keys: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.keys[-1]


@frozen(kw_only=True)
class _ShownAnswer:
    """An assistant message in a request, and the key of the path after it."""

    request: int
    key: str
    message: Message


@define(eq=False)
class _ShownAnswers:
    """The assistant messages that follow each path."""

    paths: Sequence[RequestPath]
    _after: dict[str, list[_ShownAnswer]] = field(factory=dict)
    _path_keys: set[str] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        self._path_keys.update(path.key for path in self.paths)
        for number, path in enumerate(self.paths):
            for place, message in enumerate(path.messages):
                if message.role == "assistant":
                    showing = _ShownAnswer(request=number, key=path.keys[place + 1], message=message)
                    self._after.setdefault(path.keys[place], []).append(showing)

    def of(self, number: int) -> Iterator[_ShownAnswer]:
        """The answers to a request that later requests show. Those of requests with its whole path come
        first.
        """
        path = self.paths[number]
        yield from self._later(number, path.key)
        if not path.messages:
            return
        last, before = path.messages[-1], path.keys[-2]
        if last.role == "assistant":
            yield from (
                rest for showing in self._later(number, before) if (rest := _rest(showing, last)) is not None
            )
        elif last.role == "user":
            yield from self._later(number, before)  # A later request removed the user message.
            yield from self._changed(number, before)

    def _later(self, number: int, key: str) -> Iterator[_ShownAnswer]:
        return (showing for showing in self._after.get(key, ()) if showing.request > number)

    def _changed(self, number: int, before: str) -> Iterator[_ShownAnswer]:
        """The places where a later request replaces the last user message by one that was never sent,
        followed by an answer.
        """
        place = len(self.paths[number].messages) - 1
        for later in range(number + 1, len(self.paths)):
            path = self.paths[later]
            if len(path.messages) <= place:
                continue
            if (
                path.keys[place] == before
                and len(path.messages) == place + 1
                and path.messages[place].role == "user"
            ):
                return  # The request was sent again in other words, and the answer belongs to that one.
            if _goes_on(path, place, before) and path.keys[place + 1] not in self._path_keys:
                yield _ShownAnswer(request=later, key=path.keys[place + 2], message=path.messages[place + 1])


def _goes_on(path: RequestPath, place: int, before: str) -> bool:
    """Whether a user message stands at this place of this path, followed by an answer."""
    roles = [message.role for message in path.messages[place : place + 2]]
    return path.keys[place] == before and roles == ["user", "assistant"]


def _rest(showing: _ShownAnswer, begun: Message) -> _ShownAnswer | None:
    """The part that an answer added to the assistant message with which its request ended; None if it added
    none.
    """
    shown = showing.message
    if (
        shown == begun
        or not shown.text.startswith(begun.text)
        or shown.calls[: len(begun.calls)] != begun.calls
    ):
        return None
    rest = Message(
        role="assistant", text=shown.text[len(begun.text) :], calls=shown.calls[len(begun.calls) :]
    )
    return _ShownAnswer(request=showing.request, key=showing.key, message=rest)


def find_answers(conversations: Sequence[Conversation], failed: Sequence[bool]) -> list[RecordedEnding]:
    """Determine how each request of a session ended. `failed` marks the requests whose recorded response
    holds no answer.
    """
    memo = FingerprintCache()
    paths = [path_of(conversation, memo, number) for number, conversation in enumerate(conversations)]
    shown = _ShownAnswers(paths)
    found = [RecordedEnding() for _ in paths]
    for same in _group_by_path(paths):
        claimed: set[str] = set()
        for number, following in pairwise([*same, _NO_REQUEST]):
            first = next(
                (each for each in shown.of(number) if each.request <= following and each.key not in claimed),
                None,
            )
            if first is not None and not (failed[number] and following != _NO_REQUEST):
                claimed.add(first.key)
                found[number] = RecordedEnding(answer=_answer(first.message))
            else:
                found[number] = RecordedEnding(asked_again=following != _NO_REQUEST or failed[number])
    return found


def path_of(conversation: Conversation, memo: FingerprintCache, number: int) -> RequestPath:
    """The path of a request. `number` tells requests apart whose tools cannot be read."""
    try:
        keys = [root_key(memo.tools_key(conversation.tools), thinking_letter(conversation))]
    except Refused:  # Planning this request reports the reason, and no request extends it.
        return RequestPath(messages=(), keys=(f"refused {number}",))
    for message in conversation.messages:
        keys.append(advance(keys[-1], message, canonical=memo.canonical))
    return RequestPath(messages=conversation.messages, keys=tuple(keys))


def _group_by_path(paths: Sequence[RequestPath]) -> list[list[int]]:
    grouped: dict[str, list[int]] = {}
    for number, each in enumerate(paths):
        grouped.setdefault(each.key, []).append(number)
    return list(grouped.values())


def _answer(message: Message) -> Answer:
    thinking = (ThinkingPart(message.thinking),) if message.thinking else ()
    text = (TextPart(message.text),) if message.text else ()
    return Answer(
        parts=(*thinking, *text, *message.calls), finish_reason="tool_calls" if message.calls else "stop"
    )


# ── planning a session ────────────────────────────────────────────────────────────

_NULL_SECRET: Final = bytes(32)  # No id in a recording comes from this node, so none is verified.
_QUESTION: Final = Message(role="user", text="u")


@frozen(kw_only=True)
class Line:
    """The result for one recorded request. `parent` is the file of the request it extends. Every field but
    `file` may be None if the model was not called.
    """

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


def replay_session(recorded: Sequence[RecordedRequest], template: Template) -> list[Line]:
    """One line per request, in their order."""
    requested = [each for each in recorded if each.request is not None]
    requests = [each.request for each in requested if each.request is not None]
    found = find_answers([request.conversation for request in requests], [each.failed for each in requested])
    player = _SessionPlayer(Speaker(template))
    for each, request, ended in zip(requested, requests, found, strict=True):
        player.play(each, request, ended)
    lines = player.lines()
    return [
        lines.get(each.file) or Line(file=each.file, provider=each.provider, error=each.error)
        for each in recorded
    ]


@define(eq=False)
class Speaker:
    """The ids of prompts and of answers. A repeated prompt is rendered once."""

    template: Template
    _roots: dict[str, "array[int]"] = field(factory=dict)

    def prompt(self, plan: Plan, conversation: Conversation, parent: Turn | None) -> "tuple[array[int], int]":
        """The ids that a plan adds to its parent's, and how many of them close the parent's sample."""
        prefill = "" if plan.reason == RESUMED else plan.prefill
        conversation = conversation.before_prefill
        if parent is not None:
            suffix = self.template.suffix(
                plan.new, conversation=conversation, sampled=parent.sampled, prefill=prefill
            )
            return suffix.ids, suffix.close_length
        key = f"{plan.before_key} {prefill}"
        if key not in self._roots:
            self._roots[key] = self.template.root(conversation, prefill=prefill)
        return self._roots[key], 0

    def sample(self, answer: Answer, conversation: Conversation) -> "array[int]":
        """An answer as the template renders it, including its turn end."""
        question = Conversation(messages=(_QUESTION,), thinking=conversation.thinking)
        before = self.template.root(question)
        both = self.template.root(
            Conversation(messages=(_QUESTION, answer.as_message()), thinking=conversation.thinking)
        )
        opening = self.template.suffix((), conversation=question, sampled=ids(self.template.stop_ids[:1])).ids
        same = next(
            (place for place, pair in enumerate(zip(before, both, strict=False)) if pair[0] != pair[1]),
            len(before),
        )
        return both[same : len(both) - len(opening)]


@define(eq=False)
class _SessionPlayer:
    """The lineages of one recorded session, and the file of each turn."""

    speaker: Speaker
    _lineages: Lineages = field(factory=lambda: Lineages(session_id="replay", secret=_NULL_SECRET))
    _turns: dict[int, Turn] = field(factory=dict)
    _files: dict[int, RecordedRequest] = field(factory=dict)
    _errors: list[Line] = field(factory=list)

    def play(self, recorded: RecordedRequest, request: ModelRequest, ended: RecordedEnding) -> None:
        """Plan one request, render it, and end it as recorded."""
        try:
            with boundary(Refused, "it cannot be planned"):  # one file of thousands must not end the others
                self._turn(recorded, request, ended)
        except PolarnodeError as error:
            self._errors.append(Line(file=recorded.file, provider=recorded.provider, error=sentence(error)))

    def _turn(self, recorded: RecordedRequest, request: ModelRequest, ended: RecordedEnding) -> None:
        plan = self._lineages.plan(request.conversation, request_key=recorded.key, hints=request.hints)
        try:
            turn = self._ended(plan, request, ended)
        except BaseException:
            self._lineages.abandon_plan(plan)
            raise
        self._lineages.commit(turn)
        self._turns[turn.index], self._files[turn.index] = turn, recorded

    def _ended(self, plan: Plan, request: ModelRequest, ended: RecordedEnding) -> Turn:
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
            new_messages=new_messages_of(plan, request.conversation),
            notes=plan.notes,
        )

    def lines(self) -> dict[str, Line]:
        """One line per file with a model request."""
        played = {line.file: line for line in self._errors}
        return played | {line.file: line for line in map(self._line, self._turns.values())}

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
class ReplayTotals:
    """Sums over one session, or over all of them."""

    requests: int
    turns: int
    lineages: int
    main_lineages: int
    prompt_tokens: int
    new_tokens: int
    errors: int


def total(lines: Sequence[Line]) -> ReplayTotals:
    """Sum one session's lines."""
    turns = [line for line in lines if line.kind is not None]
    return ReplayTotals(
        requests=len(lines),
        turns=len(turns),
        lineages=len({line.lineage for line in turns}),
        main_lineages=len({line.lineage for line in turns if line.role == "main"}),
        prompt_tokens=sum(line.prompt_tokens or 0 for line in turns),
        new_tokens=sum(line.new_tokens or 0 for line in turns),
        errors=sum(line.error is not None for line in lines),
    )


def added(totals: Sequence[ReplayTotals]) -> ReplayTotals:
    """Sum several sessions."""
    return ReplayTotals(**{name: sum(getattr(each, name) for each in totals) for name in _names()})


def _names() -> Iterator[str]:
    yield from ("requests", "turns", "lineages", "main_lineages", "prompt_tokens", "new_tokens", "errors")
