"""What is carried beside ids and logprobs: rows of traces from rows of turns, and a session that counts what
it carries.
"""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.task import CarrySpec
from polarnode.core.trajectory import Trace, Turn, TurnSpan, VersionSpan
from polarnode.merge.token_extras import (
    CUT,
    SIZE_LIMIT_REASON,
    CallExtras,
    RowExtras,
    SessionExtras,
    TurnExtras,
    note,
    row_extras,
    row_routed_experts,
    row_top_logprobs,
    turn_extras,
    versions_of,
)

LAYERS, EXPERTS = 3, 2


def experts(start: int, end: int, *, mark: int = 0, **said: Any) -> RoutedExperts:
    """Rows that tell their position: the experts of position p are all p + mark."""
    data = b"".join(bytes([(place + mark) % 256]) * (LAYERS * EXPERTS) for place in range(start, end))
    return RoutedExperts(
        **{"start": start, "layers": LAYERS, "top_k": EXPERTS, "dtype": "uint8", "data": data} | said
    )


def likely(first: int, count: int, k: int = 2) -> TopLogprobs:
    return TopLogprobs(
        k=k,
        ids=ids(range(first, first + count * k)),
        logprobs=floats([-step / 4 for step in range(count * k)]),
    )


def turn(index: int, parent: int | None, delta: int, sampled: int, before: int = 0, **said: Any) -> Turn:
    return Turn(
        session_id="s", index=index, provider="p", lineage=0, parent=parent, kind="root", reason="", prompt_delta=ids(range(delta)),
        prompt_length=before + delta, sampled=ids(range(sampled)), logprobs=floats([-1.0] * sampled), **said,
    )  # fmt: skip


def line(*, routed: bool = True, top: bool = True) -> list[Turn]:
    """Two turns: positions 0..4 and 5..9, sampled 3..4 and 7..9."""
    first = turn(0, None, 3, 2, top=likely(100, 2) if top else None, routed=experts(0, 4) if routed else None)
    second = turn(
        1, 0, 2, 3, before=5, top=likely(200, 3) if top else None, routed=experts(4, 9) if routed else None
    )
    return [first, second]


# ── rows ──────────────────────────────────────────────────────────────────────


def test_row_has_alternatives_and_experts() -> None:
    """A row has alternatives of trained tokens, and experts of all positions but the last."""
    found = row_extras(line(), {0, 1})
    assert found.missing_extras == ()
    assert found.top is not None
    assert found.top.ids.tolist() == [100, 101, 102, 103, 200, 201, 202, 203, 204, 205]
    assert found.top.row(2) == ((200, 0.0), (201, -0.25))
    assert found.routed == experts(0, 9)
    assert row_extras(line(), {1}).top == likely(200, 3)  # the first is context of this row
    assert row_extras(line(routed=False), {0, 1}) == RowExtras(top=found.top)
    assert row_extras(line(routed=False, top=False), {0, 1}) == RowExtras()


def test_turn_without_extras_is_named() -> None:
    """A turn without its rows costs the row its own and is named."""
    whole = line()
    cut = turn(
        0,
        None,
        3,
        2,
        notes=("closed: x", note("routed_experts", CUT), note("top_logprobs", SIZE_LIMIT_REASON)),
    )
    lost = row_extras([cut, whole[1]], {0, 1})
    assert (lost.top, lost.routed) == (None, None)
    assert lost.missing_extras == (
        f"top_logprobs: turn 0 has none: {SIZE_LIMIT_REASON}",
        f"routed_experts: turn 0 has none: {CUT}",
    )
    assert row_extras([cut, whole[1]], {1}).top == whole[1].top  # what is context needs none
    # a session whose engine was not asked for its first turn
    silent = row_extras([turn(0, None, 3, 2), whole[1]], {0, 1})
    assert silent.missing_extras == ("top_logprobs: turn 0 has none", "routed_experts: turn 0 has none")
    apart = row_extras([whole[0], turn(1, 0, 2, 3, before=5, routed=experts(5, 9), top=likely(0, 3))], {0, 1})
    assert (apart.routed, apart.missing_extras) == (
        None,
        ("routed_experts: the rows of its turns do not meet",),
    )


def test_later_turn_fills_missing_experts() -> None:
    """A later turn fills the gaps of a cut one, and never overrules it."""
    cut = turn(0, None, 3, 2, notes=(note("routed_experts", CUT),))
    assert row_routed_experts([cut, turn(1, 0, 2, 3, before=5, routed=experts(0, 9))]) == experts(0, 9)
    twice = [
        turn(0, None, 3, 2, routed=experts(0, 4)),
        turn(1, 0, 2, 3, before=5, routed=experts(0, 9, mark=100)),
    ]
    found = row_routed_experts(twice)
    assert found is not None
    assert found.data == experts(0, 4).data + experts(4, 9, mark=100).data


@pytest.mark.parametrize(
    "changed",
    [
        {"top_k": 3, "data": bytes(45)},
        {"layers": 2, "data": bytes(20)},
        {"dtype": "int16", "data": bytes(60)},
    ],
)
def test_extras_of_other_shape_are_dropped(changed: dict[str, Any]) -> None:
    first, second = line()
    assert row_routed_experts([first, turn(1, 0, 2, 3, before=5, routed=experts(4, 9, **changed))]) is None
    assert second.routed is not None
    assert row_top_logprobs([first, turn(1, 0, 2, 3, before=5, top=likely(0, 3, k=3))], {0, 1}) is None


def test_two_byte_experts_are_twice_wide() -> None:
    wide = RoutedExperts(start=4, layers=2, top_k=2, dtype="int16", data=array("h", range(12)).tobytes())
    assert (wide.width, wide.end) == (8, 7)
    assert array("h", wide.between(5, 6).data).tolist() == [4, 5, 6, 7]
    assert wide.between(0, 99) is wide
    assert wide.between(6, 5).data == b""


@given(st.integers(1, 6), st.integers(0, 5), st.data())
def test_fewer_alternatives_are_row_prefixes(k: int, rows: int, data: st.DataObject) -> None:
    """Fewer alternatives are the first of each row."""
    whole = likely(7, rows, k)
    fewer, until = data.draw(st.integers(1, k)), data.draw(st.integers(0, 7))
    found = whole.narrowed(fewer).until(until)
    assert [found.row(place) for place in range(found.rows)] == [
        whole.row(place)[:fewer] for place in range(min(rows, until))
    ]
    assert found.size == 8 * fewer * min(rows, until)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=8))
def test_carried_rows_have_no_gap(steps: list[tuple[int, int, bool]]) -> None:
    """Whatever turns are cut, and whichever are seen by the row alone: a whole last turn makes the
    row whole.
    """
    carrier, chain, before, parent = SessionExtras(CarrySpec(routed_experts=True), limit=1 << 20), [], 0, None
    for index, (delta, sampled, cut) in enumerate(steps):
        end, start = before + delta + sampled, carrier.carry(parent).routed_from
        assert start is not None
        last = index == len(steps) - 1
        rows = None if cut and not last else experts(start, end - 1)
        chain.append(turn(index, parent, delta, sampled, before=before, routed=rows))
        carrier.add(chain[-1])
        before, parent = end, index
    assert row_routed_experts(chain) == experts(0, before - 1)
    assert carrier.covered(parent) == before - 1


def test_version_of_every_token() -> None:
    spans = (
        VersionSpan(version="7", start=2, end=4),
        VersionSpan(version="8", start=4, end=5),
        VersionSpan(version="7", start=6, end=7),
    )
    trace = Trace(
        lineage=0, token_ids=ids(range(8)), loss_mask=bytes(8), logprobs=floats([0.0] * 8), prompt_length=2, turn_spans=(TurnSpan(turn=0, start=2, end=5),),
        version_spans=spans,
    )  # fmt: skip
    assert versions_of(trace) == (("7", "8"), ids([-1, -1, 0, 0, 1, -1, 0, -1]))


# ── a session ─────────────────────────────────────────────────────────────────


def test_session_without_extras_notes_nothing() -> None:
    carrier = SessionExtras(CarrySpec(), limit=0)
    carrier.add(turn(0, None, 1, 1))
    assert carrier.carry(0) == CallExtras()
    assert carrier.metrics() == {}


def test_experts_start_where_parent_ends() -> None:
    carrier = SessionExtras(CarrySpec(top_logprobs=2, routed_experts=True), limit=1000)
    assert carrier.carry(None) == CallExtras(top_logprobs=2, routed_from=0, room=1000)
    for each in line():
        carrier.add(each)
    spent = 5 * 16 + 9 * LAYERS * EXPERTS
    assert carrier.carry(1) == CallExtras(top_logprobs=2, routed_from=9, room=1000 - spent)
    assert carrier.carry(0).routed_from == 4  # a branch
    assert carrier.carry(None).routed_from == 0
    assert carrier.metrics() == {"carried_bytes": spent, "uncarried_turns": 0}


def test_session_over_limit_notes_missing_extras() -> None:
    carrier = SessionExtras(CarrySpec(top_logprobs=2, routed_experts=True), limit=60)
    carrier.add(line()[0])
    assert carrier.carry(0).room == 60 - 56
    carrier.add(line()[1])
    asked = carrier.carry(1)
    assert (asked.top_logprobs, asked.routed_from) == (0, None)
    assert asked.notes == (
        f"not carried: top_logprobs: {SIZE_LIMIT_REASON}",
        f"not carried: routed_experts: {SIZE_LIMIT_REASON}",
    )
    carrier.add(turn(2, 1, 1, 1, before=10, notes=asked.notes))
    assert carrier.metrics()["uncarried_turns"] == 1


# ── a turn ────────────────────────────────────────────────────────────────────


def test_turn_holds_the_engines_extras() -> None:
    carry = CallExtras(top_logprobs=2, routed_from=0, room=100)
    whole = turn_extras(carry, sampled=2, top=[likely(0, 1), likely(2, 1)], routed=experts(0, 4))
    assert whole.top is not None
    assert whole.top.ids.tolist() == [0, 1, 2, 3]
    assert (whole.routed, whole.notes) == (experts(0, 4), ())
    assert turn_extras(carry, sampled=0, top=[], routed=None) == TurnExtras()
    assert turn_extras(CallExtras(), sampled=2, top=[], routed=None) == TurnExtras()


def test_turn_notes_missing_extras() -> None:
    carry = CallExtras(top_logprobs=2, routed_from=0, room=100)
    assert turn_extras(carry, sampled=2, top=[likely(0, 2)], routed=None) == TurnExtras(
        top=likely(0, 2), notes=(note("routed_experts", CUT),)
    )
    short = turn_extras(carry, sampled=2, top=[likely(0, 1)], routed=experts(0, 4))
    assert (short.top, short.routed) == (None, experts(0, 4))
    assert "fewer tokens" in short.notes[0]
    full = turn_extras(
        CallExtras(top_logprobs=2, routed_from=0, room=55),
        sampled=2,
        top=[likely(0, 2)],
        routed=experts(0, 4),
    )
    assert full == TurnExtras(
        notes=(note("top_logprobs", SIZE_LIMIT_REASON), note("routed_experts", SIZE_LIMIT_REASON))
    )
    before = turn_extras(
        CallExtras(notes=(note("top_logprobs", SIZE_LIMIT_REASON),)), sampled=2, top=[], routed=None
    )
    assert before == TurnExtras(notes=(note("top_logprobs", SIZE_LIMIT_REASON),))
