"""Which weights a host is to serve beside those it starts with, and how a host that comes back is brought to them.

Rule for whoever edits it: a host serves the version of its node or nothing; what can not be loaded again (tensors of a trainer, a folder that
was written over) is waited for, never guessed.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from attrs import frozen

from polarnode.engine_host.checkpoints import fingerprint
from polarnode.engine_host.protocol import Done, ToHost
from polarnode.engine_host.updates import CommitUpdate, LoadDisk
from polarnode.errors import EngineError

Ask = Callable[[Callable[[int], ToHost]], Awaitable[Done]]


@frozen(kw_only=True)
class Loaded:
    """The weights a host should serve when they are not those it starts with. `path` None: a trainer sent them, and no disk has them."""

    version: str
    path: str | None = None
    files: str = ""  # the folder's fingerprint when it was loaded


class Stale(EngineError):
    """A host that can not be brought to the node's weights, and waits for the next."""


async def bring(wanted: Callable[[], Loaded | None], ask: Ask) -> Loaded | None:
    """Load what is wanted until that is what is loaded: it may change meanwhile. Raises Stale, or EngineError for what does not load."""
    done: Loaded | None = None
    while (want := wanted()) is not done and want is not None:
        path = await trio.to_thread.run_sync(_still_there, want)
        load, version = await ask(lambda call, path=path: LoadDisk(call=call, path=path)), want.version  # type: ignore[misc]
        if load.ok:
            load = await ask(lambda call, version=version: CommitUpdate(call=call, version=version))  # type: ignore[misc]
        if not load.ok:
            raise EngineError(f"weights {version} under {path} can not be loaded again: {load.message}")
        done = want
    return done


def _still_there(want: Loaded) -> str:
    if want.path is None:
        raise Stale(f"weights {want.version} were sent by a trainer and this host has lost them: it serves again with the next update")
    if want.files and fingerprint(Path(want.path)) != want.files:
        raise Stale(f"weights {want.version} are no longer under {want.path}, whose files have changed: this host serves again with the next update")
    return want.path
