"""The node's Podman service: up before anything asks, started again when it dies, gone with the node; and
what a call sees meanwhile.
"""

import os
import signal
from pathlib import Path

import pytest
import trio
import trio.lowlevel
from podman_parts import LIFETIME_S, SMALL, containers_of_node, settings

from polarnode.containers.client import call
from polarnode.containers.exec import SERVICE_DIED
from polarnode.containers.probe import default_state_dir, make_folders, store_at
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.containers.service import PodmanService, sweep
from polarnode.core.errors import ConfigError, RuntimeFault
from polarnode.support.concurrency import open_background


def pid_of(runtimes: NodeRuntimes) -> int:
    pid = runtimes._service.pid
    assert pid is not None
    return pid


@pytest.mark.podman
async def test_service_answers_on_root_socket(runtimes: NodeRuntimes) -> None:
    socket = runtimes._service.socket
    assert (await call(socket, "GET", "/_ping")).status == 200
    assert os.stat(socket.parent).st_mode & 0o777 == 0o700
    with pytest.raises(RuntimeFault, match=r"no such container|no container"):
        (await call(socket, "GET", "/containers/none-such/json")).json()


@pytest.mark.podman
async def test_service_ends_with_the_block(podman: None) -> None:
    async with open_runtimes(settings()) as runtimes:
        pid, socket = pid_of(runtimes), runtimes._service.socket
    assert not await trio.Path(f"/proc/{pid}").exists()
    assert not await trio.Path(socket).exists()


@pytest.mark.podman
async def test_containers_survive_service_death(runtimes: NodeRuntimes) -> None:
    async with runtimes.open(SMALL, session_id="through", lifetime_s=LIFETIME_S) as runtime:

        async def long() -> None:
            script = "echo up > up; while ! test -e go; do sleep 0.1; done; echo ended > ended"
            with pytest.raises(RuntimeFault, match=SERVICE_DIED):
                await runtime.run(["sh", "-c", script])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(long)
            with trio.fail_after(120):
                while not await runtime.read("/work/up"):  # noqa: ASYNC110 (seen from outside)
                    await trio.sleep(0.05)
                os.kill(pid_of(runtimes), signal.SIGKILL)
                while not runtimes.statistics().service_restarts:  # noqa: ASYNC110 (seen from outside)
                    await trio.sleep(0.05)
            await runtime.put({"/work/go": b""})
        assert await runtime.read("/work/ended") == b"ended\n", "the program itself was not touched"
        assert (await runtime.run(["echo", "again"])).stdout == b"again\n"
    async with runtimes.open(SMALL, session_id="after", lifetime_s=LIFETIME_S) as runtime:
        assert runtime.alive


@pytest.mark.podman
async def test_two_nodes_share_a_store(podman: None) -> None:
    async with (
        open_runtimes(settings("one")) as one,
        open_runtimes(settings("two")) as two,
        one.open(SMALL, session_id="a", lifetime_s=LIFETIME_S) as first,
        two.open(SMALL, session_id="b", lifetime_s=LIFETIME_S) as second,
    ):
        assert (await first.run(["echo", "1"])).stdout + (await second.run(["echo", "2"])).stdout == b"1\n2\n"


@pytest.mark.podman
async def test_teardown_reaches_podman_when_cancelled(podman: None) -> None:
    async with open_runtimes(settings("beside")) as beside:
        with trio.move_on_after(60) as scope:
            async with (
                open_runtimes(settings("cut")) as runtimes,
                runtimes.open(SMALL, session_id="cut", lifetime_s=LIFETIME_S) as runtime,
            ):
                scope.cancel()
                await trio.sleep_forever()
        assert not runtime.alive
        assert await containers_of_node(beside, "cut") == [], "nothing was left"


def unstartable(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> PodmanService:
    # so that all of it is in the test's own folder
    monkeypatch.setattr("polarnode.containers.probe.MEMORY_FOLDERS", ())
    store = store_at(folder / "state")
    make_folders(store)
    script = folder / "podman"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    return PodmanService(script, store, store.sockets / "x.sock")


async def test_failed_service_start_gives_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = unstartable(tmp_path, "echo the reason >&2; exit 3", monkeypatch)
    with pytest.raises(RuntimeFault, match="the reason"):
        async with open_background(service.run):
            raise AssertionError("it never came up")


def test_leftovers_of_killed_services_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of the dead, and of their logs the empty and the old; nothing of the living, and nothing that
    is no service's.
    """
    store = unstartable(tmp_path, "true", monkeypatch).store
    dead, alive = 2**22 + 1, os.getpid()
    kept = [
        store.sockets / f"{alive}-aa.sock",
        store.log_dir / f"{alive}-aa.log",
        store.log_dir / f"{dead}-bb.log",
        store.log_dir / "build.log",
    ]
    gone = [
        store.sockets / f"{dead}-aa.sock",
        store.log_dir / f"{dead}-aa.log",
        store.log_dir / f"{dead}-cc.log",
    ]
    for path in (*kept, *gone):
        path.touch()
    for events in (store.log_dir / f"{dead}-bb.log", store.log_dir / f"{dead}-cc.log"):
        events.write_text("its last words")
    os.utime(store.log_dir / f"{dead}-cc.log", (0, 0))
    sweep(store)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)


async def test_background_task_ends_after_users() -> None:
    events: list[str] = []

    async def service(ready: trio.Event) -> None:
        ready.set()
        try:
            await trio.sleep_forever()
        finally:
            events.append("service ended")

    with trio.move_on_after(0.05):
        async with open_background(service):
            try:
                await trio.sleep_forever()
            finally:
                with trio.move_on_after(5, shield=True):
                    await trio.sleep(0.05)
                    events.append("user cleaned up")
    assert events == ["user cleaned up", "service ended"]


async def test_background_error_ends_the_block() -> None:
    async def service(ready: trio.Event) -> None:
        ready.set()
        await trio.lowlevel.checkpoint()
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        async with open_background(service):
            await trio.sleep_forever()


async def test_bug_is_raised_as_group() -> None:
    async def service(ready: trio.Event) -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError):
        async with open_background(service):
            await trio.sleep_forever()


def test_default_store_is_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_state_dir().name == "podman"
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert default_state_dir() == Path("/somewhere/polarnode/podman")
