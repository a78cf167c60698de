"""Which ids are marks in which mode."""

from exchange_kit import BYTE_FAMILY, CALL, CALLED, END, THINK, THOUGHT

from polarnode.tokens.parser import watched


def test_each_mark_watched_in_its_modes() -> None:
    found = watched(BYTE_FAMILY, (260, 261))
    # a closing mark without a call is counted
    assert found["text"] == {END, CALL, CALLED, THINK}
    assert found["thinking"] == {END, THOUGHT}
    assert found["call"] == {END, CALLED, 260, 261}
