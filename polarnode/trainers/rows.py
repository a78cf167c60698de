"""The rows of a session that train tokens, and the arrays from which every format is made.

A format reorders and renames the arrays of a trace. Invariant: if the trajectory lacks a number, the
projection is refused with the remedy; no number is invented. Arrays stay numpy until `as_arrays` converts
them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy
from attrs import evolve, frozen

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trace, Trajectory, Turn, TurnRole, TurnSpan
from polarnode.groups.group import Group, check_flat

# The kind of the arrays returned: lists (the default, fit for JSON), numpy, torch, or for each field the kind
# that the trainer documents.
Arrays = Literal["list", "numpy", "torch", "native"]
# The fields that a trainer documents as arrays, with their kind; all other fields are lists.
NativeKinds = Mapping[str, Literal["numpy", "torch"]]
Array = numpy.ndarray[Any, Any]
Number = Callable[[str], int]  # converts a weight version to the whole number that a trainer counts

UNSAMPLED_VERSION: Final = -1  # the version of a token that was not sampled, as AReaL writes it


@frozen(kw_only=True)
class TrainedRow:
    """A trace with trained tokens: row `index` of the `count` rows of its session."""

    trajectory: Trajectory
    trace: Trace
    index: int
    count: int

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    @property
    def name(self) -> str:
        """The row's name in error messages."""
        return f"row {self.index} of session {self.trajectory.session_id}"

    @property
    def reward(self) -> float | None:
        """The reward of its lineage, or the session's if the lineage has none."""
        return self.trajectory.reward if self.trace.reward is None else self.trace.reward

    @property
    def truncated(self) -> bool:
        """Whether a budget ended its session (of turns, tokens or time, or of turns that repeat), or a limit
        cut its last answer. Trainers that leave truncated samples out mask these rows, whatever they call it.
        The last token says nothing about it: a session may end between two whole answers.
        """
        return self.trajectory.outcome.status == "timeout" or self.trace.finish_reason == "length"

    @property
    def tokens(self) -> Array:
        """int32[T]."""
        return numpy.frombuffer(self.trace.token_ids, dtype=numpy.int32)

    @property
    def mask(self) -> Array:
        """uint8[T], 1 where trained."""
        return numpy.frombuffer(self.trace.loss_mask, dtype=numpy.uint8)

    @property
    def logprobs(self) -> Array:
        """float32[T], 0 where the mask is 0."""
        return numpy.frombuffer(self.trace.logprobs, dtype=numpy.float32)

    @property
    def teacher(self) -> Array:
        """float32[T]: the logprobs of its teacher, 0 where the mask is 0. Raises Refused if it has none."""
        found = self.trace.teacher_logprobs
        if found is None:
            why = "; ".join(each for each in self.trace.missing_extras if "teacher" in each)
            raise Refused(
                f"{self.name} has no teacher's logprobs ({why or 'its task requested none'}): set"
                " carry.teacher in every task of a batch, and leave sessions without them out"
            )
        return numpy.frombuffer(found, dtype=numpy.float32)

    @property
    def prompt(self) -> int:
        """The number of tokens before the first answer; none of them is trained."""
        return self.trace.prompt_length

    @property
    def trained_spans(self) -> tuple[TurnSpan, ...]:
        """The spans with at least one trained token."""
        return tuple(
            span for span in self.trace.turn_spans if self.trace.loss_mask.find(1, span.start, span.end) >= 0
        )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns whose samples the row trains, as far as they were read: a trajectory read with
        `turns=table` has none.
        """
        by_index = {turn.index: turn for turn in self.trajectory.turns}
        return tuple(by_index[span.turn] for span in self.trained_spans if span.turn in by_index)


@frozen(kw_only=True)
class Absent:
    """A placeholder for a session without a row, where a format needs one for each: one untrained token and
    its reward.
    """

    token_id: int
    reward: float | None = None


def rows_of(trajectory: Trajectory) -> tuple[TrainedRow, ...]:
    """The rows of a session that train a token, in order. Empty if the session ended before it sampled."""
    teaching = [trace for trace in trajectory.traces if 1 in trace.loss_mask]
    return tuple(
        TrainedRow(trajectory=trajectory, trace=trace, index=index, count=len(teaching))
        for index, trace in enumerate(teaching)
    )


def of_roles(trajectory: Trajectory, *roles: TurnRole) -> Trajectory:
    """The trajectory with only the traces of these roles: for a format with one row per session, or a trainer
    that leaves compactions out.
    """
    return evolve(trajectory, traces=tuple(trace for trace in trajectory.traces if trace.role in roles))


def sessions(source: Group | Iterable[Trajectory]) -> tuple[Trajectory, ...]:
    """The trajectories to project: the usable ones of a group, or all of an iterable. Raises Refused for a
    group that is a tree.
    """
    if not isinstance(source, Group):
        return tuple(source)
    check_flat(source)
    return source.usable


def alone(group: Group) -> bool:
    """Whether only one session of several is left. There is nothing to compare it with, and a trainer that
    takes 0 as its baseline would train its reward as it is.
    """
    return len(group.members) > 1 and len(group.usable) == 1


def only_row(trajectory: Trajectory) -> TrainedRow:
    """The single row of a session, for formats with one row per session. Raises Refused if it has none or
    several.
    """
    found = rows_of(trajectory)
    if len(found) != 1:
        raise Refused(
            f"session {trajectory.session_id} has {len(found)} rows and this format takes one a session: keep"
            " one with polarnode.trainers.rows.of_roles, choose a builder that makes one, or leave the"
            " session out"
        )
    return found[0]


# ── weight versions ────────────────────────────────────────────────────────────


def version_number(version: str) -> int:
    """Convert a version that is a whole number in digits. Raises Refused for any other version: pass your own
    conversion as `number`.
    """
    if not (version.isascii() and version.isdigit()):
        raise Refused(
            f"the weight version {version!r} is no whole number, which this format counts in: pass number=, a"
            " function of a version"
        )
    return int(version)


def versions_of(row: TrainedRow) -> tuple[str, ...]:
    """The weight versions of the row's trained tokens, one per version span, in order."""
    mask = row.trace.loss_mask
    return tuple(span.version for span in row.trace.version_spans if mask.find(1, span.start, span.end) >= 0)


def version_array(row: TrainedRow, number: Number) -> Array:
    """int64[T]: the version of each trained token, -1 on every other."""
    found = numpy.full(len(row.tokens), UNSAMPLED_VERSION, dtype=numpy.int64)
    for span in row.trace.version_spans:
        found[span.start : span.end] = number(span.version)
    found[row.mask == 0] = UNSAMPLED_VERSION
    if bool((found[row.mask == 1] == UNSAMPLED_VERSION).any()):
        raise Refused(
            f"{row.name} has trained tokens without a weight version, which this format needs for each: it"
            " was not made by this node"
        )
    return found


# ── sampling ───────────────────────────────────────────────────────────────────


def temperatures(row: TrainedRow, temperature: float | None) -> Array:
    """float64[T]: the temperature of each trained token, 1 on every other. `temperature` is used for turns
    that were not read.
    """
    by_turn = {turn.index: turn.used.temperature for turn in row.trajectory.turns}
    found = numpy.ones(len(row.tokens), dtype=numpy.float64)
    for span in row.trained_spans:
        used = by_turn.get(span.turn)
        used = temperature if used is None else used
        if used is None:
            raise Refused(
                f"{row.name} does not say the temperature of turn {span.turn}: read it with turns=full, or"
                " pass temperature="
            )
        found[span.start : span.end] = used
    found[row.mask == 0] = 1.0
    return found


# ── routed experts and top logprobs ────────────────────────────────────────────


def routed(row: TrainedRow) -> Array | None:
    """uint8 or int16 [T - 1, layers, top_k]: the experts of every position but the last. None if they were
    not recorded.
    """
    experts = row.trace.routed
    if experts is None:
        return None
    kind = numpy.dtype("<i2" if experts.dtype == "int16" else "u1")
    return numpy.frombuffer(experts.data, dtype=kind).reshape(-1, experts.layers, experts.top_k)


def padded(values: Array, rows: int) -> Array:
    """`values` with rows of zeros appended, up to `rows` rows."""
    if len(values) == rows:
        return values
    return numpy.concatenate(
        [values, numpy.zeros((rows - len(values), *values.shape[1:]), dtype=values.dtype)]
    )


def top_logprobs(row: TrainedRow) -> tuple[Array, Array] | None:
    """(ids int32[N, k], logprobs float32[N, k]) of the row's N trained tokens, likeliest first. None if they
    were not recorded.
    """
    top = row.trace.top
    if top is None:
        return None
    ids, logprobs = (
        numpy.frombuffer(top.ids, dtype=numpy.int32),
        numpy.frombuffer(top.logprobs, dtype=numpy.float32),
    )
    return ids.reshape(-1, top.k), logprobs.reshape(-1, top.k)


# ── teachers ───────────────────────────────────────────────────────────────────


def teachers(rows: Sequence[TrainedRow]) -> list[Array] | None:
    """The teacher's logprobs of each row; None if no row has them. Raises Refused if only some have them,
    because trainers read them from every row of a batch or from none.
    """
    if all(row.trace.teacher_logprobs is None for row in rows):
        return None
    return [row.teacher for row in rows]


def predicted(values: Array) -> Array:
    """The `values` [T] of tokens, each moved to the position that predicts its token; 0 at the last position.
    Trainers that compare whole sequences of logits use this form.
    """
    return numpy.append(values[1:], values[:1] * 0)


# ── arrays ─────────────────────────────────────────────────────────────────────


def as_arrays(value: Any, arrays: Arrays, native: NativeKinds = MappingProxyType({})) -> Any:
    """`value` with every array converted to the kind `arrays`; for "native", `native` maps field names to
    kinds.
    """
    if isinstance(value, numpy.ndarray):
        return _array(value, "list" if arrays == "native" else arrays)
    if isinstance(value, dict):
        kinds = native if arrays == "native" else {}
        return {name: as_arrays(each, kinds.get(name, arrays), native) for name, each in value.items()}
    if isinstance(value, list):
        return [as_arrays(each, arrays, native) for each in value]
    return value


def _array(value: Array, arrays: Arrays) -> Any:
    if arrays == "list":
        return value.tolist()
    if arrays == "numpy":
        return value
    import torch  # a slow import, needed only for this kind of array

    return torch.from_numpy(numpy.array(value))  # a copy, because torch warns of read-only memory


def stretches(mask: Array) -> Iterator[tuple[int, int, int]]:
    """(start, end, value) of each run of equal values, in order."""
    edges = numpy.flatnonzero(numpy.diff(mask)) + 1
    places = [0, *edges.tolist(), len(mask)]
    for start, end in pairwise(places):
        if end > start:
            yield start, end, int(mask[start])
