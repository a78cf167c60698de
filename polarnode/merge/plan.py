"""What was decided of one request: the turn it extends, what is rendered of it, and what that is called.

A value: `lineage.py` makes it, the exchange obeys it, the turn that comes of it repeats it. Whoever adds a reason gives it a line here and
one in docs/token-fidelity.md, where a reader looks it up.
"""

from typing import Final

from attrs import evolve, frozen

from polarnode.conversation import Answer, Message
from polarnode.merge.fingerprint import Path, advance
from polarnode.records import Turn, TurnKind, TurnRole

# Why a turn continues another: its client left before the answer, and asked the same again. The answer of both is the later one's.
RESUMED: Final = "resumed"
# Why a turn stands beside another of the same call: its client asked for several answers.
CHOICE: Final = "choice"
# Why a turn begins a row though it could extend one: its task shows the model what the template shows, and that leaves out earlier thoughts.
THINKING_TEMPLATE: Final = "thinking_template"


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


def another(plan: Plan, *, index: int, lineage: int, number: int) -> Plan:
    """One more sample of a plan's prompt: a sibling, and no retry of it."""
    kind: TurnKind = "root" if plan.parent is None else "branch"
    return evolve(plan, index=index, lineage=lineage, kind=kind, reason=CHOICE, request_key=plan.request_key and f"{plan.request_key}.{number}")


def resumed(turn: Turn, *, index: int, total: int) -> Plan:
    """The plan that goes on with a turn's cut sample."""
    kept = {name: getattr(turn, name) for name in ("lineage", "role", "before_key", "request_key")}
    note = f"{RESUMED}: turn {turn.index}'s client left before its answer and asked the same again; its {len(turn.sampled)} tokens go on"
    return Plan(index=index, parent=turn.index, kind="continue", reason=RESUMED, new=(), matched=total, total=total, notes=(note,), **kept)
