"""Advantages and weighted training rows of trees: sessions, their forks, and forks of those.

Pure. A leaf is a usable session with its whole path: the turns that it inherited and its own. The leaves
through a turn are those whose paths have it. A forest is all leaves of one problem, in as many trees as
sessions began without a fork. A turn's advantage is the mean, over the leaves through it, of each leaf's
advantage among the leaves with which it is compared; `TreeCredit` says which. Only the session that sampled a
turn trains it.

Invariants: it changes no token's advantage or weight which continuation of a state is called the session and
which its fork (where no lineage has a reward of its own); every trained token has one weight; sessions
without forks have exactly the rows of `rows_of`.

Sources. `segment`: Zheng, Wang, Xu, "RTMC" (arXiv 2604.11037), A(s, a) = Q(s, a) - V(s) with both as means of
returns, without its prior; the action is all turns from one branching state to the next, since every turn
between them has Q = V. Values by continuations of a state: Kazemnejad et al., "VinePPO" (arXiv 2410.01679).
`all_leaves`: Hou et al., "TreeRL" (arXiv 2506.11902), its global advantage V(s) - V(root), as its code takes
it: leaves are normalised, then averaged up the tree. `tree_grpo`: Ji et al., "Tree-GRPO" (arXiv 2509.21240),
the sum of a leaf's advantages among its tree and among all trees, averaged where leaves share a turn.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum
from typing import Literal, assert_never

from attrs import define, field

from polarnode.core.errors import Refused
from polarnode.core.trajectory import ForkedFrom, Trace, Trajectory
from polarnode.groups.group import Group
from polarnode.groups.training_rows import (
    Estimator,
    LossMean,
    Row,
    Scale,
    check_length,
    scales,
)

# The leaves with which a leaf is compared, for one of its turns. "segment": the leaves of the state in which
# the turn's unbranched run began. "all_leaves": the leaves of the forest. "tree_grpo": the leaves of the
# forest, and those of its tree.
TreeCredit = Literal["segment", "all_leaves", "tree_grpo"]


def forests_of(groups: Iterable[Group]) -> tuple[tuple[Group, ...], ...]:
    """The groups of a batch as forests. Groups of forks are together with those of the sessions that they
    fork. Forests are in the order of their first groups.
    """
    forests: list[tuple[set[str], list[Group]]] = []
    for group in groups:
        names = {member.session_id for member in group.members}
        names |= {each.forked_from.session_id for each in group.trajectories if each.forked_from is not None}
        joined = [forest for forest in forests if not forest[0].isdisjoint(names)]
        if not joined:
            forests.append((names, [group]))
            continue
        first, *others = joined
        for other in others:
            first[1].extend(other[1])
            first[0].update(other[0])
            forests.remove(other)
        first[1].append(group)
        first[0].update(names)
    return tuple(tuple(found) for _, found in forests)


def tree_rows_of(
    forests: Iterable[Sequence[Group]],
    *,
    credit: TreeCredit = "segment",
    estimator: Estimator = "leave_one_out",
    loss: LossMean = "token_mean",
    length: int | None = None,
) -> tuple[Row, ...]:
    """The training rows of a batch of forests, each the groups of one problem (`forests_of`), without dropped
    groups. `estimator`, `loss` and `length` are those of `rows_of`.

    A row's turns may differ in advantage and weight, so use `row.advantages` and `row.weights`. With
    `session_mean` all leaves have equal weight, each as the mean over the trained tokens of its whole path. A
    turn that leaves share has the sum of its weights in each. Raises Refused if a fork's ancestry is a
    circle.
    """
    batch = [_Forest.of(groups) for groups in forests]
    weights = _TurnWeights.of(batch, loss, length)
    return tuple(row for forest in batch for row in _rows(forest, credit, estimator, weights))


# ── leaves ────────────────────────────────────────────────────────────────────────────────────────


@define(eq=False)
class _Forest:
    """The leaves of one problem. `rewards` are those of the leaves, and `sessions` the sessions at hand.
    `forks` are the states in which sessions began that inherited a turn. `boundaries` are the turns at which
    the leaves through a turn may change.
    """

    rewards: Mapping[str, float]
    sessions: Sequence[Trajectory]
    forks: Mapping[str, ForkedFrom]
    boundaries: tuple[int, ...]
    _scales: dict[tuple[frozenset[str], Estimator], Mapping[str, Scale]] = field(factory=dict, init=False)

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "_Forest":
        kept = [group for group in groups if group.state != "dropped"]
        members = [member for group in kept for member in group.members]
        # Sessions that are not usable are included, because a usable fork may have begun in one.
        known = [each for group in groups for each in group.trajectories]
        forks = {
            each.session_id: each.forked_from
            for each in known
            if each.forked_from is not None and each.forked_from.got > 0
        }
        for session_id in forks:
            _check_ancestry(session_id, forks)
        return cls(
            rewards={
                member.session_id: member.reward
                for member in members
                if member.usable and member.reward is not None
            },
            sessions=[each for group in kept for each in group.usable],
            forks=forks,
            boundaries=tuple(sorted({0, *(fork.got for fork in forks.values())})),
        )

    @property
    def leaves(self) -> frozenset[str]:
        return frozenset(self.rewards)

    def owner(self, session_id: str, turn: int) -> str:
        """The session that sampled this turn of a session's path."""
        fork = self.forks.get(session_id)
        while fork is not None and turn < fork.got:
            session_id = fork.session_id
            fork = self.forks.get(session_id)
        return session_id

    def through(self, session_id: str, turn: int) -> frozenset[str]:
        """The leaves whose paths have this turn."""
        owner = self.owner(session_id, turn)
        return frozenset(leaf for leaf in self.rewards if self.owner(leaf, turn) == owner)

    def compared(self, session_id: str, turn: int, credit: TreeCredit) -> Iterator[frozenset[str]]:
        """The sets of leaves among which the leaves through this turn have their advantages."""
        match credit:
            case "segment":
                yield self._state(session_id, turn)
            case "all_leaves":
                yield self.leaves
            case "tree_grpo":
                tree = self.through(session_id, 0)
                yield self.leaves
                if 1 < len(tree) < len(self.leaves):  # A forest of one tree is one comparison, not two.
                    yield tree
            case _:
                assert_never(credit)

    def _state(self, session_id: str, turn: int) -> frozenset[str]:
        """The leaves of the state in which the unbranched run with this turn began."""
        found = before = self.leaves
        for boundary in self.boundaries:
            if boundary > turn:
                break
            through = self.through(session_id, boundary)
            if through != before:
                found, before = before, through
        return found

    def scales(self, leaves: frozenset[str], estimator: Estimator) -> Mapping[str, Scale]:
        key = (leaves, estimator)
        if key not in self._scales:
            ordered = {leaf: reward for leaf, reward in self.rewards.items() if leaf in leaves}
            found = scales(tuple(ordered.values()), estimator)
            self._scales[key] = dict(zip(ordered, found, strict=True))
        return self._scales[key]


def _check_ancestry(session_id: str, forks: Mapping[str, ForkedFrom]) -> None:
    seen, at = {session_id}, session_id
    while at in forks:
        at = forks[at].session_id
        if at in seen:
            raise Refused(
                f"session {session_id} descends from itself: correct forked_from of its trajectories"
            )
        seen.add(at)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def _rows(
    forest: _Forest, credit: TreeCredit, estimator: Estimator, weights: "_TurnWeights"
) -> Iterator[Row]:
    for session in forest.sessions:
        for trace in session.traces:
            trained = _trained(trace)
            if not trained:
                continue
            turns = {
                turn: _turn_advantage(forest, session.session_id, turn, trace.reward, credit, estimator)
                for turn in trained
            }
            weighed = {turn: weights.turn(forest, session.session_id, turn) for turn in trained}
            advantage, own_turns = _joined(turns, trained)
            weight, own_weights = _joined(weighed, trained)
            yield Row(
                session_id=session.session_id,
                trace=trace,
                advantage=advantage,
                weight=weight,
                turns=own_turns,
                turn_weights=own_weights,
            )


def _trained(trace: Trace) -> dict[int, int]:
    """The number of trained tokens of each turn of a trace that has some."""
    counts = {span.turn: trace.loss_mask[span.start : span.end].count(1) for span in trace.turn_spans}
    return {turn: count for turn, count in counts.items() if count}


def _joined(values: Mapping[int, float], trained: Mapping[int, int]) -> tuple[float, Mapping[int, float]]:
    """The value that all turns have, or the mean over their tokens together with each turn's own value."""
    if len(set(values.values())) == 1:
        return next(iter(values.values())), {}
    total = fsum(values[turn] * count for turn, count in trained.items())
    return total / sum(trained.values()), values


def _turn_advantage(
    forest: _Forest,
    session_id: str,
    turn: int,
    own: float | None,
    credit: TreeCredit,
    estimator: Estimator,
) -> float:
    """The advantage of a turn that the session sampled. `own` is the reward of its row, if it has one, and
    replaces the reward of this leaf alone.
    """
    leaves = forest.through(session_id, turn)
    rewards = {leaf: forest.rewards[leaf] for leaf in leaves}
    lineage = own is not None and own != rewards[session_id]
    if own is not None:
        rewards[session_id] = own
    found = 0.0
    for compared in forest.compared(session_id, turn, credit):
        if compared == leaves and not lineage:
            continue  # The advantages of a whole set sum to 0, but for rounding.
        scale = forest.scales(compared, estimator)
        found += fsum(scale[leaf].of(reward) for leaf, reward in rewards.items()) / len(leaves)
    return found


# ── weights ───────────────────────────────────────────────────────────────────────────────────────


@define(eq=False)
class _TurnWeights:
    """The weight of each trained token of a turn. `lengths` are the trained tokens on each leaf's path."""

    loss: LossMean
    length: int
    leaves: int
    tokens: int
    lengths: Mapping[str, int]

    @classmethod
    def of(cls, batch: Sequence[_Forest], loss: LossMean, length: int | None) -> "_TurnWeights":
        check_length(loss, length)
        sessions = [session for forest in batch for session in forest.sessions]
        lengths: dict[str, int] = {}
        for forest in batch:
            trained: dict[str, dict[int, int]] = {}
            for session in forest.sessions:
                counts = trained.setdefault(session.session_id, {})
                for trace in session.traces:
                    for turn, count in _trained(trace).items():
                        counts[turn] = counts.get(turn, 0) + count
            for session in forest.sessions:
                lengths[session.session_id] = _path_length(forest, session.session_id, trained)
        return cls(
            loss=loss,
            length=length or 1,
            leaves=len(sessions),
            tokens=sum(session.trainable_tokens for session in sessions),
            lengths=lengths,
        )

    def turn(self, forest: _Forest, session_id: str, turn: int) -> float:
        if self.loss == "token_mean":
            return 1 / max(self.tokens, 1)
        # Only leaves at hand count, because others have no tokens in this batch.
        through = [leaf for leaf in forest.through(session_id, turn) if leaf in self.lengths]
        if self.loss == "fixed_length":
            return len(through) / (self.leaves * self.length)
        return fsum(1 / (self.leaves * self.lengths[leaf]) for leaf in sorted(through))


def _path_length(forest: _Forest, leaf: str, trained: Mapping[str, Mapping[int, int]]) -> int:
    """The number of trained tokens on a leaf's path: its own, and those that it inherited, as the sessions
    that train them count them.
    """
    total, session_id, below = sum(trained[leaf].values()), leaf, None
    while (fork := forest.forks.get(session_id)) is not None:
        below = fork.got if below is None else min(below, fork.got)
        session_id = fork.session_id
        total += sum(count for turn, count in trained.get(session_id, {}).items() if turn < below)
    return total
