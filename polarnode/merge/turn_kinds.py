"""The graph of a session's turns, ended or under way, and the kind, reason and lineage of each new turn.

Kinds and reasons label turns for reports; they never change the tokens of a prompt. The graph can be rebuilt
from the turns alone, because sessions are restored from them. Each look-up is cheap, because every request
makes one.
"""

from collections.abc import Iterator
from typing import Final

from attrs import define, field, frozen

from polarnode.core.conversation import Conversation
from polarnode.core.trajectory import Turn, TurnKind
from polarnode.merge.attach import EXTRA_CHOICE, RESUMED, THINKING_TEMPLATE, Attachment, Plan
from polarnode.merge.ledger import Ledger
from polarnode.merge.roles import PathIndex

# Every reason that a turn may have. The set is fixed, because reports and metrics count by it.
REASONS: Final = frozenset(
    (
        # These are the reasons of roots, from `PathIndex.root_reason`.
        *("first", "compaction", "tools", "thinking", "system", "rewrite", "conversation"),
        *("appended", "sibling", "volatile", "cut_answer", "same_request", "same_path"),
        *(THINKING_TEMPLATE, RESUMED, EXTRA_CHOICE),
    )
)


@frozen(kw_only=True)
class TurnLabel:
    """The kind, reason and lineage of a plan."""

    kind: TurnKind
    reason: str
    lineage: int


@define(eq=False)
class TurnGraph:
    """The plans under way and the turns of the ledger, by parent. `next_index` and `next_lineage` are the
    next unused numbers.
    """

    ledger: Ledger
    plans: dict[int, Plan] = field(factory=dict)
    next_index: int = 0
    next_lineage: int = 0
    _children: dict[int | None, list[int]] = field(factory=dict)

    def enter(self, request: Plan | Turn) -> None:
        """Add a turn that was requested."""
        self._children.setdefault(request.parent, []).append(request.index)
        self.next_index = max(self.next_index, request.index + 1)
        self.next_lineage = max(self.next_lineage, request.lineage + 1)

    def drop(self, plan: Plan) -> None:
        """Remove an abandoned plan. Its numbers are not used again."""
        del self.plans[plan.index]
        self._children[plan.parent].remove(plan.index)

    def requests(self) -> Iterator[Plan | Turn]:
        """All plans and turns, in the order of their requests."""
        return (self._request(index) for index in sorted(self.plans.keys() | self.ledger.turns.keys()))

    def name(
        self, found: Attachment, conversation: Conversation, request_key: str, paths: PathIndex
    ) -> TurnLabel:
        """The kind, reason and lineage of the next request, which attaches as `found` says."""
        again = self._again(found, request_key)
        if again is not None:
            return again
        if found.follows is not None and self._is_last(found.follows):
            return TurnLabel(
                kind="branch", reason="volatile", lineage=self.ledger.turns[found.follows].lineage
            )
        if found.rerendered is not None:
            lineage = (
                self.ledger.turns[found.rerendered].lineage
                if self._is_last(found.rerendered)
                else self.next_lineage
            )
            return TurnLabel(kind="branch", reason=THINKING_TEMPLATE, lineage=lineage)
        if found.parent is None:
            return TurnLabel(
                kind="root",
                reason=paths.root_reason(found.path, conversation.messages),
                lineage=self.next_lineage,
            )
        return self._label_extension(found.parent, found, conversation)

    def can_continue(self, turn: Turn) -> bool:
        """Whether a cut turn can be continued: it has tokens and room for more, and nothing else continued
        it.
        """
        room = turn.used.max_tokens is None or len(turn.sampled) < turn.used.max_tokens
        untouched = all(
            child in self.ledger.turns and not self.ledger.turns[child].sampled
            for child in self._live_children(turn.index)
        )
        return turn.state == "partial" and bool(turn.sampled) and room and untouched

    def _label_extension(self, parent: int, found: Attachment, conversation: Conversation) -> TurnLabel:
        taken = bool(self._live_children(parent))
        lineage = self.next_lineage if taken else self.ledger.turns[parent].lineage
        new = conversation.messages[found.matched :]
        if not new:
            return TurnLabel(kind="continue", reason="cut_answer", lineage=lineage)
        if taken and any(message.role == "assistant" for message in new):
            return TurnLabel(kind="branch", reason="rewrite", lineage=lineage)
        return (
            TurnLabel(kind="branch", reason="sibling", lineage=lineage)
            if taken
            else TurnLabel(kind="extend", reason="appended", lineage=lineage)
        )

    def _again(self, found: Attachment, request_key: str) -> TurnLabel | None:
        """The name of a retry, if this request retries a turn: one with the same body, or one with the same
        path that failed or has not ended. Else None.
        """
        for index in reversed(self._children.get(found.parent, [])):
            earlier = self._request(index)
            same_body = bool(request_key) and earlier.request_key == request_key
            if same_body or (earlier.before_key == found.path.text and not self._ended_normally(index)):
                lineage = earlier.lineage if self._is_replaceable(index) else self.next_lineage
                return TurnLabel(
                    kind="retry", reason="same_request" if same_body else "same_path", lineage=lineage
                )
        return None

    def _is_last(self, index: int) -> bool:
        """Whether a turn is the last of its lineage. Turns that the engine failed do not count."""
        lineage, ended = self.ledger.turns[index].lineage, self.ledger.turns
        under_way = any(plan.lineage == lineage and plan.index > index for plan in self.plans.values())
        return not under_way and not any(
            turn.lineage == lineage and turn.index > index and turn.state != "failed"
            for turn in ended.values()
        )

    def _request(self, index: int) -> Plan | Turn:
        return self.plans.get(index) or self.ledger.turns[index]

    def _ended_normally(self, index: int) -> bool:
        """Whether a turn, or a turn that resumed it, ended normally."""
        turns = self.ledger.turns
        while index in turns and turns[index].state != "complete":
            index = next(
                (child for child in self._live_children(index) if self._request(child).reason == RESUMED), -1
            )
        return index in turns

    def _is_replaceable(self, index: int) -> bool:
        """Whether a retry replaces this turn: it ended abnormally and nothing extends it."""
        return (
            index in self.ledger.turns and not self._ended_normally(index) and not self._live_children(index)
        )

    def _live_children(self, parent: int) -> list[int]:
        """The turns that extend this one, or still may. Turns that the engine failed extend nothing."""
        turns = self.ledger.turns
        return [
            child
            for child in self._children.get(parent, [])
            if child not in turns or turns[child].state != "failed"
        ]
