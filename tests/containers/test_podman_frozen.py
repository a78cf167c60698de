"""Real containers and CRIU: processes below the first one, frozen into files while they run, and copies of
them that go on from the same moment with names of their own.
"""

import os
import re
import socket
import stat
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import define, evolve
from podman_parts import LIFETIME_S, SMALL, settings

from polarnode.containers.below import KILLED, NOTES, OUTPUT, DetachedProgram, number_of
from polarnode.containers.container import shape_of
from polarnode.containers.criu import _why_not, first_error, freezing_obstacle
from polarnode.containers.frozen import IMAGES_FOLDER
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.containers.starting import RuntimeStarter
from polarnode.core.errors import ForkError, Refused, RuntimeFault
from polarnode.core.snapshots import FrozenImage

# counts in memory and in a file that it holds open, and says what it is told by the node once it is told something
COUNTS = """
import os, socket, sys, time
def told():
    while True:
        try:
            with socket.create_connection(("127.0.0.1", 8080)) as held:
                return held.recv(100).decode()
        except OSError:
            time.sleep(0.05)
begun, step = time.monotonic(), 0
print("begins", sys.stdin.read(), os.environ["WORD"], flush=True)
out = open("/work/step", "w")
if os.fork() == 0:
    while True:
        step += 1
        out.seek(0), out.write(f"{step} {os.getpid()} {time.monotonic() - begun:.3f}"), out.flush()
        time.sleep(0.02)
word = ""
while not word:
    word = told()
print("was told", word, flush=True)
sys.exit(int(word))
"""


@pytest.fixture
async def freezing(podman: None) -> AsyncIterator[NodeRuntimes]:
    async with open_runtimes(settings("frozen", warm=0)) as runtimes:
        if runtimes.freezing_obstacle is not None:
            pytest.skip(f"this machine cannot freeze sessions: {runtimes.freezing_obstacle}")
        yield runtimes


async def step(runtime: PodmanRuntime) -> tuple[int, int, float]:
    text = (await runtime.read("/work/step") or b"").split()
    return (int(text[0]), int(text[1]), float(text[2])) if len(text) == 3 else (0, 0, 0.0)


async def counts(runtime: PodmanRuntime, least: int) -> tuple[int, int, float]:
    with trio.fail_after(60):
        while (found := await step(runtime))[0] < least:  # noqa: ASYNC110 (a container has no events)
            await trio.sleep(0.02)
    return found


async def tell(endpoint: socket.socket, word: bytes) -> None:
    """Answer the connection that waits at an endpoint."""
    with trio.fail_after(60):
        with trio.socket.from_stdlib_socket(endpoint.dup()) as listener:
            connection, _ = await listener.accept()
            with connection:
                await connection.send(word)


@asynccontextmanager
async def counting(runtimes: NodeRuntimes, log: Path) -> AsyncIterator[tuple[PodmanRuntime, int]]:
    """A sealed container in which COUNTS runs below the first process, with the number of its shell."""
    async with runtimes.open(SMALL, session_id="frozen", lifetime_s=LIFETIME_S) as runtime:
        await runtime.put({"/work/counts.py": COUNTS.encode()})
        await runtime.run(
            ["sh", "-c", "mkdir -m 750 /work/deep && ln -s none /work/deep/link && rm /etc/motd"], user="0"
        )
        await runtime.seal(SMALL)
        number = await runtime.start_detached(
            ["python3", "/work/counts.py"], env={"WORD": "of env"}, stdin=b"of stdin"
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: runtime.follow_detached(number, log=log, limit=1000))
            await counts(runtime, 3)
            yield runtime, number
            nursery.cancel_scope.cancel()


async def tree(runtime: PodmanRuntime) -> str:
    """What a container holds, but for what goes on."""
    found = await runtime.run(
        [
            "sh",
            "-c",
            "cd /; ls etc/motd; find work home tmp -not -name step -printf '%p %m %U %G %s %l %T@\\n' | sort",
        ]
    )
    return found.stdout.decode()


@pytest.mark.podman
async def test_copies_continue_from_frozen_moment(freezing: NodeRuntimes, tmp_path: Path) -> None:
    """Copies go on from the frozen moment, each with its own endpoint."""
    folder, codes = tmp_path / "image", dict[str, int]()
    async with counting(freezing, tmp_path / "log") as (runtime, number):
        untouched = await tree(runtime)
        image = await runtime.write_frozen(SMALL, folder, number=number, limit=256 << 20)
        held = (await step(runtime))[0]
        await counts(runtime, held + 3)  # the original goes on
        before = await tree(runtime)
        assert before == untouched, "CRIU leaves no trace in it"
        assert runtime.alive
        assert not runtime.frozen
    assert [each.comm for each in image.processes] == ["sh", "python3", "python3"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    async def copy(word: bytes) -> None:
        async with freezing.open_frozen(
            SMALL, image, folder, session_id=word.decode(), lifetime_s=LIFETIME_S
        ) as runtime:
            first = await step(runtime)
            await trio.sleep(0.2)
            assert await step(runtime) == first, "nothing runs before it is let"
            log = tmp_path / word.decode()
            async with trio.open_nursery() as nursery:

                async def follow() -> None:
                    codes[word.decode()] = await runtime.follow_copy(image, log=log, limit=1000)

                nursery.start_soon(follow)
                after = await counts(runtime, first[0] + 3)
                # the same process, and its clock goes on: no copy sees the time in between
                assert after[1] == first[1]
                assert after[2] - first[2] < 30
                assert await tree(runtime) == before
                await runtime.put({"/work/own": word})
                with pytest.raises(RuntimeFault, match="read-only"):
                    await runtime.put({"/etc/own": b""})
                await tell(runtime.endpoint, word)
            assert log.read_text() == f"was told {word.decode()}\n"
            await runtime.end_processes()
            await runtime.unseal()
            await runtime.put({"/etc/own": b""})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(copy, b"7")
        nursery.start_soon(copy, b"9")
    assert codes == {"7": 7, "9": 9}
    assert "begins of stdin of env" in (tmp_path / "log").read_text()
    missing = evolve(image, processes=image.processes[:2])
    async with freezing.open_frozen(SMALL, missing, folder, session_id="x", lifetime_s=LIFETIME_S) as runtime:
        with pytest.raises(ForkError, match=r"process \d+ \(python3\) is only in the copy"):
            await runtime.follow_copy(missing, log=tmp_path / "x", limit=100)
    with pytest.raises(ForkError, match="was frozen on Linux"):
        async with freezing.open_frozen(
            SMALL, evolve(image, machine="2.4"), folder, session_id="x", lifetime_s=LIFETIME_S
        ):
            pass
    (folder / IMAGES_FOLDER / "inventory.img").write_bytes(b"")
    with pytest.raises(RuntimeFault, match="cannot restore it"):
        async with freezing.open_frozen(SMALL, image, folder, session_id="x", lifetime_s=LIFETIME_S):
            pass
    assert freezing.statistics().live == 0


@pytest.mark.podman
async def test_uncopyable_state_is_not_frozen(freezing: NodeRuntimes, tmp_path: Path) -> None:
    """What no copy would have is not frozen, and the program goes on."""
    talk = "import socket, time; a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname()); c = a.accept(); open('/work/up', 'w'); time.sleep(600)"
    async with counting(freezing, tmp_path / "log") as (runtime, number):
        with pytest.raises(Refused, match="more than 0 MiB: raise max_mb"):
            await runtime.write_frozen(SMALL, tmp_path / "image", number=number, limit=1 << 10)
        await runtime.run(["setsid", "sh", "-c", f'exec python3 -c "{talk}" >/dev/null 2>&1 </dev/null'])
        while await runtime.read("/work/up") is None:  # noqa: ASYNC110 (a container has no events)
            await trio.sleep(0.02)
        with pytest.raises(RuntimeFault, match=r"connected to each other by TCP \(port \d+ to \d+\)"):
            await runtime.write_frozen(SMALL, tmp_path / "image", number=number, limit=256 << 20)
        assert not (tmp_path / "image").exists()
        await counts(runtime, (await step(runtime))[0] + 3)


STOPS = """
setsid sleep 600 >/dev/null 2>&1 </dev/null & sleeper=$!
{halt}
echo up > /work/up
while :; do n=$((n + 1)); echo "$n 0 0" > /work/step; sleep 0.05; done
"""
STOPPED = "sleep 0.3; kill -STOP $sleeper"
TRACES = (
    "python3 -c 'import ctypes, sys, time; ctypes.CDLL(None).ptrace(16, int(sys.argv[1]), 0, 0);"
    ' open("/work/traced", "w"); time.sleep(600)\' $sleeper >/dev/null 2>&1 </dev/null &'
    " until [ -e /work/traced ]; do sleep 0.05; done"
)


@asynccontextmanager
async def halted(runtimes: NodeRuntimes, log: Path, halt: str) -> AsyncIterator[tuple[PodmanRuntime, int]]:
    """A program below the first process that counts, and of which a child was halted."""
    async with runtimes.open(SMALL, session_id="halted", lifetime_s=LIFETIME_S) as runtime:
        number = await runtime.start_detached(["sh", "-c", STOPS.format(halt=halt)], env={})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: runtime.follow_detached(number, log=log, limit=1000))
            while await runtime.read("/work/up") is None:  # noqa: ASYNC110 (a container has no events)
                await trio.sleep(0.02)
            yield runtime, number
            nursery.cancel_scope.cancel()
        assert not await runtime.busy()


@pytest.mark.podman
@pytest.mark.parametrize(
    ("halt", "why"),
    [(STOPPED, r"process \d+ \(sleep\) is stopped"), (TRACES, r"process \d+ \(sleep\) is traced")],
    ids=["stopped", "traced"],
)
async def test_halted_process_is_not_frozen(
    freezing: NodeRuntimes, tmp_path: Path, halt: str, why: str
) -> None:
    """CRIU would wait for it in a frozen group, and the session with it."""
    async with halted(freezing, tmp_path / "log", halt) as (runtime, number):
        with pytest.raises(RuntimeFault, match=why):
            await runtime.write_frozen(SMALL, tmp_path / "image", number=number, limit=256 << 20)
        assert not (tmp_path / "image").exists()
        await counts(runtime, (await step(runtime))[0] + 3)


@pytest.mark.podman
async def test_hanging_dump_is_killed(
    freezing: NodeRuntimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process is stopped in the moment between the look and the freeze."""
    monkeypatch.setattr("polarnode.containers.frozen._halted_reason", lambda _: None)
    monkeypatch.setattr("polarnode.containers.criu.DUMP_S", 2.0)
    async with halted(freezing, tmp_path / "log", STOPPED) as (runtime, number):
        with pytest.raises(RuntimeFault, match="criu was not done after 2 s and was killed"):
            await runtime.write_frozen(SMALL, tmp_path / "image", number=number, limit=256 << 20)
        assert not runtime.frozen
        await counts(runtime, (await step(runtime))[0] + 3)


@pytest.mark.podman
async def test_shared_memory_counts_as_memory(freezing: NodeRuntimes, tmp_path: Path) -> None:
    shares = "import mmap, time; m = mmap.mmap(-1, 40 << 20); m.write(bytes(40 << 20)); open('/work/up', 'w'); time.sleep(600)"
    async with counting(freezing, tmp_path / "log") as (runtime, number):
        await runtime.run(["setsid", "sh", "-c", f'exec python3 -c "{shares}" >/dev/null 2>&1 </dev/null &'])
        while await runtime.read("/work/up") is None:  # noqa: ASYNC110 (a container has no events)
            await trio.sleep(0.02)
        with pytest.raises(Refused, match="more than 40 MiB: raise max_mb"):
            await runtime.write_frozen(SMALL, tmp_path / "image", number=number, limit=40 << 20)
        assert not (tmp_path / "image").exists()


@pytest.mark.podman
async def test_nested_program_end_and_code(freezing: NodeRuntimes, tmp_path: Path) -> None:
    """A program below is ended, and its exit code is read."""
    async with freezing.open(SMALL, session_id="below", lifetime_s=LIFETIME_S) as runtime:
        number = await runtime.start_detached(["no such program"], env={})
        assert await runtime.follow_detached(number, log=tmp_path / "log", limit=1000) == 127
        assert "no such program" in (tmp_path / "log").read_text()
    async with freezing.open(SMALL, session_id="below", lifetime_s=LIFETIME_S) as runtime:
        script = "trap 'echo left; exit 0' TERM; touch /work/up; while :; do sleep 0.1; done"
        number = await runtime.start_detached(["sh", "-c", script], env={})
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: runtime.follow_detached(number, log=tmp_path / "log", limit=1000))
                while await runtime.read("/work/up") is None:  # noqa: ASYNC110 (a container has no events)
                    await trio.sleep(0.02)
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught
        assert not await runtime.busy()


@pytest.mark.podman
async def test_node_without_criu_copies_nothing(runtimes: NodeRuntimes, tmp_path: Path) -> None:
    starter: RuntimeStarter = evolve(runtimes._pool.starter, criu=None)
    image = FrozenImage(
        bytes=0,
        number=2,
        shift=0,
        container="c",
        name="n",
        root="/r",
        image_id="i",
        machine="m",
        processes=(),
    )
    with pytest.raises(RuntimeFault, match="cannot restore frozen containers"):
        await starter.restore(shape_of(SMALL, "x"), image, tmp_path, session_id="x", lifetime_s=1.0)


@define(eq=False)
class Hollow:
    """A container of which nothing runs; its root is a folder here."""

    root: int

    def members(self) -> list[int]:
        return []

    def alive(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("notes", "code"),
    [
        (b"2\n3\n", 3),
        (b"2\n", KILLED),
        (b"", KILLED),
        (b"2\n" + b"9" * 60 + b"\n", KILLED),
        (b"2\n-1\n", KILLED),
        (None, KILLED),
    ],
)
async def test_invalid_exit_note_means_killed(tmp_path: Path, notes: bytes | None, code: int) -> None:
    """A number that no program ends with, or a pipe that nobody writes to."""
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / OUTPUT)
    if notes is None:
        os.mkfifo(tmp_path / NOTES)
    else:
        (tmp_path / NOTES).write_bytes(notes)
    root = os.open(tmp_path, os.O_RDONLY)
    below = DetachedProgram(inside=Hollow(root), execs=None, freeze=None, shift=0)  # type: ignore[arg-type]
    try:
        assert await below.follow(2, lambda *_: None) == code
        (tmp_path / OUTPUT).unlink()
        (tmp_path / OUTPUT).write_bytes(b"")
        with pytest.raises(ForkError, match="it is no pipe any more"):
            await below.follow(2, lambda *_: None)
    finally:
        os.close(root)


# ── what doctor says ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo 'Version: 3.17.1'", r"criu is 3\.17, and 4\.2 is the oldest that works: apt-get install"),
        ("echo no; exit 1", "--version fails: no"),
        (
            '[ "$1" = check ] || { echo Version: 4.2.1; exit; }; echo "(0.1) Error (criu/a.c:1): no timens"; exit 1',
            "criu check: no timens",
        ),
        ("echo 'Version: 4.2.1'", None),
        ("echo 'Version: 10.0'", None),
    ],
)
async def test_doctor_names_missing_criu_features(tmp_path: Path, script: str, sentence: str | None) -> None:
    criu = tmp_path / "criu"
    criu.write_text(f"#!/bin/sh\n{script}\n")
    criu.chmod(0o755)
    found = await obstacle(criu)
    assert found is None if sentence is None else re.search(sentence, found or "")


async def obstacle(criu: Path | None, **more: object) -> str | None:
    given = {"oci_runtime": Path("/usr/bin/runc"), "freezes": True, "overlay": True, "root": True}
    return await freezing_obstacle(criu, **{**given, **more})  # type: ignore[arg-type]


async def test_doctor_names_missing_machine_features() -> None:
    assert "criu is not installed" in (await obstacle(None) or "")
    for lack, word in (
        ({"root": False}, "needs root"),
        ({"oci_runtime": Path("/usr/bin/crun")}, "run by runc"),
        ({"freezes": False}, "freezer"),
        ({"overlay": False}, "native overlay"),
    ):
        assert word in (await obstacle(Path("/bin/true"), **lack) or "")


def test_process_number_lasts_until_end() -> None:
    assert number_of(os.getpid()) is not None
    assert number_of(1 << 30) is None


def test_first_log_error_without_location() -> None:
    log = (
        "(00.1) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
        "(00.2) Warn  (criu/x.c:1): w\n(00.3)     11: Error (criu/files-reg.c:2294): File . has bad mode\n"
        "(00.4) Error (criu/cr-restore.c:2331): Restoring FAILED.\n"
    )
    assert first_error(log) == "File . has bad mode"
    assert first_error("") is None


@pytest.mark.parametrize(
    ("code", "output", "why"),
    [
        (-9, b"", "the container runtime was ended by signal 9"),
        (1, b'time="now" level=error msg="read unixpacket @->@: EOF"\n', "it ended in the middle"),
        (1, b"words\nlast words\n", "last words"),
    ],
)
def test_killed_dump_is_reported(tmp_path: Path, code: int, output: bytes, why: str) -> None:
    done = subprocess.CompletedProcess[bytes]([], code, output)
    assert why in _why_not(done, tmp_path / "dump.log")
    (tmp_path / "dump.log").write_text("(00.3)     11: Error (criu/files-reg.c:2294): File . has bad mode\n")
    assert ("File . has bad mode" in _why_not(done, tmp_path / "dump.log")) == (code == 1)
