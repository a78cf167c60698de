"""A finished group: its members, which of them are usable, how stale they are, and its JSON.

Pure. `judged` decides the state of a group. `group_json` and `read_group` write and read the stream's `group`
event. A member is usable if something can be learned from it, whatever its status: a session whose harness
failed or ran out of time is usable if it was scored, and a session that was lost to the machine does not
count. A weight version is a name. Equal names are equal weights, and a name that is not in the history has no
staleness. Fields of the event are added and never renamed. Readers ignore unknown fields and accept events of
older journals.
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

# "complete": every place is usable. "partial": enough places are usable. "early": the group was stopped when
# enough were usable. "dropped": the group is unusable, and `reason` says why.
GroupState = Literal["complete", "partial", "early", "dropped"]


@frozen(kw_only=True)
class Member:
    """One place of a group: the session that finally held it. `why` is the reason why it is unusable, or None
    if it is usable.

    `stale` says that it is further behind than the task's `max_staleness`, whether that makes it unusable or
    not.
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
    # The task's requirements, so that the group can be judged again. None for an event that lacks them.
    requires: GroupSpec | None = field(default=None, eq=False, repr=False)
    # It acknowledges the group at the stream that gave it, and is no part of the group's value.
    _acknowledge: Callable[[], Any] | None = field(default=None, eq=False, repr=False)

    def ack(self) -> Any:
        """Acknowledge the group for the consumer whose stream gave it. Call this when the optimizer step is
        done. With an asynchronous client, await the result. Raises Refused if there is no consumer to
        acknowledge it for.
        """
        if self._acknowledge is None:
            raise Refused(
                "ack() moves the position of a consumer: read with groups(consumer=NAME), and acknowledge the"
                " group that the stream gave, not a copy in another process"
            )
        return self._acknowledge()

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """The trajectories to train on; a dropped group has none."""
        if self.state == "dropped":
            return ()
        wanted = {member.session_id for member in self.members if member.usable}
        return tuple(each for each in self.trajectories if each.session_id in wanted)

    @property
    def tree(self) -> bool:
        """Whether some of its sessions are forks of others of its sessions. One mean reward is then no
        baseline for all of them.
        """
        names = {member.session_id for member in self.members}
        forks = (each.forked_from for each in self.trajectories)
        return any(fork is not None and fork.session_id in names for fork in forks)

    def holding(self, trajectories: Iterable[Trajectory]) -> "Group":
        """The same group with these trajectories."""
        return evolve(self, trajectories=tuple(trajectories))


def check_flat(group: Group) -> None:
    """Raise Refused for a group that is a tree. Call this where sessions are compared with the mean of their
    group.
    """
    if group.tree:
        raise Refused(
            f"group {group.group_id} is a tree (group.fork): a fork is compared with the sessions of its"
            " state, not with the whole group: use tree_rows_of(forests_of(groups))"
        )


# ── usable members ────────────────────────────────────────────────────────────────────────────────

# The boundaries whose faults are the machine's. `journal` is not among them, because its writer retries.
# Neither is `laws` (violated invariants), because the same tokens would violate them again.
MACHINE: Final = frozenset({"runtime", "engine", "node"})
STALE_REASON: Final = "stale"  # the first word of the reason of a member that is too far behind
# The first words of the reason of a session that was ended because its group had enough.
EARLY_STOP_REASON: Final = "early stop"
# The first words of the reason of a tree's fork that never began because its root has no state to fork.
NOT_FORKED_REASON: Final = "not forked"


DEFAULT_GROUP_SPEC: Final = GroupSpec()


@frozen(kw_only=True)
class SessionFacts:
    """Facts of a finished session. `trainable_tokens` is None if its journal did not count them."""

    session_id: str
    sample_index: int
    outcome: Outcome
    reward: float | None
    trainable_tokens: int | None = None
    staleness: int | None = None


def facts_of(trajectory: Trajectory) -> SessionFacts:
    """The facts of a session, from its trajectory."""
    return SessionFacts(
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
    return outcome.status == "cancelled" and (outcome.reason or "").startswith(EARLY_STOP_REASON)


def not_forked(outcome: Outcome) -> bool:
    """Whether a session is a tree's fork that never began."""
    return outcome.status == "cancelled" and (outcome.reason or "").startswith(NOT_FORKED_REASON)


def make_member(spec: GroupSpec, facts: SessionFacts) -> Member:
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


def judged(spec: GroupSpec, facts: Iterable[SessionFacts], *, task_id: str, group_id: str) -> Group:
    """The group whose places ended with these sessions."""
    ordered = sorted(facts, key=lambda each: each.sample_index)
    members = tuple(make_member(spec, each) for each in ordered)
    early = sum(stopped_early(each.outcome) for each in ordered)
    state, reason = _state(spec, members, early)
    return Group(
        task_id=task_id, group_id=group_id, state=state, members=members, reason=reason, requires=spec
    )


def with_rewards(group: Group, rewards: Iterable[RewardEvent], spec: GroupSpec = DEFAULT_GROUP_SPEC) -> Group:
    """The group with the last reward that later evaluations gave to each of its sessions. Its members, its
    trajectories' traces and turns, and its state are as if that had been the first reward. `spec` is what its
    task requires of a group.

    A failed evaluation changes nothing. Rewards of other groups' sessions are left out.
    """
    given = [each for each in rewards if each.reward is not None]
    last = {each.session_id: each for each in sorted(given, key=lambda each: each.n)}
    known = {each.session_id: facts_of(each) for each in group.trajectories}
    members = tuple(
        _rescore_member(spec, member, known.get(member.session_id), last.get(member.session_id))
        for member in group.members
    )
    early = sum(member.why == EARLY_STOP_REASON for member in members)
    state, reason = _state(spec, members, early)
    trajectories = (_replace_reward(each, last.get(each.session_id)) for each in group.trajectories)
    return evolve(group, members=members, state=state, reason=reason, trajectories=tuple(trajectories))


def _rescore_member(
    spec: GroupSpec, member: Member, facts: SessionFacts | None, given: RewardEvent | None
) -> Member:
    if given is None:
        return member
    facts = facts or SessionFacts(
        session_id=member.session_id,
        sample_index=member.sample_index,
        outcome=Outcome(status=member.status),
        reward=None,
        staleness=member.staleness,
    )
    return make_member(spec, evolve(facts, reward=given.reward))


def _replace_reward(trajectory: Trajectory, given: RewardEvent | None) -> Trajectory:
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


def _is_stale(spec: GroupSpec, facts: SessionFacts) -> bool:
    return (
        spec.max_staleness is not None
        and facts.staleness is not None
        and facts.staleness > spec.max_staleness
    )


def _why_not(spec: GroupSpec, facts: SessionFacts) -> str | None:
    """The reason why a session is unusable; None if it is usable. Reasons are counted by their first words,
    so each begins with words of its own, followed by a colon where there is more.
    """
    if stopped_early(facts.outcome):
        return EARLY_STOP_REASON
    if not_forked(facts.outcome):
        return NOT_FORKED_REASON
    if lost_to_the_machine(facts.outcome):
        return f"lost to the machine: {facts.outcome.boundary or 'node'}"
    if facts.reward is None:
        return f"no reward: {facts.outcome.status}"
    if facts.trainable_tokens == 0:
        return "no trainable token"
    if _is_stale(spec, facts) and spec.stale == "drop":
        return _stale_reason(spec, facts.staleness)
    return None


def _stale_reason(spec: GroupSpec, staleness: int | None) -> str:
    return f"{STALE_REASON}: {staleness} weight updates behind, {spec.max_staleness} are allowed"


def _state(spec: GroupSpec, members: Sequence[Member], early: int) -> tuple[GroupState, str | None]:
    usable = [member.reward for member in members if member.usable]
    counted = f"{len(usable)} of {len(members)} sessions are usable"
    missing = _missing(members)
    if len(usable) < spec.min_usable:
        return "dropped", f"too few: {counted}, {spec.min_usable} are wanted ({missing})"
    if spec.drop_uniform_reward and len(set(usable)) == 1:
        return "dropped", f"uniform reward: {counted}, each with {usable[0]:g}"
    if early:
        return "early", f"{EARLY_STOP_REASON}: {counted} ({missing})"
    return ("partial", f"some are missing: {counted} ({missing})") if missing else ("complete", None)


def _missing(members: Sequence[Member]) -> str:
    """How many members are unusable, by the words with which their reasons begin."""
    words = Counter(member.why.partition(":")[0] for member in members if member.why is not None)
    return ", ".join(f"{count} {word}" for word, count in words.items())


# ── staleness ─────────────────────────────────────────────────────────────────────────────────────


def stamp_staleness(trajectory: Trajectory, history: Sequence[str]) -> Trajectory:
    """The trajectory of a session that has just ended, with its staleness. `history` are the versions that
    were served, the oldest first; the last is served now.
    """
    return evolve(trajectory, staleness=updates_behind(trajectory, history))


def updates_behind(trajectory: Trajectory, history: Sequence[str]) -> int | None:
    """The number of weight updates between the session's oldest sampled token and the last version of
    `history`. None if no token's version is in `history`, or one is unknown. Tokens that a fork inherited
    were sampled in its parent, and count only there.

    If a version was served more than once, the last time counts, because a rollback made its tokens fresh
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
    """The group as it is when it is delivered, judged as if it had ended now. Its members have their present
    staleness, and those that its task's `max_staleness` forbids are unusable or marked.

    `histories` are the versions that the node served of its weights and of each adapter, the oldest first. A
    member without a trajectory, or whose versions are in none of them, stays as it is. No member becomes
    fresher.
    """
    spec = group.requires
    if spec is None or spec.max_staleness is None:
        return group
    known = [tuple(each) for each in histories]
    held = {each.session_id: each for each in group.trajectories}
    members = tuple(_age_member(spec, member, held.get(member.session_id), known) for member in group.members)
    if [each.usable for each in members] == [each.usable for each in group.members]:
        return evolve(group, members=members)
    early = sum(member.why == EARLY_STOP_REASON for member in members)
    state, reason = _state(spec, members, early)
    if group.state == "dropped":
        state, reason = group.state, group.reason
    return evolve(group, members=members, state=state, reason=reason)


def _age_member(
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
    return evolve(found, usable=False, why=_stale_reason(spec, age))


def _trained_behind(trajectory: Trajectory, history: Sequence[str]) -> int | None:
    """Like `updates_behind`, but from the rows of a session, because a reader of groups does not have its
    turns.
    """
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
    """The body of the `group` event. Trajectories have events of their own."""
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
    """The group in an event's body, with those of `trajectories` that belong to its members. Raises Refused,
    with a path, for any other body.
    """
    shape = structure(value, GroupShape)
    places = {each.session_id: each.sample_index for each in shape.sessions}
    ours = {each.session_id: each for each in trajectories if each.session_id in places}
    group = _old_journal_group(shape) if shape.state is None else _group(shape, shape.state)
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


def _old_journal_group(shape: GroupShape) -> Group:
    """The group of an event before journal version 4. Such events have statuses and rewards only, and are
    judged by those and a task's defaults.
    """
    facts = (
        SessionFacts(
            session_id=each.session_id,
            sample_index=each.sample_index,
            outcome=Outcome(status=each.status),
            reward=each.reward,
        )
        for each in shape.sessions
    )
    return judged(GroupSpec(), facts, task_id=shape.task_id, group_id=shape.group_id)
