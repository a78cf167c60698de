"""This machine's own shell as a runtime, for evaluators: real sh, real git, real tests, in a folder that
stands for /testbed.

It is no container: what only a container has (users, limits, an end of all processes) is asked of Podman in
test_evaluators_podman.py, which runs the same evaluators.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio
from attrs import define, field

from polarnode.core.ports import Ended

TESTBED_PATH = "/testbed"


@define(eq=False, kw_only=True)
class ShellRuntime:
    """`polarnode.core.ports.Runtime`. Absolute paths below /testbed are those of `folder`; files elsewhere
    lie below `root`.
    """

    folder: Path
    id: str = "shell"
    workdir: str = TESTBED_PATH
    image_env: Mapping[str, str] = field(factory=dict)
    ran: list[tuple[str, ...]] = field(factory=list)
    ended: int = 0

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
        keep: int | None = None,
    ) -> Ended:
        self.ran.append(tuple(argv))
        here = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder.parent),
            "LANG": "C.UTF-8",
            **self.image_env,
            **(env or {}),
        }
        done = await trio.run_process(
            [self._here(each) for each in argv],
            env=here,
            cwd=self._here(workdir or self.workdir),
            stdin=self._here(stdin.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        stdout, stderr = (each[-keep if keep else 0 :] for each in (done.stdout, done.stderr))
        return Ended(exit_code=done.returncode, stdout=stdout, stderr=stderr)

    async def put(self, files: Mapping[str, bytes], *, user: str | None = None, mode: int = 0o644) -> None:
        for path, content in files.items():
            place = trio.Path(self._here(path))
            await place.parent.mkdir(parents=True, exist_ok=True)
            await place.write_bytes(content)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        place = trio.Path(self._here(path))
        if await place.is_symlink() or not await place.is_file():
            return None
        return (await place.read_bytes())[:limit]

    async def end_processes(self) -> None:
        await trio.lowlevel.checkpoint()
        self.ended += 1

    def _here(self, text: str) -> str:
        """An argument or input as it is on this machine; a script is left as it is but for the folder's
        own name.
        """
        return text if "\n" in text else text.replace(TESTBED_PATH, str(self.folder))


def git(folder: Path, *arguments: str) -> str:
    """Git in a folder, with no config but a name."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }
    name = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "protocol.file.allow=always",
        "-c",
        "init.defaultBranch=main",
    ]
    done = subprocess.run(
        ["git", *name, *arguments], cwd=folder, env=environment, capture_output=True, check=True
    )
    return done.stdout.decode().strip()
