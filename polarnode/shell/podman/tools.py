"""Podman's command line and other programs that build images: asked for an answer, or told to do something whose output goes to a log."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import trio
from attrs import frozen

from polarnode.errors import RuntimeFault, boundary
from polarnode.shell.podman.store import Store
from polarnode.shell.processes import open_process_group

LAST_WORDS = 1500  # bytes of a failed build's log in its error: the error line, not the download


@frozen(kw_only=True)
class Tools:
    """The podman program on one store, never on the machine's own."""

    podman: Path
    store: Store
    log: Path

    def prefix(self) -> list[str]:
        """What a person types to reach this store."""
        own = self.store.environment()
        return ["env", *(f"{name}={own[name]}" for name in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF")), "podman"]

    async def ask(self, *arguments: str) -> str:
        """A short command's output. Raises RuntimeFault with its error text."""
        done = await trio.run_process([self.podman, *arguments], env=self.store.environment(), capture_stdout=True, capture_stderr=True, check=False)
        if done.returncode != 0:
            raise RuntimeFault(f"podman {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode()

    async def succeeds(self, *arguments: str) -> bool:
        """Whether a short command ends with 0."""
        env = self.store.environment()
        done = await trio.run_process([self.podman, *arguments], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        return done.returncode == 0

    async def do(self, what: str, *arguments: str) -> None:
        """A long podman command, its output in the log. Raises RuntimeFault with the log's end."""
        await self.run(what, [str(self.podman), *arguments])

    async def run(self, what: str, argv: Sequence[str]) -> None:
        """A long program, its output in the log; ended with everything it started when we are cancelled."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as sink:
            sink.write(f"\n$ {' '.join(argv)}\n".encode())
            sink.flush()
            started = sink.tell()
            with boundary(RuntimeFault, what):
                async with open_process_group(argv, env=self.store.environment(), stdout=sink) as process:
                    exit_code = await process.wait()
        if exit_code != 0:
            raise RuntimeFault(f"{what} failed with exit code {exit_code}, see {self.log}: {self._last_words(started)}")

    def _last_words(self, started: int) -> str:
        with self.log.open("rb") as told:
            end = told.seek(0, 2)
            told.seek(max(started, end - LAST_WORDS))
            return told.read().decode(errors="replace").strip()
