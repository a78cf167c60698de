"""The words that notes of a turn begin with, so that what a reader is told can also be counted.

A note is `word: sentence`. Whoever adds a word documents it in docs/token-fidelity.md and takes none away: trajectories are kept for years.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

EDITED: Final = "edited"  # a message of ours came back changed, proven by its ids: its tokens are kept
AMBIGUOUS: Final = "ambiguous"  # several turns fit what came back, and no id tells which
REWRITTEN: Final = "rewritten"  # an assistant message is not what the turn at its place answered
FOREIGN: Final = "foreign"  # an assistant message that this session sampled nowhere near
DIVERGED: Final = "diverged"  # the first message that is not what an earlier request of the same conversation had there
VOLATILE: Final = "volatile"  # the user message that a turn answered is gone or changed
RESUMED: Final = "resumed"  # it goes on with the cut sample of another turn
CLOSED: Final = "closed"  # the parent's sample had no end, and was given one
THINKING: Final = "thinking"  # which thoughts the model was shown, where its task lets the template decide
REGROUPED: Final = "regrouped"  # calls of one answer came back as several messages
WORDS: Final = (EDITED, AMBIGUOUS, REGROUPED, REWRITTEN, FOREIGN, DIVERGED, VOLATILE, RESUMED, CLOSED, THINKING)

KEPT: Final = "its tokens are kept"  # how a note of an edit ends
AS_SHOWN: Final = "the model sees it as the request shows it"  # and how where the prompt is rendered anew

_SHOWN: Final = f"{THINKING}: shown the thoughts of"


def word_of(note: str) -> str | None:
    """The word that a note begins with; None for one that only says something."""
    head = note.partition(":")[0]
    return head if head in WORDS else None


def counted(notes: Iterable[str]) -> "Counter[str]":
    """How many notes begin with each of the words."""
    return Counter(word for word in map(word_of, notes) if word is not None)


def thoughts(shown: Iterable[int], hidden: Iterable[int]) -> list[str]:
    """What the model saw of earlier thoughts, by the places of their messages: those it was shown, and those the template left out."""
    seen, unseen = ", ".join(map(str, shown)), ", ".join(map(str, hidden))
    hides = [f"{THINKING}: the template leaves out the thoughts of messages {unseen}, so the model did not see them"] if unseen else []
    return [*([f"{_SHOWN} messages {seen}"] if seen else []), *hides]


def shows_thoughts(notes: Iterable[str]) -> bool:
    """Whether a prompt, by its notes, was rendered with earlier thoughts."""
    return any(note.startswith(_SHOWN) for note in notes)
