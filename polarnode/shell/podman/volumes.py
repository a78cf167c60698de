"""Folders of this machine that a task may see: only below those that the node's own config names.

What counts is where a path really leads. It is looked up when the task is submitted, again when a container is made, and the folder that stands
in the container is compared with the one that was checked before anything runs in there, so that no link moved meanwhile leads elsewhere.
Rule for whoever edits it: a source is judged by its resolved path alone, never by how it is written.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import frozen

from polarnode.errors import Refused, RuntimeFault
from polarnode.shell.podman.files import opened_below
from polarnode.shell.podman.sealing import mounts_of
from polarnode.tasks import VolumeSpec


@frozen(kw_only=True)
class Volume:
    """A volume whose source was resolved and found allowed."""

    source: str
    target: str
    write: bool


def check_volumes(volumes: Sequence[VolumeSpec], allowed: Sequence[str]) -> None:
    """Refused, with its path, for the first that this node does not allow."""
    for index, volume in enumerate(volumes):
        refusal = why_not(volume.source, allowed)
        if refusal is not None:
            raise Refused(refusal, path=f"$.runtime.volumes[{index}].source")


def why_not(source: str, allowed: Sequence[str]) -> str | None:
    """What is wrong with a source, None when nothing is."""
    try:
        real = Path(source).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        return f"{source} is not a folder of this node's machine ({error})"
    if not real.is_dir():
        return f"{source} is not a folder: name the one it is in"
    if not any(real.is_relative_to(Path(prefix).resolve()) for prefix in allowed):
        leads = "" if str(real) == os.path.normpath(source) else f" (it leads to {real})"
        return f"{source}{leads} is not below a folder that this node's setting volumes allows: {', '.join(allowed) or 'it names none'}"
    within = next((mount.place for mount in mounts_of(os.getpid()) if Path(mount.place).is_relative_to(real) and Path(mount.place) != real), None)
    return None if within is None else f"{source} has another file system mounted in it, at {within}: name what is below or above it apart"


@contextmanager
def open_volumes(volumes: Sequence[VolumeSpec], allowed: Sequence[str]) -> Iterator["Sources"]:
    """The sources, held open while their container is made. RuntimeFault for one that is no longer allowed."""
    with ExitStack() as stack:
        found: list[tuple[Volume, int]] = []
        for volume in volumes:
            refusal = why_not(volume.source, allowed)
            if refusal is not None:
                raise RuntimeFault(refusal)
            real = str(Path(volume.source).resolve(strict=True))
            try:
                opened = os.open(real, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                raise RuntimeFault(f"volume {volume.source}: {error.strerror}") from error
            stack.callback(os.close, opened)
            found.append((Volume(source=real, target=volume.target, write=volume.write), opened))
        yield Sources(tuple(found))


@frozen
class Sources:
    """Allowed volumes, each with its source open."""

    _found: tuple[tuple[Volume, int], ...]

    @property
    def volumes(self) -> tuple[Volume, ...]:
        return tuple(volume for volume, _ in self._found)

    def check_mounted(self, root: int) -> None:
        """See that what stands in a container, which has not started yet, is what was checked. RuntimeFault where it is not."""
        for volume, source in self._found:
            path, real = os.readlink(f"/proc/self/fd/{source}"), os.fstat(source)
            try:
                with opened_below(root, volume.target, os.O_PATH, links=True) as mounted:
                    seen = os.fstat(mounted)
            except OSError as error:
                raise RuntimeFault(f"volume {volume.source} is not in its container at {volume.target}: {error.strerror}") from error
            if path != volume.source or (seen.st_dev, seen.st_ino) != (real.st_dev, real.st_ino):
                raise RuntimeFault(f"volume {volume.source} was replaced while its container was made")
