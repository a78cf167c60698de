"""A memory of the latest: what comes again is the latest once more, and the oldest go first."""

from polarnode.support.bounded import remember


def test_oldest_go_first_repeats_are_latest() -> None:
    """The oldest entry goes first, and a repeated one counts as the latest."""
    kept: dict[str, int] = {}
    for name, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        remember(kept, name, value, most=2)
    assert list(kept.items()) == [("a", 3), ("c", 4)]


def test_size_never_exceeds_the_bound() -> None:
    kept = dict.fromkeys("abcde", 0)
    remember(kept, "f", 0, most=3)
    assert list(kept) == ["d", "e", "f"]
