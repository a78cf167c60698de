"""The position of a reader in a log, and its text, which readers keep unchanged. Pure.

A node alone writes the bare number of the last event. The events of a log that nodes share are numbered by
one database, which may be restored or replaced by its standby. There the text names the log too, so that a
reader learns when the history that it read was lost. A bare number is a position in the log as it is now.
"""

import re
from typing import Final

from attrs import frozen

from polarnode.core.errors import Refused

# This regular expression matches a cursor. 10,000 events a second reach 18 digits in 3 million years.
TEXT: Final = r"(?:[0-9A-Za-z-]{1,64}:)?[0-9]{1,18}"
# A fleet of an earlier release gave its readers these: a number for each of its journals.
OLD_FLEET_CURSOR: Final = re.compile(r"v[0-9A-Za-z_-]*")


@frozen(kw_only=True)
class Cursor:
    """A position after the event number `position` of the log named `log`; "" is the log as it is now."""

    position: int = 0
    log: str = ""

    @classmethod
    def read(cls, text: str, path: str | None = None) -> "Cursor":
        """The cursor that was written as `text`. Raises Refused, with the field's `path`."""
        field = (path or "a cursor").lstrip("?$.")
        if OLD_FLEET_CURSOR.fullmatch(text):
            raise Refused(
                f"{field} is a position in a fleet of an earlier release, whose journals this log does not"
                " have: leave it out, to go on after the consumer's position or from the oldest event",
                path=path,
            )
        log, _, number = text.rpartition(":")
        if not re.fullmatch(TEXT, text):
            raise Refused(f"{field} must be a position as the stream's `id:` line has it", path=path)
        return cls(position=int(number), log=log)

    @property
    def text(self) -> str:
        """As a stream's `id:` line has it."""
        return f"{self.log}:{self.position}" if self.log else str(self.position)
