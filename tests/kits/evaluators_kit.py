"""What tests of evaluators build of: a finished session, and a repository an agent worked in beside a clean
one.
"""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from attrs import frozen
from shell_runtime import TESTBED_PATH, ShellRuntime, git

from polarnode.core.conversation import Json
from polarnode.core.ports import Judge, Runtime
from polarnode.core.trajectory import Outcome
from polarnode.evaluators.contract import Finished
from polarnode.evaluators.patches import Patch, Repository, UnusablePatch, apply, extract
from polarnode.rollouts.evaluation import NodeClock


def no_judge(name: str) -> Judge:
    raise AssertionError(f"nobody asked for the judge {name}")


async def nothing_to_prepare() -> None: ...


def finished(
    runtime: Runtime,
    config: dict[str, Json],
    left: Runtime | None = None,
    *,
    prepare: Callable[[], Awaitable[None]] = nothing_to_prepare,
) -> Finished:
    return Finished(
        runtime=runtime,
        left=runtime if left is None else left,
        clock=NodeClock(),
        judge=no_judge,
        outcome=Outcome(status="completed"),
        turns=(),
        instruction="i",
        config=config,
        metadata={},
        prepare=prepare,
    )


@frozen(kw_only=True)
class AgentWorkplace:
    """A repository as its image has it (`clean`), and a copy the agent worked in (`left`). Both are /testbed
    to their runtimes.
    """

    clean: Path
    left: Path

    @property
    def runtimes(self) -> tuple[ShellRuntime, ShellRuntime]:
        return ShellRuntime(folder=self.left), ShellRuntime(folder=self.clean)

    async def patch(self, **more: object) -> Patch | UnusablePatch:
        left, clean = self.runtimes
        return await extract(left, clean, Repository(folder=TESTBED_PATH, **more))  # type: ignore[arg-type]

    async def carried(self, **more: object) -> Patch:
        """The patch, put onto the clean repository by git itself."""
        found = await self.patch(**more)
        assert isinstance(found, Patch), found
        applied = await apply(self.runtimes[1], found, Repository(folder=TESTBED_PATH))
        assert isinstance(applied, Patch), applied
        assert applied.applied_by == "git"
        return applied

    def differ(self, *ignored: str) -> list[str]:
        """Files that are not the same in both, links as links, modes too; nothing inside a .git is
        looked at.
        """
        one, other = (tree(folder) for folder in (self.left, self.clean))
        return sorted(
            path
            for path in one.keys() | other.keys()
            if one.get(path) != other.get(path) and path not in ignored
        )


def tree(folder: Path) -> dict[str, tuple[str, bytes]]:
    found: dict[str, tuple[str, bytes]] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if ".git" in path.relative_to(folder).parts:
            continue
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()).encode())
        elif path.is_file():
            found[name] = ("program" if path.stat().st_mode & 0o100 else "file", path.read_bytes())
    return found


def make_workplace(tmp_path: Path, files: dict[str, bytes] | None = None) -> AgentWorkplace:
    """A repository of one commit with these files, and a copy of it."""
    clean = tmp_path / "clean"
    clean.mkdir()
    for name, content in (
        files or {"a.py": b"a = 1\n", "deep/b.py": b"b = 1\n", ".gitignore": b"ignored/\n*.log\n"}
    ).items():
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        (clean / name).write_bytes(content)
    git(clean, "init", "--quiet")
    git(clean, "add", "--all")
    git(clean, "commit", "--quiet", "--message", "as it was")
    return copied(clean)


def copied(clean: Path) -> AgentWorkplace:
    left = clean.parent / "left"
    shutil.copytree(clean, left, symlinks=True)
    return AgentWorkplace(clean=clean, left=left)
