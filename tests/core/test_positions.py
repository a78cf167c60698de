"""Positions: their laws, and their text, which readers carry as it is."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.errors import Refused
from polarnode.core.positions import MOST_JOURNALS, MOST_NUMBER, Position

JOURNALS = st.integers(0, 2**64 - 1).map(lambda n: f"j{n:016x}")
NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, MOST_NUMBER))
# few journals, so that positions share some
FEW = st.sampled_from(["j" + "0" * 16, "j" + "f" * 16, "j0123456789abcdef", "j" + "a" * 16])
POSITIONS = st.dictionaries(st.one_of(FEW, JOURNALS), NUMBERS, max_size=6).map(Position)


@given(POSITIONS, POSITIONS, POSITIONS)
def test_positions_are_a_join_semilattice(a: Position, b: Position, c: Position) -> None:
    assert a.join(b) == b.join(a)
    assert a.join(b.join(c)) == a.join(b).join(c)
    assert a.join(a) == a
    assert a.join(b).covers(a)
    assert a.join(b).covers(b)
    assert (a.covers(b) and b.covers(a)) == (a == b)


@given(POSITIONS)
def test_a_position_is_read_back_from_its_text(position: Position) -> None:
    text = position.text
    assert Position.read(text) == position
    assert text.isascii()
    assert text.startswith("v")


@given(st.integers(0, MOST_NUMBER))
def test_a_nodes_own_position_is_its_number(number: int) -> None:
    assert Position({"": number}).text == str(number)
    assert Position.read(str(number)) == Position({"": number})


def test_a_position_of_64_journals_is_short() -> None:
    whole = Position({f"j{n:016x}": 1_000_000 + n for n in range(64)})
    assert len(whole.text) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-1",
        "1e3",
        "9223372036854775808",
        "v!",
        "vAAAA",
        "vAAAAAAAAAAAA=",
        "v" + "____" * 6,
        Position({f"j{n:016x}": 1 for n in range(MOST_JOURNALS + 1)}).text,
    ],
)
def test_any_other_text_is_refused_by_its_field(text: str) -> None:
    with pytest.raises(Refused, match=r"^id must be a position") as caught:
        Position.read(text, path="$.id")
    assert caught.value.path == "$.id"


@given(st.text(max_size=40))
def test_no_text_is_a_bug(text: str) -> None:
    with suppress(Refused):
        assert Position.read(text).text.lstrip("0") in (text.lstrip("0"), "")
