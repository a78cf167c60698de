"""Finds the name that a misspelled one was meant to be."""

import difflib
from collections.abc import Collection, Iterable

# Equal texts have 1; `serve` and `merge` have 0.6, `arrays` and `carry` 0.73, `run` and `run_s` 0.75.
NEAR = 0.75
NAME_CHARS = 64  # comparing two names takes time in the square of their length


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one; None if none is near enough."""
    if len(name) > NAME_CHARS:
        return None
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=NEAR)
    return found[0] if found else None


def meant(name: str, known: Iterable[str]) -> str:
    """The beginning of a sentence, `did you mean NEAREST? `; empty if no known name is near."""
    near = nearest(name, known)
    return "" if near is None else f"did you mean {near}? "


def remedy(name: str, known: Collection[str]) -> str:
    """`did you mean NEAREST?`, if a known name is near, and all known names."""
    return f"{meant(name, known)}there are: {', '.join(sorted(known))}"
