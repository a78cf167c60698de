"""Which of a group's sessions are usable and why the others are not, and what that makes of the group.

Pure. The rule for whoever edits it: a status never decides, what there is to learn from does. A harness that failed or ran out of time is
usable when it was scored; what the machine lost is no failure of anyone's and counts as nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from attrs import frozen

from polarnode.groups.group import Group, GroupState, Member
from polarnode.records import Outcome, Trajectory
from polarnode.tasks import GroupSpec

# Whose faults are the machine's. Not `journal`, whose own writer tries again, nor `laws`: the same tokens would break them again.
MACHINE: Final = frozenset({"runtime", "engine", "node"})
STALE: Final = "stale"  # what the reason of a member begins with that is too far behind
EARLY_STOP: Final = "early stop"  # what the reason of a session begins with that was ended because its group had enough


@frozen(kw_only=True)
class Facts:
    """What is known of a session that is over. `trainable_tokens` is None in journals that did not count them."""

    session_id: str
    sample_index: int
    outcome: Outcome
    reward: float | None
    trainable_tokens: int | None = None
    staleness: int | None = None


def facts_of(trajectory: Trajectory) -> Facts:
    """The facts of a session, from what it left."""
    return Facts(
        session_id=trajectory.session_id,
        sample_index=trajectory.sample_index,
        outcome=trajectory.outcome,
        reward=trajectory.reward,
        trainable_tokens=trajectory.trainable_tokens,
        staleness=trajectory.staleness,
    )


def lost_to_the_machine(outcome: Outcome) -> bool:
    """Whether a session ended for what is no fault of its agent, its task or its trainer."""
    return outcome.status == "interrupted" or (outcome.status == "error" and outcome.boundary in MACHINE)


def stopped_early(outcome: Outcome) -> bool:
    """Whether a session was ended, or never begun, because its group had enough."""
    return outcome.status == "cancelled" and (outcome.reason or "").startswith(EARLY_STOP)


def member_of(spec: GroupSpec, facts: Facts) -> Member:
    """A session as its group counts it."""
    why = _why_not(spec, facts)
    return Member(
        session_id=facts.session_id,
        sample_index=facts.sample_index,
        status=facts.outcome.status,
        reward=facts.reward,
        usable=why is None,
        staleness=facts.staleness,
        stale=_is_stale(spec, facts),
        why=why,
    )


def judged(spec: GroupSpec, facts: Iterable[Facts], *, task_id: str, group_id: str) -> Group:
    """The group whose places are over with these sessions."""
    ordered = sorted(facts, key=lambda each: each.sample_index)
    members = tuple(member_of(spec, each) for each in ordered)
    early = sum(stopped_early(each.outcome) for each in ordered)
    state, reason = _state(spec, members, early)
    return Group(task_id=task_id, group_id=group_id, state=state, members=members, reason=reason)


# ── inside ────────────────────────────────────────────────────────────────────


def _is_stale(spec: GroupSpec, facts: Facts) -> bool:
    return spec.max_staleness is not None and facts.staleness is not None and facts.staleness > spec.max_staleness


def _why_not(spec: GroupSpec, facts: Facts) -> str | None:
    """Each begins with a word of its own, and a colon where there is more: reasons are counted by it."""
    if stopped_early(facts.outcome):
        return EARLY_STOP
    if lost_to_the_machine(facts.outcome):
        return f"lost to the machine: {facts.outcome.boundary or 'node'}"
    if facts.reward is None:
        return f"no reward: {facts.outcome.status}"
    if facts.trainable_tokens == 0:
        return "no trainable token"
    if _is_stale(spec, facts) and spec.stale == "drop":
        return f"{STALE}: {facts.staleness} weight updates behind, {spec.max_staleness} are allowed"
    return None


def _state(spec: GroupSpec, members: Sequence[Member], early: int) -> tuple[GroupState, str | None]:
    usable = [member.reward for member in members if member.usable]
    counted = f"{len(usable)} of {len(members)} sessions are usable"
    missing = _missing(members)
    if len(usable) < spec.min_usable:
        return "dropped", f"too few: {counted}, {spec.min_usable} are wanted ({missing})"
    if spec.drop_uniform_reward and len(set(usable)) == 1:
        return "dropped", f"uniform reward: {counted}, each with {usable[0]:g}"
    if early:
        return "early", f"{EARLY_STOP}: {counted} ({missing})"
    return ("partial", f"some are missing: {counted} ({missing})") if missing else ("complete", None)


def _missing(members: Sequence[Member]) -> str:
    """How many are not usable, by the word their reason begins with."""
    words = Counter(member.why.partition(":")[0] for member in members if member.why is not None)
    return ", ".join(f"{count} {word}" for word, count in words.items())
