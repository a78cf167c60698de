"""Task sources: files and folders are read into TaskSpecs, each with notes on what could not be expressed.

Invariant: no field of a source is dropped silently. A field without an effect here becomes a note of its
task. If ignoring the field would change what the task asks for, the task is refused. A new kind of source is
one module and one row of `source.READERS`.
"""

from polarnode.sources.source import Source, read_source
from polarnode.sources.values import KINDS, ImageBuild, Kind, Overrides, SourcedTask, UnreadTask

__all__ = [
    "KINDS",
    "ImageBuild",
    "Kind",
    "Overrides",
    "Source",
    "SourcedTask",
    "UnreadTask",
    "read_source",
]
