"""Cursors: their text, which readers carry as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.cursors import Cursor
from polarnode.core.errors import Refused

LOGS = st.from_regex(r"[0-9A-Za-z-]{1,64}", fullmatch=True)


@given(st.integers(0, 10**18 - 1), st.just("") | LOGS)
def test_cursor_is_read_back(position: int, log: str) -> None:
    found = Cursor(position=position, log=log)
    assert Cursor.read(found.text) == found
    assert found.text.isascii()


def test_bare_number_has_no_log() -> None:
    assert Cursor.read("41") == Cursor(position=41)
    assert Cursor(position=41).text == "41"
    assert Cursor(position=41, log="7f-1-0").text == "7f-1-0:41"


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1e3", "1" * 19, ":1", "a b:1", "a:", "a:b:1", "x" * 65 + ":1"]
)
def test_cursor_refuses_other_text(text: str) -> None:
    with pytest.raises(
        Refused, match="after must be a position as the stream's `id:` line has it"
    ) as refused:
        Cursor.read(text, "?after")
    assert refused.value.path == "?after"


def test_old_fleet_cursor_is_read() -> None:
    """What a fleet of version 0.1 gave its readers."""
    with pytest.raises(Refused, match="id is a position in a fleet of an earlier release") as refused:
        Cursor.read("vASNFZ4mrze8p", "$.id")
    assert "leave it out" in str(refused.value)
