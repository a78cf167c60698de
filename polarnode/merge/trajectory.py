"""Assemble a session's turns, outcome and verdict into a checked trajectory.

Pure; this is the last step before the journal. A trajectory that violates an invariant is published without
traces, as an error with the numbers. So a bug of polarnode never becomes a gradient, and the turns are kept
for inspection.
"""

from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import InvariantViolated, PolarnodeError, Refused, boundary
from polarnode.core.task import BuilderSpec, TaskSpec
from polarnode.core.trajectory import (
    Built,
    ContinuedFrom,
    Damaged,
    ForkedFrom,
    LeftOut,
    Outcome,
    Timing,
    Trajectory,
    Turn,
    Verdict,
    rewarded,
    without_damaged,
)
from polarnode.merge.builders import build
from polarnode.merge.figures import lineage_figures
from polarnode.merge.invariants import check, check_lengths
from polarnode.merge.selection import INHERITED_REASON, read_settings


@frozen(kw_only=True)
class Identity:
    """The session of a trajectory, and what produced it."""

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    harness: str
    harness_version: str | None
    model: str
    node: str
    attempt: int = 0
    # Set for a fork. While the fork runs, `got` is the number of turns that it may inherit: its turns with a
    # lower index are inherited.
    forked_from: ForkedFrom | None = None
    # set for a session that continues with an earlier attempt's turns
    continued_from: ContinuedFrom | None = None

    def inherited_fork(self, turns: Sequence[Turn]) -> ForkedFrom | None:
        """What the session inherited, given the turns with which it ended. None if it is no fork."""
        fork = self.forked_from
        if fork is None:
            return None
        got = max((turn.index + 1 for turn in turns if turn.index < fork.got), default=0)
        over = f"the session ended before its turn {got} was asked for"
        return evolve(fork, got=got, differs=fork.differs or (over if got < fork.turn else None))


def requested_fork(spec: TaskSpec | None) -> ForkedFrom | None:
    """What a session of this task may inherit when it begins. None if it is no fork."""
    fork = None if spec is None else spec.fork
    if fork is None:
        return None
    return ForkedFrom(session_id=fork.session, turn=fork.turn, got=fork.turn, by=fork.by)


@frozen(kw_only=True)
class Result:
    """The results of a session besides its turns."""

    outcome: Outcome
    verdict: Verdict | None = None
    timing: Timing = field(factory=Timing)
    metrics: Mapping[str, Json] = field(factory=dict)
    retried_as: str | None = None


def assemble(
    identity: Identity,
    spec: TaskSpec,
    turns: Sequence[Turn],
    result: Result,
    *,
    allowed_imports: tuple[str, ...] = (),
    damaged: tuple[Damaged, ...] = (),
) -> Trajectory:
    """The trajectory of one session. `damaged` names what is missing from it. Turns that extend a missing one
    are kept, but left out of the traces. A builder that fails or a violated invariant costs the traces, not
    the record.
    """
    if damaged:
        rooted = _rooted_turns(turns)
        whole = assemble(identity, spec, rooted, result, allowed_imports=allowed_imports)
        return without_damaged(whole, turns, damaged)
    whose = InvariantViolated if spec.builder.import_path is None else Refused
    try:
        with boundary(whose, f"the builder {spec.builder.import_path or spec.builder.name!r} made no traces"):
            inherited = _inherited_count(identity, turns)
            built = build(spec.builder, turns, inherited=inherited, allowed_imports=allowed_imports)
            counts = _counts(spec.builder, turns, built, inherited)
            return _trajectory(identity, spec, turns, result, built=built, counts=counts)
    except PolarnodeError as error:
        outcome = evolve(result.outcome, status="error", boundary=error.boundary, reason=str(error))
        return without_traces(identity, spec, turns, evolve(result, outcome=outcome))


def _rooted_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of which all ancestors are there."""
    found: dict[int, Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        if turn.parent is None or turn.parent in found:
            found[turn.index] = turn
    return list(found.values())


def without_traces(identity: Identity, spec: TaskSpec, turns: Sequence[Turn], result: Result) -> Trajectory:
    """A trajectory without traces: every turn is there, and is left out for the reason that the outcome
    names.
    """
    reason = result.outcome.boundary or result.outcome.status
    inherited = _inherited_count(identity, turns)
    left_out = tuple(
        LeftOut(turn=turn.index, reason=INHERITED_REASON if turn.index < inherited else reason)
        for turn in turns
    )
    return _trajectory(identity, spec, turns, result, built=Built(traces=(), left_out=left_out), counts={})


def _inherited_count(identity: Identity, turns: Sequence[Turn]) -> int:
    began = identity.inherited_fork(turns)
    return 0 if began is None else began.got


def _counts(spec: BuilderSpec, turns: Sequence[Turn], built: Built, inherited: int) -> dict[str, Json]:
    train_failed = spec.config.get("train_failed") is True
    counted = check(turns, built, train_failed=train_failed, inherited=inherited)
    if spec.import_path is None:
        check_lengths(built.traces, read_settings(spec.config).max_row_tokens)
    return {
        "sampled_tokens": counted.sampled,
        "trainable_tokens": counted.trainable,
        "turns": counted.turns,
        "traces": counted.traces,
    }


def _trajectory(
    identity: Identity,
    spec: TaskSpec,
    turns: Sequence[Turn],
    result: Result,
    *,
    built: Built,
    counts: Mapping[str, Json],
) -> Trajectory:
    verdict, inherited = result.verdict, _inherited_count(identity, turns)
    evaluation: dict[str, Json] = (
        {"evaluation": dict(verdict.metrics)} if verdict is not None and verdict.metrics else {}
    )
    return Trajectory(
        session_id=identity.session_id,
        task_id=identity.task_id,
        group_id=identity.group_id,
        sample_index=identity.sample_index,
        outcome=result.outcome,
        reward=None if verdict is None else verdict.reward,
        traces=built.traces if verdict is None else tuple(rewarded(trace, verdict) for trace in built.traces),
        turns=tuple(turns),
        left_out=built.left_out,
        metrics={
            **counts,
            **result.metrics,
            **evaluation,
            "lineage": lineage_figures(
                [turn for turn in turns if turn.index >= inherited],
                [each for each in built.left_out if each.turn >= inherited],
                thinking=spec.thinking,
            ),
        },
        timing=result.timing,
        harness=identity.harness,
        harness_version=identity.harness_version,
        model=identity.model,
        node=identity.node,
        metadata=spec.metadata,
        attempt=identity.attempt,
        retried_as=result.retried_as,
        forked_from=identity.inherited_fork(turns),
        continued_from=identity.continued_from,
    )


def violated_invariant(trajectory: Trajectory) -> str | None:
    """The invariant that a published trajectory violated, with its numbers, or None."""
    return trajectory.outcome.reason if trajectory.outcome.boundary == InvariantViolated.boundary else None
