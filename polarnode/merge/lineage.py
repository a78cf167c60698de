"""The lineages of one session: they plan each request against the turns so far, and keep the turns that end.

Synchronous, without a clock. A plan reserves a turn's number before anything is generated, and remembers its
parent, so concurrent requests become siblings without a lock. `ThinkingPolicy` implements the policy
`template`, under which a prompt shows earlier thinking as the chat template would. Under `keep` the sampled
tokens stay in the prompt.

Invariants: a prompt is a root, or the parent's exact ids followed by what is new. Everything on which a
prompt depends can be rebuilt from the turns (`restore`). Harnesses drop thinking, so the policy restores the
thinking of the session's own answers before the template decides, and notes on the turn what the model saw.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import define, evolve, frozen

from polarnode.core.arrays import ids
from polarnode.core.conversation import Conversation, Message
from polarnode.core.errors import InvariantViolated, Refused
from polarnode.core.trajectory import Turn
from polarnode.merge import figures
from polarnode.merge.attach import (
    RESUMED,
    Attachment,
    Plan,
    References,
    attach,
    choice_plan,
    is_edited_answer,
    opaques,
    resumed,
)
from polarnode.merge.fingerprint import FingerprintCache, Path
from polarnode.merge.ledger import Ledger, is_attachable
from polarnode.merge.roles import PathIndex, RequestRole
from polarnode.merge.turn_kinds import TurnGraph, TurnLabel

# ── thinking policy ───────────────────────────────────────────────────────────────────────────────

# A function that says whether the template leaves out the thinking of earlier turns when these messages
# follow.
DropsThinking = Callable[[Sequence[Message]], bool]


@frozen(kw_only=True)
class ThinkingPolicy:
    """The thinking policy `template` for one session. It decides what its requests are rendered from."""

    drops: DropsThinking
    ledger: Ledger
    references: References

    def shown(self, found: Attachment, conversation: Conversation) -> tuple[Attachment, tuple[Message, ...]]:
        """What a request extends under this policy, and the messages that are rendered, with their
        thinking.
        """
        messages = conversation.messages
        if self._hides_thinking(found, messages[found.matched :]):
            kept = tuple(note.replace(figures.KEPT, figures.RERENDERED_ENDING) for note in found.notes)
            found = evolve(found, parent=None, matched=0, rerendered=found.parent, notes=kept)
        new = tuple(
            self._restored(place, messages[place], found) for place in range(found.matched, len(messages))
        )
        thoughts = [place for place, message in enumerate(new) if message.thinking.strip()]
        # Towards the front, more and more messages follow, so a binary search finds the first thought that is
        # shown.
        first = bisect_left(thoughts, True, key=lambda place: not self.drops(new[place + 1 :]))
        places = [found.matched + place for place in thoughts]
        return evolve(
            found, notes=(*found.notes, *figures.thinking_notes(places[first:], places[:first]))
        ), new

    def _hides_thinking(self, found: Attachment, new: Sequence[Message]) -> bool:
        return (
            found.parent is not None
            and bool(new)
            and self.ledger.holds_thinking(found.parent)
            and self.drops(new)
        )

    def _restored(self, place: int, message: Message, found: Attachment) -> Message:
        """The message with its thinking, if it is an answer of this session."""
        if message.role != "assistant":
            return message
        key = found.keys[place + 1]
        candidates = self.ledger.find_by_answer(key)
        proven = self.references.find_turns(opaques(message))
        if not candidates:
            candidates = [index for index in sorted(proven) if self._is_answer(index, message)]
            key = self.ledger.turns[candidates[-1]].message_key if candidates else key
        if not candidates:
            return message
        author = self._choose_author(candidates, proven, found)
        return evolve(message, thinking=self.ledger.thinking(author, key))

    def _choose_author(self, candidates: Sequence[int], proven: frozenset[int], found: Attachment) -> int:
        """Among twins, the turn that the message's references name, else the turn whose tokens the request
        continues, else the latest.
        """
        line = (
            frozenset(self.ledger.walk_ancestors(found.before))
            if len(candidates) > 1 and found.before is not None
            else frozenset[int]()
        )
        return max(candidates, key=lambda index: (index in proven, index in line, index))

    def _is_answer(self, index: int, message: Message) -> bool:
        turn = self.ledger.turns.get(index)
        return turn is not None and is_edited_answer(self.references, turn, message)


# ── lineages ──────────────────────────────────────────────────────────────────────────────────────

__all__ = ["RESUMED", "Lineages", "Plan"]

_NO_HINTS: Final[Mapping[str, str]] = MappingProxyType({})


@define(eq=False, init=False)
class Lineages:
    """The lineages of one session. Every method is synchronous, and nothing here waits."""

    references: References
    _session_id: str
    _ledger: Ledger
    _memo: FingerprintCache
    _paths: PathIndex
    _graph: TurnGraph
    _thinking_policy: ThinkingPolicy | None

    def __init__(
        self,
        *,
        session_id: str,
        secret: bytes,
        drops_thinking: DropsThinking | None = None,
        references: References | None = None,
    ) -> None:
        """`references` are those of the session that a fork resumes, whose ids its harness sends.
        `drops_thinking` is the template's; it decides which thinking a prompt holds. Without it sampled
        thinking stays.
        """
        self.references = references or References(session_id, secret)
        self._session_id = session_id
        self._ledger, self._memo, self._paths = Ledger(), FingerprintCache(), PathIndex()
        self._graph = TurnGraph(self._ledger)
        self._thinking_policy = drops_thinking and ThinkingPolicy(
            drops=drops_thinking, ledger=self._ledger, references=self.references
        )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that have ended, by index. A turn whose generation is still under way is absent."""
        return tuple(turn for _, turn in sorted(self._ledger.turns.items()))

    def prepare(self, conversation: Conversation) -> None:
        """Do the part of a plan that depends only on the request. Long requests are prepared in another
        thread.
        """
        self._memo.prepare(conversation)

    def plan(
        self, conversation: Conversation, *, request_key: str = "", hints: Mapping[str, str] = _NO_HINTS
    ) -> Plan:
        """Reserve a turn and decide what it extends. Every plan is ended by `commit` or `abandon_plan`.
        O(bytes of the request).
        """
        conversation, prefill = self._opened(conversation, hints)
        found, new = self._attach_request(conversation, hints)
        roles = self._classify_request(found, conversation, hints)
        named = self._graph.name(found, conversation, request_key, self._paths)
        plan = _plan(self._graph.next_index, found, roles, named, new, request_key)
        if prefill:
            note = f"{figures.PREFILLED_NOTE}: the answer goes on with the last message, an assistant's"
            plan = evolve(plan, prefill=prefill, notes=(*plan.notes, note))
        self._paths.note(found.path, roles.role)
        return self._register_plan(plan)

    def _opened(self, conversation: Conversation, hints: Mapping[str, str]) -> tuple[Conversation, str]:
        """Split off the prefill: the conversation before a last message that the answer is to continue, and
        that message's text. If the message is an answer of this session that was cut, or that ended at a stop
        string which the client put back, the answer continues by its own ids and needs no text.
        """
        if not conversation.prefilled:
            return conversation, ""
        found, new = self._attach_request(conversation, hints)
        if found.parent is not None and not new:
            parent = self._ledger.turns[found.parent]
            stop = parent.answer.stop_string if parent.answer is not None else None
            put_back = stop and conversation.messages[-1].text.endswith(stop)
            if parent.state == "partial" or parent.finish_reason == "length" or put_back:
                return conversation, ""
        last = conversation.messages[-1]
        why = (
            "calls a tool that has no result: send the result"
            if last.calls
            else "has a thought, which cannot be gone on with: end with a user's message"
            if last.thinking
            else "is to be gone on with while thinking is on: turn it off, or end with a user's message"
            if conversation.thinking and last.text
            else None
        )
        if why is not None:
            raise Refused(f"the last message is the assistant's and {why}", path="$.messages[-1]")
        return conversation.before_prefill, last.text

    def _attach_request(
        self, conversation: Conversation, hints: Mapping[str, str]
    ) -> tuple[Attachment, tuple[Message, ...]]:
        """The turn that a request extends, and the messages that are rendered after it."""
        found = attach(
            conversation,
            hints.get("agent", ""),
            ledger=self._ledger,
            references=self.references,
            memo=self._memo,
        )
        return (
            (found, conversation.messages[found.matched :])
            if self._thinking_policy is None
            else self._thinking_policy.shown(found, conversation)
        )

    def _register_plan(self, plan: Plan) -> Plan:
        self._graph.plans[plan.index] = plan
        self._graph.enter(plan)
        return plan

    def also(self, plan: Plan, count: int) -> tuple[Plan, ...]:
        """`count` more plans for this plan's request, for further samples of the same prompt. They are
        siblings, not retries of each other.
        """
        tree = self._graph
        numbers = range(1, count + 1)
        return tuple(
            self._register_plan(
                choice_plan(plan, index=tree.next_index, lineage=tree.next_lineage, number=number)
            )
            for number in numbers
        )

    def resume(self, index: int, *, total: int) -> Plan | None:
        """Plan to continue the cut sample of a turn whose client left and sent the same request, of `total`
        messages, again. None if it cannot be continued.
        """
        turn = self._ledger.turns[index]
        return (
            self._register_plan(resumed(turn, index=self._graph.next_index, total=total))
            if self._graph.can_continue(turn)
            else None
        )

    def resumed_prefix(self, plan: Plan) -> "array[int]":
        """The ids (int32) of a plan's answer that were sampled by the turns it resumes. Empty for a plan that
        resumes none.
        """
        parts, reason, parent = [ids()], plan.reason, plan.parent
        while reason == RESUMED and parent is not None:
            turn = self._ledger.turns[parent]
            parts.append(turn.sampled)
            reason, parent = turn.reason, turn.parent
        return ids(b"".join(part.tobytes() for part in reversed(parts)))

    def look(
        self, conversation: Conversation, *, hints: Mapping[str, str] = _NO_HINTS
    ) -> "tuple[array[int] | None, tuple[Message, ...], str]":
        """Preview a request without a plan: the ids of the turn that it would extend (None for a root), the
        messages after it, and the text with which the prompt ends.
        """
        conversation, prefill = self._opened(conversation, hints)
        found, new = self._attach_request(conversation, hints)
        return None if found.parent is None else self._ledger.written(found.parent), new, prefill

    def history(self, plan: Plan) -> "array[int]":
        """The exact ids of the parent, prompt and sample: a fresh int32 array, empty for a root. O(ids) of
        copied memory.
        """
        return self._ledger.written(plan.parent)

    def commit(self, turn: Turn) -> None:
        """Keep a turn, however it ended. Raises InvariantViolated if it is not the planned turn."""
        plan = self._graph.plans.get(turn.index)
        if plan is None:
            raise InvariantViolated(
                f"turn {turn.index} of session {self._session_id} ends, but no plan of that number is"
                " under way"
            )
        self._check_planned(plan, turn)
        del self._graph.plans[turn.index]
        self._keep(turn)

    def abandon_plan(self, plan: Plan) -> None:
        """Drop a plan that will have no turn, because its request was refused. Its numbers are not used
        again.
        """
        if plan.index not in self._graph.plans:
            return
        self._graph.drop(plan)
        self._paths = PathIndex()
        for request in self._graph.requests():
            self._paths.note(Path.read(request.before_key), request.role)
        for turn in self.turns:
            self._note_answer(turn)

    @classmethod
    def restore(
        cls,
        *,
        session_id: str,
        secret: bytes,
        turns: Sequence[Turn],
        drops_thinking: DropsThinking | None = None,
        references: References | None = None,
    ) -> "Lineages":
        """The lineages that these turns form, ready to plan the next request."""
        lineages = cls(
            session_id=session_id, secret=secret, drops_thinking=drops_thinking, references=references
        )
        for turn in sorted(turns, key=lambda turn: turn.index):
            lineages._fits(turn)
            lineages._paths.note(Path.read(turn.before_key), turn.role)
            lineages._graph.enter(turn)
            lineages.references.ref(turn.index)  # The client may hold this reference.
            lineages._keep(turn)
        return lineages

    def _keep(self, turn: Turn) -> None:
        self._ledger.add(turn)
        self._note_answer(turn)

    def _note_answer(self, turn: Turn) -> None:
        if is_attachable(turn) and turn.answer is not None:
            self._paths.note_answer(turn.answer)

    def _fits(self, turn: Turn) -> None:
        recorded = self._ledger.turns
        if (
            turn.index in recorded
            or (turn.parent is not None and turn.parent not in recorded)
            or not turn.before_key
        ):
            raise InvariantViolated(
                f"turn {turn.index} cannot be restored: its number is taken, its parent {turn.parent} or its"
                " before_key is missing"
            )

    def _classify_request(
        self, found: Attachment, conversation: Conversation, hints: Mapping[str, str]
    ) -> RequestRole:
        """The role of a request. Its own signs decide; without one it has the role of the sub-agent or the
        side call that it continues.
        """
        names = [tool.name for tool in conversation.tools]
        roles = self._paths.classify(found.path, conversation.messages, hints.get("kind", ""), tools=names)
        if roles.role != "main" or found.before is None:
            return roles
        before = self._ledger.turns[found.before].role
        if before == "subagent":
            return RequestRole(
                role="subagent", note=f"the request continues turn {found.before}, a sub-agent's"
            )
        if before == "auxiliary" and conversation.messages[-1].role == "tool":
            return RequestRole(
                role="auxiliary",
                note=(
                    f"{figures.SIDE_CALL_NOTE}: the request answers the tools that turn {found.before} called"
                ),
            )
        return roles

    def _check_planned(self, plan: Plan, turn: Turn) -> None:
        planned = {
            name: getattr(plan, name)
            for name in ("parent", "kind", "lineage", "role", "request_key", "before_key")
        }
        planned["session_id"] = self._session_id
        planned["prompt_length"] = self._ledger.length(plan.parent) + len(turn.prompt_delta)
        if turn.answer is not None and is_attachable(turn):
            planned["message_key"] = plan.after(turn.answer)
        wrong = [
            f"{name} {getattr(turn, name)!r} instead of {value!r}"
            for name, value in planned.items()
            if getattr(turn, name) != value
        ]
        if wrong:
            raise InvariantViolated(f"turn {turn.index} is not as it was planned: {', '.join(wrong)}")


def _plan(
    index: int,
    found: Attachment,
    roles: RequestRole,
    named: TurnLabel,
    new: tuple[Message, ...],
    request_key: str,
) -> Plan:
    return Plan(
        index=index,
        parent=found.parent,
        kind=named.kind,
        reason=named.reason,
        lineage=named.lineage,
        role=roles.role,
        new=new,
        before_key=found.path.text,
        request_key=request_key,
        matched=found.matched,
        total=found.matched + len(new),
        notes=found.notes if roles.note is None else (*found.notes, roles.note),
    )
