"""Where tasks come from: files and folders people already have, read into TaskSpecs, with what could not be
said beside each.

The rule for whoever edits it: nothing of a source is dropped in silence. A field without a meaning here is a
note of its task; where leaving it out would change what the task asks for, the task is refused. A new kind is
one module and one row of `source.READERS`.
"""

from polarnode.sources.source import Source, read_source
from polarnode.sources.values import KINDS, Build, Kind, Overrides, SourcedTask, Unread

__all__ = [
    "KINDS",
    "Build",
    "Kind",
    "Overrides",
    "Source",
    "SourcedTask",
    "Unread",
    "read_source",
]
