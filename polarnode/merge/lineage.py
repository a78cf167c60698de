"""Every turn of a session once, and where each new request attaches: told of requests and turns, it plans and keeps.

Synchronous and without a clock. A plan reserves a turn's number before anything is generated and remembers its parent, so requests in
flight at once become siblings without a lock. Whoever edits this keeps the contract: a prompt is the parent's exact ids and then what is
new, or a root; and all that a plan depends on can be rebuilt from the turns (`restore`).
"""

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import define, evolve, frozen

from polarnode.conversation import Answer, Conversation, Message
from polarnode.errors import LawBroken
from polarnode.merge.attach import Attached, attach
from polarnode.merge.fingerprint import Memo, Path, advance
from polarnode.merge.ledger import Ledger, attachable
from polarnode.merge.references import References
from polarnode.merge.roles import Cast, Heads
from polarnode.records import Turn, TurnKind, TurnRole, ids

# Why a turn continues another: its client left before the answer, and asked the same again. The answer of both is the later one's.
RESUMED: Final = "resumed"
# Why a turn stands beside another of the same call: its client asked for several answers.
CHOICE: Final = "choice"

_NO_HINTS: Final[Mapping[str, str]] = MappingProxyType({})


@frozen(kw_only=True)
class Plan:
    """How one request will be rendered. `parent` and `new` say it all; `kind` and `reason` only name it.

    With a parent the prompt is `Lineages.history(plan)`, a close if the parent's sample lacks one, and the suffix of `new`; with a parent
    and nothing new, generation goes on exactly where the parent's sample ended. Without a parent `new` is every message: a full render.
    `matched` of `total` messages are in the parent's path. `request_key`, `before_key`, `lineage`, `kind`, `role` belong into the turn.
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

    def after(self, answer: Answer) -> str:
        """The turn's `message_key`: the path with this answer, as returned to the client."""
        return advance(Path.read(self.before_key).key, answer.as_message())


@frozen(kw_only=True)
class _Named:
    """What a plan is called, and the line of turns it belongs to."""

    kind: TurnKind
    reason: str
    lineage: int


@define(eq=False, init=False)
class Lineages:
    """The lineages of one session. Every method is synchronous; nothing here waits."""

    references: References
    _session_id: str
    _ledger: Ledger
    _memo: Memo
    _heads: Heads
    _plans: dict[int, Plan]
    _siblings: dict[int | None, list[int]]
    _next_index: int
    _next_lineage: int

    def __init__(self, *, session_id: str, secret: bytes) -> None:
        self.references = References(session_id, secret)
        self._session_id = session_id
        self._ledger, self._memo, self._heads = Ledger(), Memo(), Heads()
        self._plans, self._siblings = {}, {}
        self._next_index = self._next_lineage = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that ended, by index; a number whose generation is still under way is absent."""
        return tuple(turn for _, turn in sorted(self._ledger.turns.items()))

    def plan(self, conversation: Conversation, *, request_key: str = "", hints: Mapping[str, str] = _NO_HINTS) -> Plan:
        """Reserve a turn and say what it extends. Every plan is ended by `commit` or `abandon`. O(bytes of the request)."""
        found = attach(conversation, hints.get("agent", ""), ledger=self._ledger, references=self.references, memo=self._memo)
        cast = self._cast(found, conversation, hints)
        named = self._name(found, conversation, request_key)
        plan = _plan(self._next_index, found, cast, named, conversation, request_key)
        self._heads.note(found.path, cast.role)
        return self._planned(plan)

    def _planned(self, plan: Plan) -> Plan:
        self._plans[plan.index] = plan
        self._enter(plan)
        return plan

    def also(self, plan: Plan, count: int) -> tuple[Plan, ...]:
        """`count` more plans for the request of this one: other samples of the same prompt, siblings and no retries of each other."""
        return tuple(self._planned(_twin(plan, self._next_index, self._next_lineage, number)) for number in range(1, count + 1))

    def resume(self, index: int, *, total: int) -> Plan | None:
        """Go on with the cut sample of a turn whose client left and asks the same again, `total` messages. None when it can not go on."""
        turn = self._ledger.turns[index]
        if not self._can_go_on(turn):
            return None
        note = f"resumed: turn {index}'s client left before its answer and asked the same again; its {len(turn.sampled)} tokens go on"
        return self._planned(_resumed(turn, self._next_index, total, note))

    def spoken(self, plan: Plan) -> "array[int]":
        """What was sampled of a plan's answer before it: the samples that it resumes, int32. Empty for any other plan."""
        parts, reason, parent = [ids()], plan.reason, plan.parent
        while reason == RESUMED and parent is not None:
            turn = self._ledger.turns[parent]
            parts.append(turn.sampled)
            reason, parent = turn.reason, turn.parent
        return ids(b"".join(part.tobytes() for part in reversed(parts)))

    def look(self, conversation: Conversation, *, hints: Mapping[str, str] = _NO_HINTS) -> "tuple[array[int] | None, tuple[Message, ...]]":
        """What a request would be rendered from, without asking: the ids of the turn it extends (None for a root), and the messages after it."""
        found = attach(conversation, hints.get("agent", ""), ledger=self._ledger, references=self.references, memo=self._memo)
        history = None if found.parent is None else self._ledger.written(found.parent)
        return history, conversation.messages[found.matched :]

    def history(self, plan: Plan) -> "array[int]":
        """The exact ids of the parent, prompt and sample, int32: a fresh array, empty for a root. O(ids) of memcpy."""
        return self._ledger.written(plan.parent)

    def commit(self, turn: Turn) -> None:
        """Keep a turn that ended, however it ended. LawBroken if it is not the turn that was planned."""
        plan = self._plans.get(turn.index)
        if plan is None:
            raise LawBroken(f"turn {turn.index} of session {self._session_id} ends, but no plan of that number is under way")
        self._agree(plan, turn)
        del self._plans[turn.index]
        self._keep(turn)

    def abandon(self, plan: Plan) -> None:
        """Forget a plan that will have no turn (its request was refused). Its numbers are not used again."""
        if self._plans.pop(plan.index, None) is None:
            return
        self._siblings[plan.parent].remove(plan.index)
        self._heads = Heads()
        for index in sorted(self._plans.keys() | self._ledger.turns.keys()):
            asked = self._asked(index)
            self._heads.note(Path.read(asked.before_key), asked.role)
        for turn in self.turns:
            self._hear(turn)

    @classmethod
    def restore(cls, *, session_id: str, secret: bytes, turns: Sequence[Turn]) -> "Lineages":
        """The lineages that these turns made, ready to plan the next."""
        lineages = cls(session_id=session_id, secret=secret)
        for turn in sorted(turns, key=lambda turn: turn.index):
            lineages._fits(turn)
            lineages._heads.note(Path.read(turn.before_key), turn.role)
            lineages._enter(turn)
            lineages._keep(turn)
        return lineages

    def _keep(self, turn: Turn) -> None:
        self._ledger.add(turn)
        self._hear(turn)

    def _hear(self, turn: Turn) -> None:
        if attachable(turn) and turn.answer is not None:
            self._heads.heard(turn.answer)

    def _fits(self, turn: Turn) -> None:
        known = self._ledger.turns
        if turn.index in known or (turn.parent is not None and turn.parent not in known) or not turn.before_key:
            raise LawBroken(f"turn {turn.index} can not be restored: its number is taken, its parent {turn.parent} or its before_key is missing")

    def _cast(self, found: Attached, conversation: Conversation, hints: Mapping[str, str]) -> Cast:
        """The role of a request: what it shows itself, else that of the sub-agent whose turn it goes on from."""
        names = [tool.name for tool in conversation.tools]
        cast = self._heads.cast(found.path, conversation.messages, hints.get("kind", ""), tools=names)
        before = found.parent if found.follows is None else found.follows
        if cast.role == "main" and before is not None and self._ledger.turns[before].role == "subagent":
            return Cast(role="subagent", note=f"the request goes on from turn {before}, a sub-agent's")
        return cast

    def _enter(self, asked: Plan | Turn) -> None:
        self._siblings.setdefault(asked.parent, []).append(asked.index)
        self._next_index = max(self._next_index, asked.index + 1)
        self._next_lineage = max(self._next_lineage, asked.lineage + 1)

    def _name(self, found: Attached, conversation: Conversation, request_key: str) -> _Named:
        again = self._again(found, request_key)
        if again is not None:
            return again
        if found.follows is not None and self._is_last(found.follows):
            return _Named(kind="branch", reason="volatile", lineage=self._ledger.turns[found.follows].lineage)
        if found.parent is None:
            return _Named(kind="root", reason=self._heads.why_root(found.path, conversation.messages), lineage=self._next_lineage)
        taken = bool(self._living(found.parent))
        lineage = self._next_lineage if taken else self._ledger.turns[found.parent].lineage
        new = conversation.messages[found.matched :]
        if not new:
            return _Named(kind="continue", reason="cut_answer", lineage=lineage)
        if taken and any(message.role == "assistant" for message in new):
            return _Named(kind="branch", reason="rewrite", lineage=lineage)
        return _Named(kind="branch", reason="sibling", lineage=lineage) if taken else _Named(kind="extend", reason="appended", lineage=lineage)

    def _again(self, found: Attached, request_key: str) -> _Named | None:
        """The retry this request is, if it is one: the same body again, or the same path as a turn that did not end well (or not yet)."""
        for index in reversed(self._siblings.get(found.parent, [])):
            asked = self._asked(index)
            same_body = bool(request_key) and asked.request_key == request_key
            if same_body or (asked.before_key == found.path.text and not self._complete(index)):
                lineage = asked.lineage if self._replaceable(index) else self._next_lineage
                return _Named(kind="retry", reason="same_request" if same_body else "same_path", lineage=lineage)
        return None

    def _is_last(self, index: int) -> bool:
        """Whether nothing came after a turn in its lineage; the engine's failures are nothing."""
        lineage, ended = self._ledger.turns[index].lineage, self._ledger.turns
        under_way = any(plan.lineage == lineage and plan.index > index for plan in self._plans.values())
        return not under_way and not any(turn.lineage == lineage and turn.index > index and turn.state != "failed" for turn in ended.values())

    def _asked(self, index: int) -> Plan | Turn:
        return self._plans.get(index) or self._ledger.turns[index]

    def _complete(self, index: int) -> bool:
        """Whether a turn came to its end, or one that resumed it did."""
        turns = self._ledger.turns
        while index in turns and turns[index].state != "complete":
            index = next((child for child in self._living(index) if self._asked(child).reason == RESUMED), -1)
        return index in turns

    def _can_go_on(self, turn: Turn) -> bool:
        """It was cut, there is something to go on from and room to go on, and nothing else went on from it."""
        room = turn.used.max_tokens is None or len(turn.sampled) < turn.used.max_tokens
        untouched = all(child in self._ledger.turns and not self._ledger.turns[child].sampled for child in self._living(turn.index))
        return turn.state == "partial" and bool(turn.sampled) and room and untouched

    def _replaceable(self, index: int) -> bool:
        """Whether a retry takes the place of this turn: it ended, not well, and nothing extends it."""
        return index in self._ledger.turns and not self._complete(index) and not self._living(index)

    def _living(self, parent: int) -> list[int]:
        """The turns that extend this one, or may yet; the engine's failures extend nothing."""
        turns = self._ledger.turns
        return [child for child in self._siblings.get(parent, []) if child not in turns or turns[child].state != "failed"]

    def _agree(self, plan: Plan, turn: Turn) -> None:
        planned = {name: getattr(plan, name) for name in ("parent", "kind", "lineage", "role", "request_key", "before_key")}
        planned["session_id"] = self._session_id
        planned["prompt_length"] = self._ledger.length(plan.parent) + len(turn.prompt_delta)
        if turn.answer is not None and attachable(turn):
            planned["message_key"] = plan.after(turn.answer)
        wrong = [f"{name} {getattr(turn, name)!r} instead of {value!r}" for name, value in planned.items() if getattr(turn, name) != value]
        if wrong:
            raise LawBroken(f"turn {turn.index} is not as it was planned: {', '.join(wrong)}")


def _twin(plan: Plan, index: int, lineage: int, number: int) -> Plan:
    kind: TurnKind = "root" if plan.parent is None else "branch"
    return evolve(plan, index=index, lineage=lineage, kind=kind, reason=CHOICE, request_key=plan.request_key and f"{plan.request_key}.{number}")


def _resumed(turn: Turn, index: int, total: int, note: str) -> Plan:
    kept = {name: getattr(turn, name) for name in ("lineage", "role", "before_key", "request_key")}
    return Plan(index=index, parent=turn.index, kind="continue", reason=RESUMED, new=(), matched=total, total=total, notes=(note,), **kept)


def _plan(index: int, found: Attached, cast: Cast, named: _Named, conversation: Conversation, request_key: str) -> Plan:
    return Plan(
        index=index,
        parent=found.parent,
        kind=named.kind,
        reason=named.reason,
        lineage=named.lineage,
        role=cast.role,
        new=conversation.messages[found.matched :],
        before_key=found.path.text,
        request_key=request_key,
        matched=found.matched,
        total=len(conversation.messages),
        notes=found.notes if cast.note is None else (*found.notes, cast.note),
    )
