"""Task sources: files and folders read into TaskSpecs, each with notes on what could not be expressed.

Invariant: no field of a source is dropped silently. A field without an effect here is a note of its task;
where ignoring it would change what the task asks for, the task is refused. A new kind of source is one
module and one row of `source.READERS`.
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
