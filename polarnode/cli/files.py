"""Files of the verbs: tasks that are read from sources, images that are built for them, results that are written whole or not at all."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import trio
from attrs import field, frozen

from polarnode.config import NodeConfig
from polarnode.errors import Refused
from polarnode.shell.admission import admitted
from polarnode.sources import Kind, Overrides, SourcedTask, Unread, read_source

ANY_CONTEXT = 32_768  # tokens; a launch that is only tried writes the number down and nothing more


@frozen(kw_only=True)
class Sources:
    """What a verb was given to read tasks from."""

    paths: tuple[Path, ...]
    kind: Kind | None = None
    overrides: Overrides = field(factory=Overrides)

    def items(self) -> Iterator[SourcedTask | Unread]:
        """Every task of every path."""
        for path in self.paths:
            yield from read_source(path, kind=self.kind, overrides=self.overrides).items()

    def tasks(self) -> list[SourcedTask]:
        """As `items`; the first that can not be read, and a path without any, is a refusal."""
        return [task for path in self.paths for task in read_source(path, kind=self.kind, overrides=self.overrides).tasks()]


def checked(task: SourcedTask, *, config: NodeConfig, here: bool) -> SourcedTask:
    """A task, with all that can be refused now refused now, and not after the engine has started.

    `here`: it is to run on a node of this config; else what depends on the node's own settings (judges, volumes, egress) is left to that node.
    """
    try:
        admitted(
            task.spec,
            model=Path(config.model).name,
            context_length=config.context_length or ANY_CONTEXT,
            allowed_imports=config.import_paths,
            judges=tuple(config.judges) if here else None,
            volumes=config.volumes if here else None,
            egress=config.egress if here else None,
        )
    except Refused as refused:
        raise Refused(f"{task.origin}: {refused}", path=refused.path) from refused
    return task


def note_lines(tasks: Sequence[SourcedTask]) -> list[str]:
    """What could not be said of these tasks, each thing once, with how many tasks it is true of."""
    counts = Counter(note for task in tasks for note in task.notes)
    return [note if count == len(tasks) else f"{note} ({count} of {len(tasks)} tasks)" for note, count in counts.items()]


def build_images(tasks: Sequence[SourcedTask], config: NodeConfig, say: Callable[[str], None]) -> None:
    """Build, on this machine, the images of tasks that come with a folder to build one from."""
    builds = [task.build for task in tasks if task.build is not None]
    if not builds:
        return
    from polarnode.node.settings import runtimes_settings  # only where something is built
    from polarnode.shell.podman import build_task_images

    settings, log = runtimes_settings(config), Path(config.state_dir) / "images.log"

    async def build() -> None:
        await build_task_images(settings, builds, log=log, say=say)

    trio.run(build)


@contextmanager
def written_whole(file: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when the block is through; until then, and after an error, what had that name stays."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            yield out
        part.replace(file)
    except OSError as error:
        raise Refused(f"{file} can not be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
