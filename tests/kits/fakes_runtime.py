"""A runtime in memory, and what any runtime must do. The same assertions run against this fake and against
real containers.

Its programs are Python functions: `programs["pi"] = my_harness`. A few of the usual ones are there, because
tests of sessions use them.
"""

import io
import math
import socket
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import define, field

from polarnode.containers.files import CollectedFiles
from polarnode.containers.inside import Process
from polarnode.containers.pool import RuntimesStatistics
from polarnode.containers.prepared import Workspace, Workspaces, workspace_of
from polarnode.containers.recipes import RuntimesSettings
from polarnode.containers.snapshots import SnapshotFiles
from polarnode.core.errors import Refused, RuntimeFault
from polarnode.core.ports import Ended
from polarnode.core.task import RuntimeSpec

KILLED = 137


@define(eq=False, kw_only=True)
class Call:
    """One run of a program: what it was given, and where it writes."""

    runtime: "MemoryRuntime"
    argv: tuple[str, ...]
    env: Mapping[str, str]
    user: str
    workdir: str
    stdin: bytes
    stdout: bytearray = field(factory=bytearray)
    stderr: bytearray = field(factory=bytearray)


ProgramFunction = Callable[[Call], Awaitable[int]]


@define(eq=False, kw_only=True)
class MemoryRuntime:
    """`polarnode.core.ports.Runtime`, and what sessions use besides, with files in a dict. A link is a path
    in `links`.
    """

    id: str = "memory"
    workdir: str = "/work"
    home: str = "/home/agent"
    user: str = "agent"
    programs: dict[str, ProgramFunction] = field(factory=dict)
    files: dict[str, bytes] = field(factory=dict)
    owners: dict[str, str] = field(factory=dict)
    modes: dict[str, int] = field(factory=dict)
    links: set[str] = field(factory=set)
    endpoint: socket.socket = field(init=False)
    network: int = field(init=False)
    alive: bool = True
    ended_because: str | None = None
    ended_for_room: bool = False
    ooms: int = 0
    sealed: tuple[str, ...] | None = None  # the writable places
    frozen: bool = False
    freezes: int = 0  # how often it was frozen
    refuses: int = 0  # so many calls to freeze or thaw it fail
    beside: frozenset[Process] = frozenset()  # what runs in it besides its programs
    copying_s: float = 0.0  # how long a snapshot takes
    _running: set[trio.CancelScope] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.endpoint = socket.create_server(("127.0.0.1", 0))
        self.endpoint.setblocking(False)
        self.network = self.endpoint.fileno()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.endpoint.getsockname()[1]}"

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
        call = self._call(argv, env, user, workdir, stdin)
        exit_code = await self._run(call)
        stdout, stderr = (bytes(each)[-keep if keep else 0 :] for each in (call.stdout, call.stderr))
        return Ended(exit_code=exit_code, stdout=stdout, stderr=stderr)

    async def run_logged(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        limit: int,
        user: str | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
    ) -> int:
        call = self._call(argv, env, user, workdir, stdin)
        try:
            return await self._run(call)
        finally:
            _write(log, bytes(call.stdout + call.stderr)[-limit:])

    async def put(self, files: Mapping[str, bytes], *, user: str | None = None, mode: int = 0o644) -> None:
        await trio.lowlevel.checkpoint()
        for path, content in files.items():
            if not path.startswith("/") or ".." in path.split("/"):
                raise RuntimeFault(f"{path!r} is no path in a container: give an absolute one without ..")
            if path in self.links:
                raise RuntimeFault(f"writing {path}: a link is in the way")
            if self.sealed is not None and not any(path.startswith(f"{place}/") for place in self.sealed):
                raise RuntimeFault(f"writing {path}: it is read-only")
            self.files[path], self.owners[path], self.modes[path] = content, user or self.user, mode

    async def place(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        await self.put(files, mode=mode)

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        await trio.lowlevel.checkpoint()
        return None if path in self.links or path not in self.files else self.files[path][:limit]

    def oom_kills(self) -> int:
        return self.ooms

    async def seal(self, spec: RuntimeSpec) -> None:
        await trio.lowlevel.checkpoint()
        self.sealed = self._places(spec) if spec.read_only else None

    def _places(self, spec: RuntimeSpec) -> tuple[str, ...]:
        return (self.workdir, self.home, "/tmp", "/var/tmp", *spec.writable)

    async def unseal(self) -> None:
        await trio.lowlevel.checkpoint()
        self.sealed = None

    async def collect(self, paths: Sequence[str], to: Path) -> CollectedFiles:
        await trio.lowlevel.checkpoint()
        left_out, kept = [], {}
        for path in paths:
            whole = (path if path.startswith("/") else f"{self.workdir}/{path}").rstrip("/.")
            found = {
                name: content
                for name, content in self.files.items()
                if name == whole or name.startswith(f"{whole}/")
            }
            kept |= {path.strip("/") + name.removeprefix(whole): content for name, content in found.items()}
            left_out += [] if found else [f"{path}: No such file or directory"]
        _write_tar(to, kept)
        return CollectedFiles(
            path=to, files=len(kept), bytes=sum(map(len, kept.values())), left_out=tuple(left_out)
        )

    async def copy_workdir(self, target: "MemoryRuntime") -> None:
        await trio.lowlevel.checkpoint()
        here, there = f"{self.workdir}/", f"{target.workdir}/"
        target.files = {name: content for name, content in target.files.items() if not name.startswith(there)}
        target.files |= {
            there + name.removeprefix(here): content
            for name, content in self.files.items()
            if name.startswith(here)
        }

    async def restore_workdir(self, kept: Path) -> None:
        await trio.lowlevel.checkpoint()
        self.files = {
            name: each for name, each in self.files.items() if not name.startswith(f"{self.workdir}/")
        }
        with tarfile.open(kept) as archive:
            for entry in archive:
                if entry.isfile() and entry.name.startswith("./"):
                    self.files[f"{self.workdir}/{entry.name[2:]}"] = archive.extractfile(entry).read()  # type: ignore[union-attr]

    async def processes(self) -> frozenset[Process]:
        await trio.lowlevel.checkpoint()
        return self.beside

    async def snapshot(
        self, spec: RuntimeSpec, to: Path, limit: int, *, measured: bool = False
    ) -> SnapshotFiles:
        places = self._places(spec)
        kept = {
            name: each for name, each in self.files.items() if name.startswith(tuple(f"{p}/" for p in places))
        }
        size = sum(map(len, kept.values()))
        if size > limit:
            raise Refused(f"more than {limit >> 20} MiB: raise max_mb", path="$.snapshot_at.max_mb")
        await trio.sleep(self.copying_s)
        _write_tar(to, {name.lstrip("/"): content for name, content in kept.items()})
        return SnapshotFiles(places=places, files=len(kept), bytes=size)

    async def restore_snapshot(self, kept: Path, places: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        inside = tuple(f"{place}/" for place in places)
        self.files = {name: each for name, each in self.files.items() if not name.startswith(inside)}
        with tarfile.open(kept) as archive:
            self.files |= {
                f"/{each.name}": archive.extractfile(each).read() for each in archive if each.isfile()
            }  # type: ignore[union-attr]

    async def freeze(self) -> None:
        await self._change(frozen=True)
        self.freezes += 1

    async def thaw(self) -> None:
        await self._change(frozen=False)

    async def _change(self, *, frozen: bool) -> None:
        await trio.lowlevel.checkpoint()
        if self.refuses:
            self.refuses -= 1
            raise RuntimeFault("podman: no")
        self.frozen = frozen

    async def end_processes(self) -> None:
        self.frozen = False
        await trio.lowlevel.checkpoint()
        for scope in self._running:
            scope.cancel()

    async def close(self) -> None:
        self.alive = self.frozen = False
        self.endpoint.close()
        await trio.lowlevel.checkpoint()

    def copied(self) -> "MemoryRuntime":
        """Its files, in one that never ran."""
        other = MemoryRuntime(
            alive=False,
            files=dict(self.files),
            owners=dict(self.owners),
            modes=dict(self.modes),
            links=set(self.links),
        )
        other.endpoint.close()
        return other

    def _call(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        user: str | None,
        workdir: str | None,
        stdin: bytes,
    ) -> Call:
        if not self.alive:
            raise RuntimeFault(
                "the container has ended: its lifetime is over, or the kernel ended its first process"
            )
        basic = {
            "HOME": self.home if user in (None, self.user) else "/root",
            "LANG": "C.UTF-8",
            "PATH": "/usr/bin:/bin",
        }
        env = {**basic, **(env or {})}
        return Call(
            runtime=self,
            argv=tuple(argv),
            env=env,
            user=user or self.user,
            workdir=workdir or self.workdir,
            stdin=stdin,
        )

    async def _run(self, call: Call) -> int:
        await trio.lowlevel.checkpoint()
        program = {**USUAL, **self.programs}.get(call.argv[0])
        if program is None:
            call.stderr += f"{call.argv[0]}: executable file not found in $PATH".encode()
            return 127
        with trio.CancelScope() as scope:
            self._running.add(scope)
            try:
                return await program(call)
            finally:
                self._running.discard(scope)
        return KILLED


@define(eq=False, kw_only=True)
class MemoryCopies:
    """Copies of prepared runtimes in memory. `faults` are raised by the next copies, one each."""

    images: dict[str, MemoryRuntime] = field(factory=dict)
    faults: list[RuntimeFault] = field(factory=list)

    async def find(self, workspace: Workspace) -> str | None:
        await trio.lowlevel.checkpoint()
        name = workspace.digest("memory")
        return name if name in self.images else None

    async def make(self, workspace: Workspace, runtime: MemoryRuntime) -> str:
        await trio.lowlevel.checkpoint()
        if runtime._running:
            raise Refused("one of its steps left a process running")
        if self.faults:
            raise self.faults.pop(0)
        name = workspace.digest("memory")
        self.images[name] = runtime.copied()
        return name

    async def exists(self, image: str) -> bool:
        await trio.lowlevel.checkpoint()
        return image in self.images

    async def remove(self, image: str) -> bool:
        await trio.lowlevel.checkpoint()
        return self.images.pop(image, None) is not None

    def put(self, image: str, runtime: MemoryRuntime) -> None:
        """Begin as the copy was."""
        if image not in self.images:
            raise RuntimeFault(f"no image {image}")
        made = self.images[image]
        runtime.files, runtime.owners, runtime.modes, runtime.links = (
            dict(made.files),
            dict(made.owners),
            dict(made.modes),
            set(made.links),
        )


@define(eq=False, kw_only=True)
class MemoryRuntimes:
    """`polarnode.containers.runtimes.NodeRuntimes` in memory. `faults` are raised by the next openings, one each;
    `opened` are all there ever were.
    """

    programs: dict[str, ProgramFunction] = field(factory=dict)
    faults: list[RuntimeFault] = field(factory=list)
    opened: list[MemoryRuntime] = field(factory=list)
    wanted: dict[str, int] = field(factory=dict)
    lifetimes: list[float] = field(factory=list)
    held: bool = False
    image: str = "sha256:0"  # the id of every image
    freezing_obstacle: str | None = None
    settings: RuntimesSettings = field(
        factory=lambda: RuntimesSettings(state_dir=Path("/nonexistent"), node_id="memory", disk_reserve_mb=0)
    )
    copies: MemoryCopies = field(factory=MemoryCopies)
    workspaces: "Workspaces[MemoryRuntime]" = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.workspaces = Workspaces(copies=self.copies, most=32)

    @asynccontextmanager
    async def open(
        self, spec: RuntimeSpec, *, session_id: str, lifetime_s: float
    ) -> AsyncIterator[MemoryRuntime]:
        await trio.lowlevel.checkpoint()
        if self.faults:
            raise self.faults.pop(0)
        runtime = MemoryRuntime(
            id=f"memory-{session_id}-{len(self.opened)}",
            workdir=spec.workdir,
            user=spec.user,
            programs=self.programs,
        )
        self.opened.append(runtime)
        self.lifetimes.append(lifetime_s)
        try:
            yield runtime
        finally:
            with trio.CancelScope(shield=True):
                await runtime.close()

    @asynccontextmanager
    async def open_prepared(
        self,
        spec: RuntimeSpec,
        *,
        session_id: str,
        lifetime_s: float,
        prepare: Callable[[MemoryRuntime], Awaitable[None]],
        shared: bool,
    ) -> AsyncIterator[MemoryRuntime]:
        """The house's own `Workspaces`, on copies in memory."""
        async with AsyncExitStack() as stack:

            async def start(image: str | None) -> MemoryRuntime:
                runtime = await stack.enter_async_context(
                    self.open(spec, session_id=session_id, lifetime_s=lifetime_s)
                )
                if image is not None:
                    self.copies.put(image, runtime)
                return runtime

            workspace = workspace_of(spec, spec.image)
            if workspace is not None and self.workspaces.pays(workspace, shared=shared):
                yield await self.workspaces.obtain(workspace, start, prepare)
            else:
                runtime = await start(None)
                await prepare(runtime)
                yield runtime

    def is_preparing(self, spec: RuntimeSpec) -> bool:
        return self.workspaces.busy(workspace_of(spec, spec.image))

    async def wait_prepared(self, spec: RuntimeSpec) -> None:
        await self.workspaces.wait_settled(workspace_of(spec, spec.image))

    async def has_image(self, image_id: str) -> bool:
        await trio.lowlevel.checkpoint()
        return image_id == self.image

    async def image_id(self, spec: RuntimeSpec) -> str:
        await trio.lowlevel.checkpoint()
        return self.image

    def hold(self, held: bool) -> None:
        self.held = held

    def prewarm(self, spec: RuntimeSpec, count: int) -> None:
        self.wanted[spec.image] = count

    def statistics(self) -> RuntimesStatistics:
        live = sum(runtime.alive for runtime in self.opened)
        return RuntimesStatistics(
            live=live, warm=0, started=len(self.opened), served_warm=0, failed=0, swept=0, service_restarts=0
        )


def _write(log: Path, content: bytes) -> None:
    log.write_bytes(content)


def _write_tar(to: Path, files: Mapping[str, bytes]) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to, "w") as archive:
        for name, content in files.items():
            told = tarfile.TarInfo(name)
            told.size = len(content)
            archive.addfile(told, io.BytesIO(content))


# ── the usual programs ────────────────────────────────────────────────────────


def _true(call: Call) -> int:
    return 0


def _false(call: Call) -> int:
    return 1


def _echo(call: Call) -> int:
    call.stdout += " ".join(call.argv[1:]).encode() + b"\n"
    return 0


def _cat(call: Call) -> int:
    call.stdout += (
        call.stdin if len(call.argv) == 1 else b"".join(call.runtime.files[path] for path in call.argv[1:])
    )
    return 0


async def _sleep(call: Call) -> int:
    await trio.sleep(float(call.argv[1]) if call.argv[1] != "infinity" else math.inf)
    return 0


def _env(call: Call) -> int:
    call.stdout += "".join(f"{name}={value}\n" for name, value in call.env.items()).encode()
    return 0


def _rm(call: Call) -> int:
    for path in call.argv[1:]:
        call.runtime.files.pop(path, None)
        call.runtime.links.discard(path)
    return 0


def _ln(call: Call) -> int:
    call.runtime.links.add(call.argv[-1])
    return 0


def at_once(work: Callable[[Call], int]) -> ProgramFunction:
    """A program that takes no time."""

    async def program(call: Call) -> int:
        await trio.lowlevel.checkpoint()
        return work(call)

    return program


USUAL: dict[str, ProgramFunction] = {
    "true": at_once(_true),
    "false": at_once(_false),
    "echo": at_once(_echo),
    "cat": at_once(_cat),
    "env": at_once(_env),
    "rm": at_once(_rm),
    "ln": at_once(_ln),
    "sleep": _sleep,
}


# ── what any runtime must do ──────────────────────────────────────────────────


async def contract_programs_end_as_they_end(runtime: MemoryRuntime) -> None:
    assert await runtime.run(["true"]) == Ended(exit_code=0, stdout=b"", stderr=b"")
    assert (await runtime.run(["false"])).exit_code == 1
    assert (await runtime.run(["echo", "a  b", "$HOME"])).stdout == b"a  b $HOME\n", (
        "no shell touches an argument"
    )
    missing = await runtime.run(["no-such-program"])
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr


async def contract_stdin_reaches_the_program(runtime: MemoryRuntime) -> None:
    assert (await runtime.run(["cat"], stdin=b"one\0two")).stdout == b"one\0two"
    assert (await runtime.run(["cat"])).stdout == b"", "nothing given is an empty stdin, not a hanging one"


async def contract_the_environment_is_what_was_given(runtime: MemoryRuntime) -> None:
    told = (await runtime.run(["env"], env={"COLOUR": "blue=1"})).stdout.decode().splitlines()
    assert {"COLOUR=blue=1", f"HOME={runtime.home}", "LANG=C.UTF-8"} <= set(told)
    assert any(line.startswith("PATH=") for line in told)


async def contract_files_go_in_and_come_out(runtime: MemoryRuntime) -> None:
    await runtime.put({"/work/a/b.txt": b"hello", "/home/agent/c": b""})
    assert await runtime.read("/work/a/b.txt") == b"hello"
    assert await runtime.read("/work/a/b.txt", limit=2) == b"he"
    assert await runtime.read("/home/agent/c") == b""
    assert await runtime.read("/work/none") is None
    assert (await runtime.run(["cat", "/work/a/b.txt"])).stdout == b"hello"
    await runtime.put({"/work/a/b.txt": b"new"})
    assert await runtime.read("/work/a/b.txt") == b"new"


async def contract_links_are_not_followed(runtime: MemoryRuntime) -> None:
    await runtime.put({"/work/target": b"secret"})
    assert (await runtime.run(["ln", "-s", "/work/target", "/work/link"])).exit_code == 0
    assert await runtime.read("/work/link") is None
    with pytest.raises(RuntimeFault, match="link"):
        await runtime.put({"/work/link": b"x"})
    assert await runtime.read("/work/target") == b"secret"


async def contract_odd_paths_are_refused(runtime: MemoryRuntime) -> None:
    for path in ("relative", "/work/../etc/x"):
        with pytest.raises(RuntimeFault, match="no path in a container"):
            await runtime.put({path: b""})


async def contract_cancelling_ends_the_program(runtime: MemoryRuntime) -> None:
    with trio.move_on_after(0.3) as scope:
        await runtime.run(["sleep", "1000"])
    assert scope.cancelled_caught
    assert (await runtime.run(["true"])).exit_code == 0, "the runtime goes on"


async def contract_end_processes_ends_what_runs(runtime: MemoryRuntime) -> None:
    ended: list[Ended] = []

    async def sleeper() -> None:
        ended.append(await runtime.run(["sleep", "1000"]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper)
        await trio.sleep(1.0)
        await runtime.end_processes()
    assert [each.exit_code for each in ended] == [KILLED]
    assert (await runtime.run(["true"])).exit_code == 0


async def contract_a_seal_keeps_the_workspace_writable(runtime: MemoryRuntime) -> None:
    for _ in range(2):
        await runtime.seal(RuntimeSpec(writable=("/opt/cache",)))
        await runtime.put({"/work/a": b"1", "/tmp/b": b"1", f"{runtime.home}/c": b"1"})
        with pytest.raises(RuntimeFault, match="read-only"):
            await runtime.put({"/etc/d": b"1"})
        await runtime.unseal()
        await runtime.put({"/etc/d": b"1"})
    await runtime.seal(RuntimeSpec(read_only=False))
    await runtime.put({"/etc/d": b"2"})
    await runtime.unseal()


async def contract_what_is_to_be_kept_is_kept(runtime: MemoryRuntime) -> None:
    await runtime.put(
        {"/work/out/a": b"one", "/work/out/b/c": b"two", "/srv/log": b"three", "/work/other": b"no"}
    )
    with tempfile.TemporaryDirectory() as folder:
        kept = await runtime.collect(["out", "/srv/log", "none"], Path(folder) / "deep" / "kept.tar")
        with tarfile.open(kept.path) as archive:
            found = {each.name: archive.extractfile(each).read() for each in archive if each.isfile()}  # type: ignore[union-attr]
    assert found == {"out/a": b"one", "out/b/c": b"two", "srv/log": b"three"}
    assert (kept.files, kept.bytes, kept.left_out) == (3, 11, ("none: No such file or directory",))
    assert kept.metrics()["files"] == 3


async def contract_a_kept_workdir_is_made_again(runtime: MemoryRuntime) -> None:
    await runtime.put({"/work/a": b"one", "/work/deep/er/b": b"two"})
    with tempfile.TemporaryDirectory() as folder:
        kept = (await runtime.collect(["."], Path(folder) / "kept.tar")).path
        await runtime.put({"/work/a": b"changed", "/work/later": b"x", f"{runtime.home}/c": b"stays"})
        await runtime.restore_workdir(kept)
    found = [await runtime.read(path) for path in ("/work/a", "/work/deep/er/b", "/work/later")]
    assert found == [b"one", b"two", None]
    assert await runtime.read(f"{runtime.home}/c") == b"stays"


async def contract_a_snapshot_is_put_into_another(runtime: MemoryRuntime) -> None:
    home = runtime.home
    await runtime.put({"/work/a": b"one", f"{home}/deep/b": b"two", "/srv/c": b"is no part of it"})
    assert await runtime.processes() == frozenset()
    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder) / "kept.tar"
        with pytest.raises(Refused, match="raise max_mb"):
            await runtime.snapshot(RuntimeSpec(), tar, 2)
        assert not tar.exists()
        kept = await runtime.snapshot(RuntimeSpec(), tar, 1 << 20)
        assert {"/work", home, "/tmp"} <= set(kept.places)
        assert kept.files >= 2
        assert kept.missed() == ()
        await runtime.put({"/work/a": b"changed", "/work/later": b"x", "/tmp/later": b"x", "/srv/c": b"new"})
        await runtime.restore_snapshot(tar, kept.places)
    found = [await runtime.read(path) for path in ("/work/a", f"{home}/deep/b", "/srv/c")]
    assert found == [b"one", b"two", b"new"]
    assert [await runtime.read(path) for path in ("/work/later", "/tmp/later")] == [None, None]


async def contract_nothing_was_ended(runtime: MemoryRuntime) -> None:
    assert runtime.ended_because is None
    assert not runtime.ended_for_room
    assert runtime.oom_kills() == 0


CONTRACT = [found for name, found in list(globals().items()) if name.startswith("contract_")]
