"""What went wrong, for the person at the terminal: expected faults as sentences, a leaving by force as such, and a bug as it is.

Nurseries hand errors on in groups, so a fault that is one sentence arrives as a tree. The rule for whoever edits it: a tree that holds anything
but what this house raises on purpose is a bug, and its traceback is the report.
"""

from collections.abc import Iterator

import click
from click.exceptions import Exit

from polarnode.errors import PolarnodeError, Refused

LEFT_BY_FORCE = 130  # what a shell says of a program that SIGINT ended


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors a group holds, however deep; a plain error is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def is_bug(error: BaseException) -> bool:
    """Whether something is in it that nobody raised on purpose."""
    return any(not isinstance(leaf, PolarnodeError | KeyboardInterrupt) for leaf in leaves(error))


def left_by_force(error: BaseException) -> bool:
    """Whether the person interrupted, and nothing else is the matter."""
    return not is_bug(error) and any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error))


def sentence(error: PolarnodeError) -> str:
    """What an error says, with the field's path where it names one."""
    return f"{error} (at {error.path})" if isinstance(error, Refused) and error.path else str(error)


def as_exit(error: BaseException) -> click.ClickException | Exit | None:
    """How the program ends over it: 130 when it was interrupted, 1 with each sentence once; None for a bug."""
    if is_bug(error):
        return None
    if left_by_force(error):
        return Exit(LEFT_BY_FORCE)
    said = dict.fromkeys(sentence(leaf) for leaf in leaves(error) if isinstance(leaf, PolarnodeError))
    return click.ClickException("\n".join(said))
