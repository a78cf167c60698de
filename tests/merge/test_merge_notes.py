"""The words that notes begin with: counted, and what they say of thoughts."""

import pytest

from polarnode.merge import figures


def test_notes_counted_by_first_word() -> None:
    said = [
        "edited: one",
        "edited: two",
        "closed: the first 2 ids",
        "ignored: $.user",
        "a sentence without a word",
        "",
    ]
    assert figures.counted(said) == {"edited": 2, "closed": 1}


@pytest.mark.parametrize(
    ("shown", "hidden", "count"), [((), (), 0), ((1,), (), 1), ((), (2, 3), 1), ((5,), (1,), 2)]
)
def test_only_existing_thoughts_are_noted(
    shown: tuple[int, ...], hidden: tuple[int, ...], count: int
) -> None:
    said = figures.thinking_notes(shown, hidden)
    assert len(said) == count == figures.counted(said)[figures.THINKING]
    assert figures.shows_thinking(said) is bool(shown)
    assert all(str(place) in " ".join(said) for place in (*shown, *hidden))
