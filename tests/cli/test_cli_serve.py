"""Signals as a request to stop, and a node that serves until it is asked to."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from polarnode.cli import serve
from polarnode.cli.stopping import StopRequest, stop_on_signals
from polarnode.core.errors import ConfigError
from polarnode.http.server import Address, listening_socket
from polarnode.node.config import NodeConfig


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_second_signal_forces_exit(number: signal.Signals) -> None:
    asked = trio.Event()
    stop = StopRequest(pytest.fail)
    with pytest.RaisesGroup(KeyboardInterrupt):
        async with trio.open_nursery() as nursery:
            await nursery.start(stop_on_signals, stop)
            stop.act = asked.set
            assert not stop.requested
            os.kill(os.getpid(), number)
            with trio.fail_after(60):
                await asked.wait()
            assert stop.requested
            os.kill(os.getpid(), number)
            await trio.sleep_forever()


HANGS = """
import trio
from polarnode.cli.stopping import StopRequest, stop_on_signals

async def main():
    async with trio.open_nursery() as nursery:
        stop = StopRequest(lambda: print("asked", flush=True))
        await nursery.start(stop_on_signals, stop)
        print("started", flush=True)
        with trio.CancelScope(shield=True):  # as an update of weights that hangs
            await trio.sleep_forever()

trio.run(main)
"""


def test_second_signal_ends_hanging_node() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in ("started", "asked"):
            assert program.stdout.readline().strip() == line
            program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130


async def test_signal_during_start_exits() -> None:
    async with trio.open_nursery() as nursery:
        stop = StopRequest(nursery.cancel_scope.cancel)
        await nursery.start(stop_on_signals, stop)
        await wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGINT)
        with trio.fail_after(60):
            await trio.sleep_forever()
    assert stop.requested


def test_impossible_state_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--state-dir .* cannot be written"):
        serve.serve(NodeConfig(cpu=True, state_dir=str(tmp_path / "file" / "state")))


def test_unopenable_log_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "node.log").mkdir()  # as a file system that is read-only refuses it
    with pytest.raises(ConfigError, match=r"--state-dir .* cannot be written: .*node.log"):
        serve.serve(NodeConfig(cpu=True, port=0, state_dir=str(tmp_path)))


def test_taken_port_is_reported_early(tmp_path: Path) -> None:
    with (
        listening_socket(Address(host="127.0.0.1", port=0)) as taken,
        pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1 port"),
    ):
        serve.serve(NodeConfig(cpu=True, port=taken.getsockname()[1], state_dir=str(tmp_path / "state")))
    assert os.listdir(tmp_path / "state") == []


def test_port_answers_during_engine_start(tmp_path: Path) -> None:
    with listening_socket(Address(host="127.0.0.1", port=0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "polarnode.cli", "--engine", "simulated", "--no-containers"]
    serving = [*argv, "--port", str(port), "--state-dir", str(tmp_path / "state")]
    told: list[dict[str, Any]] = []
    with subprocess.Popen(serving, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            while not told or not told[-1]["ready"]:
                assert child.poll() is None, child.communicate()[0]
                with suppress(httpx2.ConnectError):
                    found = httpx2.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=60)
                    told.append(found.json())
                    assert found.status_code == (200 if told[-1]["ready"] else 503)
                time.sleep(0.1)
        finally:
            child.send_signal(signal.SIGINT)
            child.communicate()
    assert re.fullmatch(r"the (node|engine) starts, \d+ s so far", told[0]["reason"])
    assert any(each.get("reason", "").startswith("the engine starts") for each in told)


@pytest.mark.engine
@pytest.mark.podman
def test_node_serves_until_interrupted(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "polarnode.cli"]
    serving = [*argv, "--cpu", "--port", "0", "--state-dir", str(tmp_path / "state")]
    with subprocess.Popen(serving, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            url = address(child)
            asked = subprocess.run(
                [*argv, "export", "--url", url], capture_output=True, text=True, check=False
            )
            child.send_signal(signal.SIGINT)
            said = child.communicate()[0]
        finally:
            child.kill()
    assert (asked.returncode, asked.stderr) == (0, "0 trajectories\n")
    assert child.returncode == 0, said
    assert "stopping: sessions are ended and saved" in said


def address(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    said = []
    for line in child.stdout:
        said.append(line)
        if found := re.search(r"serving on (http://\S+)", line):
            return found[1]
    pytest.skip(f"no node can start here: {said[-1] if said else ''}")
