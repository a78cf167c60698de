"""Where a request attaches: its messages determine the turn whose tokens it extends.

`attach` reads the messages once, left to right. The key of a path decides. References only choose between
turns with the same key, and prove that a changed message was an answer of this node. `Plan` is what was
decided for one request. `join_answer_calls` first joins the calls of one answer that a harness shows as
several messages.

Invariant: a match means that every client message before it is, verbatim, what that turn was conditioned on.
Messages are joined only if their ids prove that they belong to one turn, in its order. Document each new
reason in docs/token-fidelity.md.

A reference is put into tool-call ids and thinking signatures, and is recognised in whatever spelling a
harness returns. It distinguishes twins (turns with equal text) and proves identity; it never overrides what a
client changed. References stay signed: a model can write any id, and must not be able to write one that is
accepted.
"""

import hmac
import re
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from attrs import define, evolve, field, frozen

from polarnode.core.conversation import Answer, Conversation, Message, ModelRequest
from polarnode.core.trajectory import Turn, TurnKind, TurnRole
from polarnode.merge import figures
from polarnode.merge.fingerprint import (
    NO_KEY,
    FingerprintCache,
    Path,
    RequestTrail,
    advance,
    label,
    root_key,
    same_text,
    strip_ending,
    thinking_letter,
)
from polarnode.merge.ledger import Ledger

# ── signed references ───────────────────────────────────────────────────────────────────────────────

_INDEX_DIGITS: Final = 6  # 16 million turns a session
# 40 bits: a model that guesses once a turn never hits, and an id stays within 40 characters
_SIGNATURE_DIGITS: Final = 10
_REF_DIGITS: Final = _INDEX_DIGITS + _SIGNATURE_DIGITS
CALL_NUMBER_DIGITS: Final = 2  # the digits at the end of a call id, which number the call within its turn
# Ids of this node have 40 characters at most. Longer opaque fields (the signatures of real vendors) come from
# elsewhere, and their beginning is enough to tell.
_LONGEST: Final = 96

_SEPARATORS: Final = re.compile(r"[^0-9A-Za-z]+")
_HEX_RUN: Final = re.compile(rf"[0-9a-f]{{{_REF_DIGITS},}}")


@frozen(kw_only=True)
class ProvenReference:
    """A proven reference: the index of its turn, and the digits that follow the reference (the number of a
    call; empty in a signature).
    """

    index: int
    rest: str


@frozen
class References:
    """The references of one session. `secret` is the node's and is never shown.

    Only references that `ref` has made are recognised. A request may hold ten thousand ids with eighty places
    each where a reference could begin, and signing an index for each place blocked the event loop for
    seconds.
    """

    session_id: str
    _secret: bytes = field(repr=False)
    # maps each reference to its turn's index
    _made: dict[str, int] = field(factory=dict, init=False, repr=False, eq=False)
    # maps each turn's index to its reference
    _refs: dict[int, str] = field(factory=dict, init=False, repr=False, eq=False)

    def ref(self, index: int) -> str:
        """The reference of a turn: 16 lower-case hex digits, 6 for the turn's index and 10 that sign it."""
        known = self._refs.get(index)
        if known is not None:
            return known
        payload = f"{self.session_id}:{index}".encode()
        signature = hmac.digest(self._secret, payload, "sha256").hex()
        made = f"{index:0{_INDEX_DIGITS}x}{signature[:_SIGNATURE_DIGITS]}"
        self._made[made], self._refs[index] = index, made
        return made

    @property
    def secret_hex(self) -> str:
        """The secret in hex, for a file that only the node reads, because a fork uses its parent's
        references.
        """
        return self._secret.hex()

    def adopt(self, index: int, call_id: str) -> None:
        """Accept the reference in the id of a tool call that the turn of this index made in another session.
        A fork answers with its parent's ids, and harnesses may write them down.
        """
        made = call_id[-_REF_DIGITS - CALL_NUMBER_DIGITS : -CALL_NUMBER_DIGITS]
        if _HEX_RUN.fullmatch(made) and int(made[:_INDEX_DIGITS], 16) == index:
            self._made[made], self._refs[index] = index, made

    def call_id(self, index: int, k: int, prefix: str = "call_") -> str:
        """The id of the turn's k-th tool call, [A-Za-z0-9_], 40 characters at most."""
        return f"{prefix}{self.ref(index)}{k:0{CALL_NUMBER_DIGITS}x}"

    def signature(self, index: int) -> str:
        """What stands in for the signature of a thinking block: base64, never empty, the same every time."""
        return b64encode(self.ref(index).encode()).decode()

    def locate(self, opaque: str) -> ProvenReference | None:
        """The reference hidden in an opaque field, in any spelling that harnesses return. None if there is
        none or it is forged.
        """
        for spelling in _opaque_spellings(opaque[:_LONGEST]):
            for run in _HEX_RUN.findall(spelling):
                found = self._find_in_run(run)
                if found is not None:
                    return found
        return None

    def find_turn(self, opaque: str) -> int | None:
        """The index of the turn that an opaque field names, proven by the reference's signature."""
        located = self.locate(opaque)
        return None if located is None else located.index

    def find_turns(self, opaques: Iterable[str]) -> frozenset[int]:
        """The indexes of all turns that these opaque fields prove."""
        return frozenset(index for index in map(self.find_turn, opaques) if index is not None)

    def _find_in_run(self, run: str) -> ProvenReference | None:
        # A prefix may end in hex letters once its separator is removed (`fc_`), so every place of the run is
        # tried.
        for start in range(len(run) - _REF_DIGITS + 1):
            index = self._made.get(run[start : start + _REF_DIGITS])
            if index is not None:
                return ProvenReference(index=index, rest=run[start + _REF_DIGITS :])
        return None


def _opaque_spellings(opaque: str) -> Iterable[str]:
    """The field without separators, and its decoded text if it is the base64 of a reference."""
    bare = _SEPARATORS.sub("", opaque)
    yield bare.lower()
    try:
        yield b64decode(bare + "=" * (-len(bare) % 4), validate=True).decode("ascii")
    except (NotBase64, UnicodeDecodeError):
        return


# ── plans ─────────────────────────────────────────────────────────────────────────────────────────

# The reason of a turn that continues a cut turn: the client left before the answer and sent the same request
# again. The later turn holds the whole answer.
RESUMED: Final = figures.RESUMED
# The reason of the further turns of a call whose client requested several answers.
EXTRA_CHOICE: Final = "choice"
# The reason of a turn that begins a row although it could extend one, because its task uses the thinking
# policy `template` and the template leaves out earlier thinking.
THINKING_TEMPLATE: Final = "thinking_template"


@frozen(kw_only=True)
class Plan:
    """How one request will be rendered. `parent` and `new` decide the prompt; `kind` and `reason` only name
    it.

    With a parent, the prompt is `Lineages.history(plan)`, then the ids that close the parent's sample if it
    was cut, then the suffix for `new`. With a parent and no new messages, generation continues exactly where
    the parent's sample ended. Without a parent, `new` is every message: a full render. `prefill` is the text
    of a last assistant message, with which the prompt ends. `matched` of `total` messages are in the parent's
    path. `request_key`, `before_key`, `lineage`, `kind` and `role` are copied to the turn.
    """

    index: int
    parent: int | None
    kind: TurnKind
    reason: str
    lineage: int
    role: TurnRole
    new: tuple[Message, ...]
    before_key: str
    request_key: str
    matched: int
    total: int
    notes: tuple[str, ...]
    prefill: str = ""

    def after(self, answer: Answer) -> str:
        """The turn's `message_key`: the key of the path with this answer. The client shows the answer as one
        message together with the prefill that it continued.
        """
        return advance(Path.read(self.before_key).key, answer.as_message(prefill=self.prefill))


def choice_plan(plan: Plan, *, index: int, lineage: int, number: int) -> Plan:
    """A plan for one more sample of the same prompt. It is a sibling, not a retry."""
    kind: TurnKind = "root" if plan.parent is None else "branch"
    return evolve(
        plan,
        index=index,
        lineage=lineage,
        kind=kind,
        reason=EXTRA_CHOICE,
        request_key=plan.request_key and f"{plan.request_key}.{number}",
    )


def resumed(turn: Turn, *, index: int, total: int) -> Plan:
    """The plan that continues a turn's cut sample."""
    kept = {name: getattr(turn, name) for name in ("lineage", "role", "before_key", "request_key", "prefill")}
    note = (
        f"{RESUMED}: turn {turn.index}'s client left before its answer and repeated the request; its"
        f" {len(turn.sampled)} tokens go on"
    )
    return Plan(
        index=index,
        parent=turn.index,
        kind="continue",
        reason=RESUMED,
        new=(),
        matched=total,
        total=total,
        notes=(note,),
        **kept,
    )


# ── calls shown as several messages ───────────────────────────────────────────────────────────────


def join_answer_calls(request: ModelRequest, references: References) -> ModelRequest:
    """The request with each answer's calls in one message, or the request itself if there is nothing to join.
    O(messages).
    """
    kept: list[Message] = []
    joined: dict[int, int] = {}  # maps a turn to the number of messages that showed its calls
    last: int | None = None  # the index of the last assistant message, if only tool results follow it
    for message in request.conversation.messages:
        turn = (
            None
            if last is None or not _alike(kept[last], message)
            else _turn(kept[last], message, references)
        )
        if turn is not None and last is not None:
            # Its text is that of the first message, or empty.
            kept[last] = kept[last].joined(evolve(message, text="", thinking=""))
            joined[turn] = joined.get(turn, 1) + 1
            continue
        last = len(kept) if message.role == "assistant" else last if message.role == "tool" else None
        kept.append(message)
    if not joined:
        return request
    regroup_notes = tuple(
        f"{figures.REGROUPED_NOTE}: the calls of turn {turn} came in {count} messages and are one here"
        for turn, count in joined.items()
    )
    return evolve(
        request,
        conversation=evolve(request.conversation, messages=tuple(kept)),
        notes=(*request.notes, *regroup_notes),
    )


def _alike(first: Message, second: Message) -> bool:
    """A cheap test for two messages that may be one answer: their call ids differ only in the number of the
    call, and the second has no new text.
    """
    if not (second.calls and first.calls and second.role == "assistant"):
        return False
    return first.calls[-1].id[:-CALL_NUMBER_DIGITS] == second.calls[0].id[
        :-CALL_NUMBER_DIGITS
    ] and second.text in (
        "",
        first.text,
    )


def _turn(first: Message, second: Message, references: References) -> int | None:
    """The turn whose calls both messages show, in order; None if they do not belong to one turn."""
    found = [references.locate(call.id) for call in (first.calls[-1], *second.calls)]
    proven = [one for one in found if one is not None]
    in_order = all(one.rest < other.rest for one, other in pairwise(proven))
    return (
        proven[0].index
        if len(proven) == len(found) and len({one.index for one in proven}) == 1 and in_order
        else None
    )


# ── attaching ─────────────────────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Attachment:
    """What a request extends: the turn (None for a root), and how many of the request's messages that turn's
    path holds. `path` is the path of the whole request.

    `follows` is the turn that the request continues without extending it: the turn's answer is there, but the
    user message that it answered is missing or changed. `rerendered` is the turn that the request could
    extend if its thinking did not have to be rendered again. `keys` holds the key of the path before each
    message and after the last.
    """

    path: Path
    parent: int | None
    follows: int | None
    matched: int
    notes: tuple[str, ...]
    keys: Sequence[str]
    rerendered: int | None = None

    @property
    def before(self) -> int | None:
        """The turn that the request continues, whether it extends that turn or not."""
        return next((turn for turn in (self.follows, self.parent, self.rerendered) if turn is not None), None)


@define(eq=False)
class _Pass:
    """The state of one pass over a request's messages. `keys` has one entry more than the messages read.
    `best` is the number of messages that the path of some turn holds.

    `ours` and `odd` are those of a `RequestTrail`: the places after assistant messages that are exactly an
    answer of this session, and those after all other assistant messages.
    """

    ledger: Ledger
    references: References
    memo: FingerprintCache
    messages: tuple[Message, ...]
    keys: list[str]
    best: int = 0
    edits: list[str] = field(factory=list)
    # the first assistant message after `best` that is not this session's answer at this place, and the key
    # before it
    stray: tuple[int, str] | None = None
    ours: list[int] = field(factory=list)
    odd: list[int] = field(factory=list)
    # maps the place after a message to the stop string that the client put back at its end
    stops: dict[int, str] = field(factory=dict)
    # the first message that differs from the earlier request with the longest common prefix
    diverged: int | None = None
    # the last turn after `best` whose answer is here without the user message that it answered
    follows: int | None = None

    def recall(self, trail: RequestTrail, length: int) -> int:
        """Reuse the results of an earlier pass for the messages with which both requests begin, and return
        their number. Answers are only ever added, so a message that was an answer of this session remains
        one. All other assistant messages are looked up again, and reuse ends at the first that has another
        result.
        """
        self.keys[:] = trail.keys[: length + 1]
        for place in trail.odd:
            if place > length:
                break
            self._extend_match(trail.last_exact_place(place))
            before, key, message = self.keys[place - 1], self.keys[place], self.messages[place - 1]
            found = self._ours(
                place - 1, message, before, advance(before, message, canonical=self.memo.canonical)
            )
            if found != key:
                self.keys[place:] = [found]
                length = place
                break
        ours = trail.ours[: bisect_right(trail.ours, length)]
        self.ours = sorted([*ours, *self.ours]) if self.ours else list(ours)
        self._extend_match(trail.last_exact_place(length))
        return length

    def _extend_match(self, place: int) -> None:
        if place > self.best:
            self.best, self.stray, self.follows = place, None, None

    def read(self, position: int) -> None:
        before, message = self.keys[-1], self.messages[position]
        key = advance(before, message, canonical=self.memo.canonical)
        if message.role == "assistant":
            key = self._ours(position, message, before, key)
        self.keys.append(key)

    def _ours(self, position: int, message: Message, before: str, key: str) -> str:
        if self.ledger.find_by_answer(key):
            self.ours.append(position + 1)
            self._extend_match(position + 1)
            return key
        self.odd.append(position + 1)
        known = self._stopped(position, message, before) or self._edited_answer_key(position, message, before)
        if known is not None:
            self._extend_match(position + 1)
            return known
        self.stray = self.stray or (position, before)
        self._follow(position, message, before)
        return key

    def _stopped(self, position: int, message: Message, before: str) -> str | None:
        """The key of the turn whose answer this is, together with the stop string at which it ended. The
        model sampled the stop string too; only the answer to the client lacks it.
        """
        for stop, shown in self.ledger.strip_stops(before, message):
            key = advance(before, shown, canonical=self.memo.canonical)
            if self.ledger.find_by_stop(key, stop):
                self.stops[position + 1] = stop
                return key
        return None

    def _follow(self, position: int, message: Message, before: str) -> None:
        """Look for a turn with this answer whose user message is missing or changed in this request."""
        after_user = position > 0 and self.messages[position - 1].role == "user"
        places = [before, self.keys[position - 1]] if after_user else [before]
        found = (
            self.ledger.find_unprompted(advance(place, shown, canonical=self.memo.canonical))
            for place in places
            for shown in [message, *(shown for _, shown in self.ledger.strip_stops(place, message))]
        )
        self.follows = next((turn for turn in found if turn is not None), self.follows)

    def _edited_answer_key(self, position: int, message: Message, before: str) -> str | None:
        """The key of the turn from which a changed message provably comes: it has the same call ids in the
        same order, and its text is equal or was dropped.
        """
        candidates = self.ledger.find_by_prompt(before)
        proven = self.references.find_turns(opaques(message)) if candidates else frozenset()
        for index in candidates:
            turn = self.ledger.turns[index]
            if index in proven and is_edited_answer(self.references, turn, message):
                ours = turn.message or Message(role="assistant")
                self.edits.append(_edit_note(position, index, ours, message))
                return turn.message_key
        return None


def attach(
    conversation: Conversation, agent: str, *, ledger: Ledger, references: References, memo: FingerprintCache
) -> Attachment:
    """Find the turn that a request extends. O(bytes of the request)."""
    tools, thinking = memo.tools_key(conversation.tools), thinking_letter(conversation)
    walk = _walk(root_key(tools, thinking), _Pass(ledger, references, memo, conversation.messages, []))
    path = _path(conversation, walk.keys, agent=label(agent), tools=tools[:8], thinking=thinking)
    notes = [*walk.edits, *_divergence_notes(walk), *_stray_notes(walk, conversation)]
    parent = None
    if walk.best:
        parent, doubt = _choose(walk, conversation.messages[: walk.best])
        notes += doubt
    return Attachment(
        path=path, parent=parent, follows=walk.follows, matched=walk.best, notes=tuple(notes), keys=walk.keys
    )


def _walk(root: str, walk: _Pass) -> _Pass:
    """Pass over the messages once. The first messages are skipped if the pass of an earlier request has their
    results.
    """
    numbers = walk.memo.numbers(walk.messages)
    trail, length = walk.memo.trails.longest(root, numbers)
    walk.keys.append(root)
    walk.diverged = length if trail is not None and length < min(len(numbers), len(trail.numbers)) else None
    recalled = walk.recall(trail, length) if trail is not None else 0
    for position in range(recalled, len(walk.messages)):
        walk.read(position)
    walk.memo.trails.keep(
        RequestTrail(root=root, numbers=numbers, keys=walk.keys, ours=walk.ours, odd=walk.odd)
    )
    return walk


def _path(conversation: Conversation, keys: list[str], *, agent: str, tools: str, thinking: str) -> Path:
    messages = conversation.messages
    system = next(
        (place for place, message in enumerate(messages) if message.role != "system"), len(messages)
    )
    opening = next(
        (place for place, message in enumerate(messages) if message.role == "assistant"), len(messages)
    )
    bare = keys[-2] if messages and messages[-1].role == "user" else NO_KEY
    return Path(
        agent=agent,
        tools=tools,
        thinking=thinking,
        system=keys[system][:8],
        opening=keys[opening][:8],
        key=keys[-1],
        bare=bare,
    )


def _choose(walk: _Pass, messages: tuple[Message, ...]) -> tuple[int, list[str]]:
    """Among twins, choose the turn whose path most of the request's references prove, and on a tie the
    latest, with a note. A stop string that the client put back distinguishes twins that ended at different
    ones.
    """
    key, stop = walk.keys[walk.best], walk.stops.get(walk.best)
    twins = walk.ledger.find_by_answer(key) if stop is None else walk.ledger.find_by_stop(key, stop)
    if len(twins) == 1:
        return twins[0], []
    proven = walk.references.find_turns(opaque for message in messages for opaque in opaques(message))
    scores = {index: sum(step in proven for step in walk.ledger.walk_ancestors(index)) for index in twins}
    most = max(scores.values())
    tied = sorted(index for index, score in scores.items() if score == most)
    doubt = (
        [f"{figures.AMBIGUOUS}: turns {', '.join(map(str, tied))} fit equally well, the latest is taken"]
        if len(tied) > 1
        else []
    )
    return tied[-1], doubt


def opaques(message: Message) -> Iterator[str]:
    """Every field of a message that may hold a reference of this session."""
    yield from message.refs
    for call in message.calls:
        yield call.id
    if message.call_id is not None:
        yield message.call_id


def is_edited_answer(references: References, turn: Turn, echoed: Message) -> bool:
    """Whether an echoed message is a changed answer of this turn: the same call ids in the same order, and
    the text equal or dropped, with or without the stop string at which it ended.
    """
    answer, ours = turn.answer, turn.message
    if answer is None or ours is None:
        return False
    recorded, shown = _call_references(references, ours), _call_references(references, echoed)
    texts = (echoed.text, strip_ending(echoed.text, answer.stop_string or ""))
    return (
        None not in recorded
        and recorded == shown
        and any(text is not None and (not text.strip() or same_text(ours.text, text)) for text in texts)
    )


def _call_references(references: References, message: Message) -> list[ProvenReference | None]:
    return [references.locate(call.id) for call in message.calls]


def _edit_note(position: int, index: int, ours: Message, echoed: Message) -> str:
    return (
        f"{figures.EDITED_NOTE}: message {position} differs from turn {index}'s answer in"
        f" {_difference(ours, echoed)}; {figures.KEPT}"
    )


def _divergence_notes(walk: _Pass) -> list[str]:
    """A note on the first message that differs from an earlier request of the same conversation, if the
    client wrote that message.
    """
    place, messages = walk.diverged, walk.messages
    if place is None or place < walk.best or walk.follows is not None or messages[place].role == "assistant":
        return []
    if all(message.role == "system" for message in messages[:place]):
        return []  # This is another conversation with the same system messages.
    return [
        (
            f"{figures.DIVERGED_NOTE}: message {place} ({messages[place].role}) is not what an earlier"
            " request had"
            " there"
        )
    ]


def _stray_notes(walk: _Pass, conversation: Conversation) -> list[str]:
    """A note on how the first unmatched message that should be an answer of this session differs from that
    answer.
    """
    if walk.stray is None:
        return []
    if walk.follows is not None:
        return [
            (
                f"{figures.VOLATILE_NOTE}: the user message that turn {walk.follows} answered is gone or"
                " changed,"
                " so its answer is rendered as the request shows it"
            )
        ]
    position, before = walk.stray
    candidates = walk.ledger.find_by_prompt(before)
    if not candidates:
        return [
            (
                f"{figures.FOREIGN_NOTE}: message {position} is an assistant message this session did not"
                " sample there"
            )
        ]
    ours = walk.ledger.turns[max(candidates)].message or Message(role="assistant")
    difference = _difference(ours, conversation.messages[position])
    latest = max(candidates)
    return [
        f"{figures.REWRITTEN_NOTE}: message {position} differs from turn {latest}'s answer in {difference}"
    ]


def _difference(ours: Message, echoed: Message) -> str:
    fields: Mapping[str, bool] = {
        "text": not same_text(ours.text, echoed.text),
        "number of calls": len(ours.calls) != len(echoed.calls),
        "names of calls": [call.name for call in ours.calls] != [call.name for call in echoed.calls],
        "arguments": [call.arguments for call in ours.calls] != [call.arguments for call in echoed.calls],
    }
    return ", ".join(name for name, differs in fields.items() if differs) or "spelling"
