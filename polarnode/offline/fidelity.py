"""How far a conversation in words is the tokens a model was trained on: the chat template's rendering of it against the sequence itself.

A sampled token is never encoded again in training, so the two need not be equal: a model may write its JSON with other blanks, a template may
leave out what was thought before. The rule for whoever edits it: it only compares; where they differ the tokens are right.
"""

from collections.abc import Sequence
from typing import Final, Literal

from attrs import frozen

Found = Literal["equal", "differs", "refused"]
_TAIL: Final = 4  # ids a template writes behind the last turn's end: a line feed, as a rule


@frozen(kw_only=True)
class Compared:
    """`at` is the first token that differs, of `length` trained ones."""

    found: Found
    at: int = 0
    length: int = 0
    why: str = ""


def compared(trained: Sequence[int], rendered: Sequence[int]) -> Compared:
    """Equal when the rendering is the trained sequence, or that and what the template writes between two turns."""
    shared = next(
        (place for place, (one, other) in enumerate(zip(trained, rendered, strict=False)) if one != other), min(len(trained), len(rendered))
    )
    if shared == len(trained) and len(rendered) - shared <= _TAIL:
        return Compared(found="equal", at=shared, length=len(trained))
    return Compared(found="differs", at=shared, length=len(trained))
