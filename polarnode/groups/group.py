"""A finished group: its members, which of them are usable, how stale they are, and its JSON.

Pure. `judged` decides what a group came to, `group_json` and `read_group` write and read the stream's `group`
event. A member is usable for what can be learned from it, never for its status: a harness that failed or ran
out of time is usable if it was scored; a session lost to the machine counts as nothing. A weight version is a
name: equal names are equal weights, and a name that is not in the history has no staleness. Fields of the
event are added and never renamed; readers ignore unknown fields and accept events of older journals.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

from attrs import asdict, evolve, field, frozen

from polarnode.core.codec.json import plain, structure
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.status import RewardEvent
from polarnode.core.task import GroupSpec
from polarnode.core.trajectory import UNKNOWN_VERSION, Outcome, Status, Trajectory, Verdict, rewarded

# ── group ─────────────────────────────────────────────────────────────────────────────────────────

# complete: every place is usable. partial: enough are. early: it was stopped when enough were usable.
# dropped: unusable; `reason` has the reason.
GroupState = Literal["complete", "partial", "early", "dropped"]


@frozen(kw_only=True)
class Member:
    """One place of a group: the session that finally held it. `why` is the reason it is unusable, None if it
    is usable.

    `stale`: it is further behind than the task's `max_staleness`, whether that makes it unusable or not.
    """

    session_id: str
    sample_index: int
    status: Status
    reward: float | None
    usable: bool
    staleness: int | None = None
    stale: bool = False
    why: str | None = None


@frozen(kw_only=True)
class Group:
    """A finished group. `trajectories` are those that the reader has, in order of sample_index."""

    task_id: str
    group_id: str
    state: GroupState
    members: tuple[Member, ...]
    trajectories: tuple[Trajectory, ...] = ()
    reason: str | None = None
    # what its task asked of it, so that it can be judged again; None of an event that does not say
    requires: GroupSpec | None = field(default=None, eq=False, repr=False)
    # how the stream that gave it acknowledges it: no part of what the group is
    _acknowledge: Callable[[], Any] | None = field(default=None, eq=False, repr=False)

    def ack(self) -> Any:
        """Acknowledge the group for the consumer whose stream gave it: call it when the optimizer step is
        done. Of an asynchronous client it is awaited. Raises Refused where no consumer can be acknowledged.
        """
        if self._acknowledge is None:
            raise Refused(
                "ack() moves the position of a consumer: read with groups(consumer=NAME), and acknowledge the"
                " group that the stream gave, not a copy in another process"
            )
        return self._acknowledge()

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """The trajectories to train on; none of a dropped group."""
        if self.state == "dropped":
            return ()
        wanted = {member.session_id for member in self.members if member.usable}
        return tuple(each for each in self.trajectories if each.session_id in wanted)

    @property
    def tree(self) -> bool:
        """Whether some of its sessions are forks of its others: one mean reward is no baseline of all."""
        names = {member.session_id for member in self.members}
        forks = (each.forked_from for each in self.trajectories)
        return any(fork is not None and fork.session_id in names for fork in forks)

    def holding(self, trajectories: Iterable[Trajectory]) -> "Group":
        """The same group with these trajectories."""
        return evolve(self, trajectories=tuple(trajectories))


def check_flat(group: Group) -> None:
    """Raise Refused for a group that is a tree, where sessions are compared with the mean of their group."""
    if group.tree:
        raise Refused(
            f"group {group.group_id} is a tree (group.fork): a fork is compared with the sessions of its"
            " state, not with the whole group: use tree_rows_of(forests_of(groups))"
        )


# ── usable members ────────────────────────────────────────────────────────────────────────────────

# Boundaries whose faults are the machine's. Not `journal`, whose writer retries, nor `laws` (violated
# invariants): the same tokens would violate them again.
MACHINE: Final = frozenset({"runtime", "engine", "node"})
STALE: Final = "stale"  # first word of the reason of a member that is too far behind
# first words of the reason of a session that was ended because its group had enough
EARLY_STOP: Final = "early stop"
# first words of the reason of a fork of a tree that never began, because its root has no state to fork
NOT_FORKED: Final = "not forked"


STANDARD: Final = GroupSpec()


@frozen(kw_only=True)
class Facts:
    """Facts of a finished session. `trainable_tokens` is None in journals that did not count them."""

    session_id: str
    sample_index: int
    outcome: Outcome
    reward: float | None
    trainable_tokens: int | None = None
    staleness: int | None = None


def facts_of(trajectory: Trajectory) -> Facts:
    """The facts of a session, from its trajectory."""
    return Facts(
        session_id=trajectory.session_id,
        sample_index=trajectory.sample_index,
        outcome=trajectory.outcome,
        reward=trajectory.reward,
        trainable_tokens=trajectory.trainable_tokens,
        staleness=trajectory.staleness,
    )


def lost_to_the_machine(outcome: Outcome) -> bool:
    """Whether a session ended through no fault of its agent, its task or its trainer."""
    return outcome.status == "interrupted" or (outcome.status == "error" and outcome.boundary in MACHINE)


def stopped_early(outcome: Outcome) -> bool:
    """Whether a session was ended, or never begun, because its group had enough."""
    return outcome.status == "cancelled" and (outcome.reason or "").startswith(EARLY_STOP)


def not_forked(outcome: Outcome) -> bool:
    """Whether a session is a fork of a tree that never began."""
    return outcome.status == "cancelled" and (outcome.reason or "").startswith(NOT_FORKED)


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
    """The group whose places ended with these sessions."""
    ordered = sorted(facts, key=lambda each: each.sample_index)
    members = tuple(member_of(spec, each) for each in ordered)
    early = sum(stopped_early(each.outcome) for each in ordered)
    state, reason = _state(spec, members, early)
    return Group(
        task_id=task_id, group_id=group_id, state=state, members=members, reason=reason, requires=spec
    )


def with_rewards(group: Group, rewards: Iterable[RewardEvent], spec: GroupSpec = STANDARD) -> Group:
    """The group with the last reward that later evaluations gave each of its sessions: its members, its
    trajectories' traces and turns, and its state, as if it had been the first. `spec`: what its task requires
    of a group.

    A failed evaluation changes nothing. Rewards of other groups' sessions are left out.
    """
    given = [each for each in rewards if each.reward is not None]
    last = {each.session_id: each for each in sorted(given, key=lambda each: each.n)}
    known = {each.session_id: facts_of(each) for each in group.trajectories}
    members = tuple(
        _rescored(spec, member, known.get(member.session_id), last.get(member.session_id))
        for member in group.members
    )
    early = sum(member.why == EARLY_STOP for member in members)
    state, reason = _state(spec, members, early)
    trajectories = (_with_reward(each, last.get(each.session_id)) for each in group.trajectories)
    return evolve(group, members=members, state=state, reason=reason, trajectories=tuple(trajectories))


def _rescored(spec: GroupSpec, member: Member, facts: Facts | None, given: RewardEvent | None) -> Member:
    if given is None:
        return member
    facts = facts or Facts(
        session_id=member.session_id,
        sample_index=member.sample_index,
        outcome=Outcome(status=member.status),
        reward=None,
        staleness=member.staleness,
    )
    return member_of(spec, evolve(facts, reward=given.reward))


def _with_reward(trajectory: Trajectory, given: RewardEvent | None) -> Trajectory:
    if given is None or given.reward is None:
        return trajectory
    verdict = Verdict(
        reward=given.reward,
        lineage_rewards={int(number): reward for number, reward in given.lineage_rewards.items()},
        turn_rewards={int(number): reward for number, reward in given.turn_rewards.items()},
    )
    traces = tuple(rewarded(trace, verdict) for trace in trajectory.traces)
    return evolve(trajectory, reward=given.reward, traces=traces)


# ── reasons and states ────────────────────────────────────────────────────────────────────────────


def _is_stale(spec: GroupSpec, facts: Facts) -> bool:
    return (
        spec.max_staleness is not None
        and facts.staleness is not None
        and facts.staleness > spec.max_staleness
    )


def _why_not(spec: GroupSpec, facts: Facts) -> str | None:
    """The reason a session is unusable. Each begins with a word of its own, and a colon where there is more:
    reasons are counted by it.
    """
    if stopped_early(facts.outcome):
        return EARLY_STOP
    if not_forked(facts.outcome):
        return NOT_FORKED
    if lost_to_the_machine(facts.outcome):
        return f"lost to the machine: {facts.outcome.boundary or 'node'}"
    if facts.reward is None:
        return f"no reward: {facts.outcome.status}"
    if facts.trainable_tokens == 0:
        return "no trainable token"
    if _is_stale(spec, facts) and spec.stale == "drop":
        return _too_old(spec, facts.staleness)
    return None


def _too_old(spec: GroupSpec, staleness: int | None) -> str:
    return f"{STALE}: {staleness} weight updates behind, {spec.max_staleness} are allowed"


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
    """How many members are unusable, by the word their reason begins with."""
    words = Counter(member.why.partition(":")[0] for member in members if member.why is not None)
    return ", ".join(f"{count} {word}" for word, count in words.items())


# ── staleness ─────────────────────────────────────────────────────────────────────────────────────


def stamped(trajectory: Trajectory, history: Sequence[str]) -> Trajectory:
    """The trajectory of a session that has just ended, with its staleness. `history`: the versions that were
    served, oldest first; the last is served now.
    """
    return evolve(trajectory, staleness=updates_behind(trajectory, history))


def updates_behind(trajectory: Trajectory, history: Sequence[str]) -> int | None:
    """Weight updates between the session's oldest sampled token and the last of `history`. None when no
    token's version is in it, or one is unknown. What a fork inherited was sampled, and counts, in its parent.

    For a version that was served more than once, the last time counts: a rollback made its tokens fresh
    again.
    """
    behind = {version: len(history) - 1 - index for index, version in enumerate(history)}
    sampled = {
        span.version
        for turn in trajectory.turns
        for span in turn.version_spans
        if span.end > span.start and turn.index >= trajectory.inherited
    }
    if UNKNOWN_VERSION in sampled:
        return None
    return max((behind[version] for version in sampled if version in behind), default=None)


def judged_again(group: Group, histories: Iterable[Sequence[str]]) -> Group:
    """The group when it is delivered: its members' staleness is what it is now, and those that its task's
    `max_staleness` forbids are unusable or marked, as if the group had ended now.

    `histories`: the versions that the node served, oldest first, of its weights and of each adapter. A member
    without a trajectory, or whose versions are in none of them, stays as it is; none becomes fresher.
    """
    spec = group.requires
    if spec is None or spec.max_staleness is None:
        return group
    known = [tuple(each) for each in histories]
    held = {each.session_id: each for each in group.trajectories}
    members = tuple(_aged(spec, member, held.get(member.session_id), known) for member in group.members)
    if [each.usable for each in members] == [each.usable for each in group.members]:
        return evolve(group, members=members)
    early = sum(member.why == EARLY_STOP for member in members)
    state, reason = _state(spec, members, early)
    if group.state == "dropped":
        state, reason = group.state, group.reason
    return evolve(group, members=members, state=state, reason=reason)


def _aged(
    spec: GroupSpec, member: Member, trajectory: Trajectory | None, histories: Sequence[Sequence[str]]
) -> Member:
    if trajectory is None:
        return member
    ages = [age for each in histories if (age := _trained_behind(trajectory, each)) is not None]
    if not ages:
        return member
    age = max(min(ages), member.staleness or 0)
    facts = evolve(facts_of(trajectory), reward=member.reward, staleness=age)
    found = evolve(member, staleness=age, stale=_is_stale(spec, facts))
    if not (member.usable and found.stale and spec.stale == "drop"):
        return found
    return evolve(found, usable=False, why=_too_old(spec, age))


def _trained_behind(trajectory: Trajectory, history: Sequence[str]) -> int | None:
    """As `updates_behind`, from the rows of a session, whose turns a reader of groups does not have."""
    behind = {version: len(history) - 1 - index for index, version in enumerate(history)}
    sampled = {
        span.version
        for trace in trajectory.traces
        for span in trace.version_spans
        if trace.loss_mask.find(1, span.start, span.end) >= 0
    }
    if UNKNOWN_VERSION in sampled:
        return None
    return max((behind[version] for version in sampled if version in behind), default=None)


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────


def group_json(group: Group) -> dict[str, Json]:
    """The body of the `group` event; trajectories have events of their own."""
    return {
        "task_id": group.task_id,
        "group_id": group.group_id,
        "sessions": [plain(member) for member in group.members],
        "rewards": [member.reward for member in group.members],
        "state": group.state,
        "reason": group.reason,
        "usable": sum(member.usable for member in group.members),
        "requires": None if group.requires is None else plain(evolve(group.requires, fork=None)),
    }


@frozen(kw_only=True)
class MemberShape(Member):
    """A member, read from a journal of any version."""

    reward: float | None = None
    usable: bool = False


@frozen(kw_only=True)
class GroupShape:
    task_id: str
    group_id: str
    sessions: tuple[MemberShape, ...]
    state: GroupState | None = None
    reason: str | None = None
    requires: GroupSpec | None = None


def read_group(value: Json, trajectories: Iterable[Trajectory] = ()) -> Group:
    """The group in an event's body, with those of `trajectories` that are its members'. Refused, with a path,
    for any other body.
    """
    shape = structure(value, GroupShape)
    places = {each.session_id: each.sample_index for each in shape.sessions}
    ours = {each.session_id: each for each in trajectories if each.session_id in places}
    group = _of_an_old_journal(shape) if shape.state is None else _group(shape, shape.state)
    return group.holding(sorted(ours.values(), key=lambda each: places[each.session_id]))


def _group(shape: GroupShape, state: GroupState) -> Group:
    members = tuple(Member(**asdict(each)) for each in shape.sessions)
    return Group(
        task_id=shape.task_id,
        group_id=shape.group_id,
        state=state,
        members=members,
        reason=shape.reason,
        requires=shape.requires,
    )


def _of_an_old_journal(shape: GroupShape) -> Group:
    """The group of an event before journal version 4. Such events have statuses and rewards only, and are
    judged by those and a task's defaults.
    """
    facts = (
        Facts(
            session_id=each.session_id,
            sample_index=each.sample_index,
            outcome=Outcome(status=each.status),
            reward=each.reward,
        )
        for each in shape.sessions
    )
    return judged(GroupSpec(), facts, task_id=shape.task_id, group_id=shape.group_id)
