"""The engine host's tie to its node: a pipe that only the node can write to. When it closes, the host ends.

The watch has a thread of its own, because `sglang.Engine()` blocks the main thread for minutes, and the watch
must not need anything from there. It ends the host's whole process session. It removes files first, because
after the kill no process is left to remove them.
"""

import importlib.util
import os
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def watch(lifeline: int, *, tag: str, scratch: Path) -> None:
    """Watch the read end of the pipe from a daemon thread. The caller must lead its own session, because
    everything in it will be killed.
    """
    threading.Thread(target=_wait, args=(lifeline, tag, scratch), name="lifeline", daemon=True).start()


def _wait(lifeline: int, tag: str, scratch: Path) -> None:
    while os.read(lifeline, 1):
        """Nothing is ever written; a byte would only mean that the node still lives."""
    end_session(tag=tag, scratch=scratch)


def end_session(*, tag: str, scratch: Path) -> None:
    """Kill what this process started, remove what it left on disk and in memory, and kill the whole group,
    this process included.
    """
    # SGLang brings psutil along, and a host without SGLang starts no process.
    if importlib.util.find_spec("psutil") is not None:
        import psutil  # type: ignore[import-untyped]

        for child in psutil.Process().children(recursive=True):
            _kill(child.pid)
    remove_leftovers(tag=tag, scratch=scratch)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def remove_leftovers(*, tag: str, scratch: Path) -> None:
    """Remove what SGLang left when it killed its own helpers: semaphores, a load file and socket files. All
    of these bear our tag or lie in our scratch folder.
    """
    for path in SHARED_MEMORY.glob(f"*{tag}*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # the process may have ended first
        os.kill(pid, signal.SIGKILL)
