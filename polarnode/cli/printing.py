"""How the verbs print: a console as wide as its reader, tables that give way before their figures do, and foreign text made harmless.

The rule for whoever edits it: what is printed may hold anything a model or a harness wrote, so nothing is read as markup, and no control
character reaches the terminal.
"""

import re
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 4096  # columns where there is no terminal: nothing is folded, so that a log is searched line by line and a table cut by column
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # all but tab and line feed
CONTROLS_8_BIT = re.compile(r"[\x80-\x9f]")


def open_console(*, stderr: bool = False) -> Console:
    """A console on the stream as it is now: coloured and fitted on a terminal, plain and wide elsewhere."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=None if stream.isatty() else PLAIN_WIDTH)


def fitted(console: Console, make: Callable[[bool], Table]) -> Table:
    """`make(False)`, the whole table; `make(True)`, the narrow one, where the console has no room for the whole."""
    whole = make(False)
    asked = console.measure(whole, options=console.options.update_width(PLAIN_WIDTH)).maximum  # measured at its own width it is never too wide
    return whole if asked <= console.width else make(True)


def harmless(text: str) -> str:
    """`text` with its control characters shown as signs: a tool's output must not move the reader's cursor or set a title."""
    shown = CONTROLS.sub(lambda found: "␡" if found[0] == "\x7f" else chr(0x2400 + ord(found[0])), text)
    return CONTROLS_8_BIT.sub("\ufffd", shown)
