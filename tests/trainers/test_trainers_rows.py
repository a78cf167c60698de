"""polarnode.trainers.rows: the rows that teach, and what each of their tokens is."""

from typing import Any

import numpy
import pytest
from attrs import evolve
from trainers_kit import group_of, one_row, publish, session_of_two_rows, session_without_rows, taught

from polarnode.core.arrays import floats
from polarnode.core.errors import Refused
from polarnode.core.trajectory import ForkedFrom
from polarnode.trainers import FORMATS, of_roles, project
from polarnode.trainers.rows import (
    Absent,
    as_arrays,
    only_row,
    padded,
    predicted,
    routed,
    rows_of,
    sessions,
    stretches,
    teachers,
    temperatures,
    top_logprobs,
    version_array,
    version_number,
    versions_of,  # fmt: skip
)
from polarnode.trainers.skyrl import generator_output
from polarnode.trainers.slime import group_samples
from polarnode.trainers.trl import rollout_members


def test_row_matches_its_trace() -> None:
    [row] = rows_of(one_row())
    assert (row.index, row.count, row.last, row.prompt, row.reward) == (0, 1, True, 3, 1.0)
    assert row.tokens.tolist() == [10, 11, 12, 20, 21, 13, 14, 22, 23, 24]
    assert row.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert row.logprobs.tolist() == [0, 0, 0, -0.5, -0.625, 0, 0, -1.5, -1.625, -1.75]
    assert [turn.index for turn in row.turns] == [0, 1]
    assert versions_of(row) == ("7", "7", "8")
    assert version_array(row, int).tolist() == [-1, -1, -1, 7, 7, -1, -1, 7, 8, 8]
    assert temperatures(row, None).tolist() == [1, 1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5]
    experts, likely = routed(row), top_logprobs(row)
    assert experts is not None
    assert likely is not None
    assert experts.shape == (9, 2, 3)
    assert experts[:, 0, 0].tolist() == list(range(9))
    assert (likely[0].shape, likely[1].shape) == ((5, 2), (5, 2))


def test_missing_values_are_refused_with_remedy() -> None:
    [row] = rows_of(evolve(one_row(), turns=()))
    assert row.turns == ()
    with pytest.raises(Refused, match="read it with turns=full, or pass temperature="):
        temperatures(row, None)
    assert temperatures(row, 0.25).tolist() == [1, 1, 1, 0.25, 0.25, 1, 1, 0.25, 0.25, 0.25]
    with pytest.raises(Refused, match="'step-3' is no whole number"):
        version_number("step-3")
    [bare] = rows_of(evolve(one_row(), traces=(evolve(one_row().traces[0], version_spans=()),)))
    with pytest.raises(Refused, match="without a weight version"):
        version_array(bare, int)


def test_teacher_logprobs_for_all_or_none() -> None:
    plain, [row] = rows_of(session_of_two_rows()), rows_of(taught(one_row()))
    assert row.teacher.tolist() == [0, 0, 0, -0.25, -0.375, 0, 0, -1.25, -1.375, -1.5]
    assert predicted(row.teacher).tolist() == [0, 0, -0.25, -0.375, 0, 0, -1.25, -1.375, -1.5, 0]
    assert teachers(plain) is None
    assert teachers([]) is None
    assert len(teachers(rows_of(taught(session_of_two_rows()))) or ()) == 2
    with pytest.raises(
        Refused, match=r"row 0 of session s0 .* \(its task requested none\): set carry.teacher"
    ):
        teachers([row, *plain])
    down = evolve(
        session_of_two_rows().traces[0],
        missing_extras=("routed_experts of turn 0", "teacher big: it is down"),
    )
    with pytest.raises(Refused, match=r"no teacher's logprobs \(teacher big: it is down\)"):
        _ = rows_of(evolve(session_of_two_rows(), traces=(down,)))[0].teacher


def test_single_row_needs_exactly_one() -> None:
    """A session with several rows, or none, is refused where one row is wanted."""
    assert rows_of(session_without_rows()) == ()
    for some in (session_without_rows(), session_of_two_rows()):
        with pytest.raises(Refused, match="rows and this format takes one a session"):
            only_row(some)
    assert [row.last for row in rows_of(session_of_two_rows())] == [False, True]
    assert only_row(one_row()).count == 1
    assert of_roles(session_of_two_rows(), "main").traces == session_of_two_rows().traces
    assert of_roles(session_of_two_rows(), "compaction").traces == ()


def test_trace_without_training_is_no_row() -> None:
    """A builder of one's own may make such; the rows beside it are counted without it."""
    first, second = session_of_two_rows().traces
    untrained = evolve(
        first, loss_mask=bytes(len(first.loss_mask)), logprobs=floats([0.0] * len(first.loss_mask))
    )
    [row] = rows_of(evolve(session_of_two_rows(), traces=(untrained, second)))
    assert (row.trace, row.index, row.count) == (second, 0, 1)


def test_context_sample_has_no_version() -> None:
    """As `per_request` makes rows: the first sample stands before the second one and is not trained there."""
    [_, row] = rows_of(publish(one_row().turns, builder="per_request"))
    assert row.mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert versions_of(row) == ("7", "8")
    assert version_array(row, int).tolist() == [-1] * 7 + [7, 8, 8]
    assert temperatures(row, None).tolist() == [1.0] * 7 + [0.5] * 3
    # half a sample, as a builder may
    part = evolve(row.trace, loss_mask=bytes([0] * 8 + [1, 1]), logprobs=floats([0.0] * 8 + [-1.0, -1.0]))
    [half] = rows_of(evolve(row.trajectory, traces=(part,)))
    assert temperatures(half, None).tolist() == [1.0] * 8 + [0.5] * 2
    assert version_array(half, int).tolist() == [-1] * 8 + [8, 8]


def test_group_gives_usable_sessions() -> None:
    kept, lost = one_row(), session_without_rows(sample_index=1)
    assert sessions(group_of(kept, lost=[lost])) == (kept,)
    assert sessions([kept, lost]) == (kept, lost)


def test_no_format_flattens_a_tree() -> None:
    root = one_row()
    fork = evolve(
        one_row(sample_index=1),
        session_id="fork",
        forked_from=ForkedFrom(session_id=root.session_id, turn=1, got=1, by="replay"),
    )
    refused = "group .* is a tree"
    tree, elsewhere = group_of(root, fork), group_of(fork)
    with pytest.raises(Refused, match=refused):
        sessions(tree)
    with pytest.raises(Refused, match=refused):
        group_samples(tree, group_index=0)
    with pytest.raises(Refused, match=refused):
        generator_output(tree)
    with pytest.raises(Refused, match=refused):
        rollout_members(tree, absent=Absent(token_id=0))
    assert sessions(tree.usable) == (root, fork)
    assert sessions(elsewhere) == (fork,), "forks of another task's session have one state"


def test_arrays_in_requested_type() -> None:
    import torch

    value: Any = {"a": numpy.arange(3), "b": [{"c": numpy.ones(1, dtype=numpy.float32)}], "d": "text"}
    assert as_arrays(value, "list") == {"a": [0, 1, 2], "b": [{"c": [1.0]}], "d": "text"}
    assert as_arrays(value, "numpy")["a"] is value["a"]
    assert torch.equal(as_arrays(value, "torch")["b"][0]["c"], torch.ones(1))
    native = as_arrays(value, "native", {"b": "torch"})
    assert native["a"] == [0, 1, 2]
    assert isinstance(native["b"][0]["c"], torch.Tensor)


def test_stretches_and_padding() -> None:
    assert list(stretches(numpy.array([0, 0, 1, 1, 0]))) == [(0, 2, 0), (2, 4, 1), (4, 5, 0)]
    assert list(stretches(numpy.array([], dtype=int))) == []
    assert padded(numpy.ones((1, 2)), 2).tolist() == [[1, 1], [0, 0]]


def test_unknown_format_lists_known_names() -> None:
    with pytest.raises(Refused, match="format must be one of verl, slime, miles, trl") as refused:
        project("trlx", one_row())
    assert refused.value.path == "?format"
    assert all(each.what for each in FORMATS.values())
