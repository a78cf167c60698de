"""The launcher `ray`, part by part: which machines, an actor's node, the driver's life."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from click.testing import CliRunner

from polarnode.cli import main
from polarnode.core.codec.json import read_json, structure
from polarnode.core.errors import ConfigError
from polarnode.fleet import ray_host, ray_hosts, ray_launcher
from polarnode.fleet.ray_host import NodeHost, NodeRecord, process_start
from polarnode.fleet.ray_launcher import ray_nodes
from polarnode.fleet.ray_machines import (
    HOST_RESOURCE,
    NAME_LABEL,
    HostOrder,
    RayMachine,
    RayNews,
    RayOrder,
    find_machines,
    machine_refusal,
    node_arguments,
)
from polarnode.support.locks import is_locked, take_lock

PROGRAM = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_): pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def listed(name: str, *, alive: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "NodeID": f"id-{name}",
        "Alive": alive,
        "NodeManagerHostname": name,
        "NodeManagerAddress": "10.0.0.5",
        "Resources": {"CPU": 64.0, "GPU": 8.0},
        "Labels": {},
        **more,
    }


def wants(gpus: int) -> RayOrder:
    return RayOrder(address="auto", gpus_per_node=gpus, folder="/x")


def names(found: list[RayMachine]) -> list[str]:
    return [each.name for each in found]


# ── which machines ────────────────────────────────────────────────────────────


def test_living_gpu_machines_get_nodes() -> None:
    head = listed("head", Resources={"CPU": 8.0})
    half = listed("half", Resources={"GPU": 4.0})
    found = [head, half, listed("b"), listed("a"), listed("dead", alive=False)]
    assert names(find_machines(found, wants(8))) == ["a", "b"]
    assert names(find_machines(found, wants(4))) == ["a", "b", "half"]
    assert names(find_machines(found, wants(0))) == ["a", "b", "half", "head"]


def test_only_marked_machines_get_nodes() -> None:
    """Marked machines alone have nodes, where any machine is marked."""
    marked = listed("m", Resources={HOST_RESOURCE: 1.0}, Labels={NAME_LABEL: "gpu-7"})
    gone = listed("gone", alive=False, Resources={HOST_RESOURCE: 1.0})
    (found,) = find_machines([listed("a"), marked, gone], wants(8))
    assert (found.name, found.marked, found.ray_id, found.host) == ("gpu-7", True, "id-m", "10.0.0.5")
    assert names(find_machines([listed("a"), gone], wants(8))) == ["a"], (
        "nobody knows what a dead machine had"
    )
    assert find_machines([listed("a"), gone], evolve(wants(8), marked=True)) == []


def test_unusable_machine_is_one_sentence() -> None:
    (machine,) = find_machines([listed("a")], wants(8))
    assert machine_refusal(machine, "t") is None
    assert "set POLARNODE_TOKEN" in (machine_refusal(machine, None) or "")
    assert machine_refusal(evolve(machine, host="127.0.0.1"), None) is None
    for name in ("", "..", "a/b"):
        assert NAME_LABEL in (machine_refusal(evolve(machine, name=name), "t") or "")


def test_node_arguments_include_address_and_gpus() -> None:
    (machine,) = find_machines([listed("a")], wants(8))
    order = RayOrder(address="auto", gpus_per_node=8, folder="/x", options=("--model", "/m"), token="t")
    found = node_arguments(HostOrder(machine=machine, order=order), 8080, "/x/a")
    assert found == (
        *("-m", "polarnode.cli", "--host", "10.0.0.5", "--port", "8080", "--state-dir", "/x/a"),
        *("--gpus", "0-7", "--model", "/m"),
    )
    named = evolve(order, options=("--gpus", "0-3"))
    assert node_arguments(HostOrder(machine=machine, order=named), 1, "/x")[-2:] == ("--gpus", "0-3")
    none = evolve(order, gpus_per_node=0, options=("--cpu",))
    assert node_arguments(HostOrder(machine=machine, order=none), 1, "/x")[-1] == "--cpu"
    assert "'t'" not in repr(order), "a token is in no log"


def test_order_digest_covers_node_settings() -> None:
    order = RayOrder(address="auto", gpus_per_node=8, folder="/x", token="t")
    assert evolve(order, address="10.0.0.1:6379", stop=True).digest == order.digest
    for other in ({"token": "u"}, {"options": ("--tp", "2")}, {"folder": "/y"}, {"gpus_per_node": 4}):
        assert evolve(order, **other).digest != order.digest


# ── the actor ────────────────────────────────────────────────────────────


def until(holds: Callable[[], Any], what: str, *, patience_s: float = 30.0) -> Any:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not in {patience_s:g} s: {what}")


def host_order(folder: Path, *command: str, **more: Any) -> HostOrder:
    machine = RayMachine(ray_id="id", name="m", host="127.0.0.1", marked=True)
    order = RayOrder(address="auto", gpus_per_node=0, folder=str(folder), command=command, **more)
    return HostOrder(machine=machine, order=order)


@contextmanager
def ended_by_record(folder: Path) -> Iterator[None]:
    """Whatever became of actors, the node of `folder` ends with the block."""
    try:
        yield
    finally:
        record = NodeRecord.read(folder / "m.json")
        if record is not None and process_start(record.pid) == record.began:
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)


def lose(actor: NodeHost) -> None:
    """As the kernel does when an actor is killed: its lock is free, its node lives."""
    actor._ending.set()
    actor._thread.join()
    assert actor._lifeline_lock is not None
    actor._lifeline_lock.close()
    actor._lifeline_lock = None


def test_next_actor_adopts_running_node(tmp_path: Path) -> None:
    order = host_order(tmp_path, "-c", PROGRAM, "{host}", "{port}")
    with ended_by_record(tmp_path):
        first = NodeHost(order)
        report = until(lambda: (found := first.look()).url and found, "a node serves")
        assert report.problem == ""
        assert report.digest == order.order.digest
        second = NodeHost(order)
        until(lambda: second.look().url == report.url, "a second actor gives the same address")
        assert second._lifeline_lock is None, "the lifeline is the first one's"
        lose(first)
        until(lambda: second._lifeline_lock is not None, "it takes the lifeline")
        assert second.look().pid == report.pid
        second.stop()
        first.stop()  # it reaps its child
        assert not is_locked(tmp_path / "m.json")
        assert process_start(report.pid) != NodeRecord.read(tmp_path / "m.json").began  # type: ignore[union-attr]


def test_killed_node_restarts_at_its_address(tmp_path: Path) -> None:
    order = host_order(tmp_path, "-c", PROGRAM, "{host}", "{port}")
    with ended_by_record(tmp_path):
        actor = NodeHost(order)
        report = until(lambda: (found := actor.look()).url and found, "a node serves")
        actor._started -= ray_host.SETTLED_S  # it had lived long
        os.kill(report.pid, signal.SIGKILL)
        again = until(lambda: (found := actor.look()).pid not in (None, report.pid) and found, "another one")
        assert again.url == report.url
        actor.stop()


def test_failed_node_start_gives_reason(tmp_path: Path) -> None:
    actor = NodeHost(host_order(tmp_path, "-c", "raise SystemExit('choose where the model runs')"))
    found = until(lambda: (found := actor.look()).problem and found, "a problem")
    assert found.problem == "its node is not up: choose where the model runs"
    assert found.url is None
    actor.stop()


def test_secrets_go_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, json; print(json.dumps(dict(os.environ)), flush=True); import time; time.sleep(60)"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ended_by_record(tmp_path):
        actor = NodeHost(host_order(tmp_path, "-c", program, token="secret", log="dsn-secret", orphan_s=7.0))
        log = tmp_path / "m.log"
        line = until(lambda: log.exists() and "\n" in log.read_text() and log.read_text(), "it prints")
        found = json.loads(line)
        assert found["POLARNODE_TOKEN"] == "secret"
        assert found["POLARNODE_LOG"] == "dsn-secret"
        assert found["POLARNODE_NODE_ID"] == "m"
        assert found["POLARNODE_LIFELINE"] == str(tmp_path / "m.lock")
        assert found["POLARNODE_ORPHAN_S"] == "7"
        assert "OMP_NUM_THREADS" not in found
        pid = until(lambda: actor.look().pid, "a record")
        assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert log.stat().st_mode & 0o077 == 0
        assert is_locked(tmp_path / "m.lock")
        actor.stop()


def test_second_start_finds_lock_taken(tmp_path: Path) -> None:
    held = take_lock(tmp_path / "m.json")
    assert held is not None
    argv = [sys.executable, "-m", "polarnode.fleet.ray_host", str(tmp_path / "m.json"), "http://127.0.0.1:1"]
    found = subprocess.run([*argv, sys.executable, "-c", ""], timeout=60)
    held.close()
    assert found.returncode == ray_host.EXIT_TAKEN
    assert NodeRecord.read(tmp_path / "m.json") is None, "it wrote nothing"


# ── the driver ────────────────────────────────────────────────────────────


@contextmanager
def a_driver(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> Iterator[RayOrder]:
    """A program in place of the driver."""
    file = folder / "driver.py"
    file.write_text(program)
    monkeypatch.setattr(ray_launcher, "DRIVER", (str(file),))
    monkeypatch.setattr(ray_launcher, "PAUSES", evolve(ray_launcher.PAUSES, first_s=0.05, longest_s=0.05))
    yield RayOrder(address="auto", gpus_per_node=0, folder=str(folder), token="secret")


ONE_LINE = """
import json, os, sys
order = json.loads(sys.stdin.readline())
assert order["token"] == "secret"
print(json.dumps({"nodes": {"m": "http://127.0.0.1:1"}, "problems": {"n": "no GPUs"}}), flush=True)
if os.path.exists(sys.argv[0] + ".crash"): os._exit(1)
sys.stdin.read()
"""


async def test_dead_driver_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_driver(monkeypatch, tmp_path, ONE_LINE) as order, trio.fail_after(60):
        async with ray_nodes(order, tmp_path) as nodes:
            assert nodes.urls == {"m": "http://127.0.0.1:1"}
            assert nodes.problems == {"n": "no GPUs"}
            (tmp_path / "driver.py.crash").touch()
            assert nodes.driver is not None
            nodes.driver.kill()
            while nodes.driver_starts < 4:  # noqa: ASYNC110
                await trio.sleep(0.02)
            assert nodes.urls == {"m": "http://127.0.0.1:1"}


async def test_missing_cluster_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = """
import json
print(json.dumps({"error": "there is no Ray cluster at auto"}), flush=True)
"""
    refused = pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="no Ray cluster at auto"))
    with a_driver(monkeypatch, tmp_path, gone) as order, trio.fail_after(60), refused:
        async with ray_nodes(order, tmp_path):
            raise AssertionError("it began without a cluster")


async def test_marked_machines_stay_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next driver is told, or the death of all marked machines would choose others."""
    program = """
import json, sys
order = json.loads(sys.stdin.readline())
print(json.dumps({"nodes": {"m": "marked" if order["marked"] else "any"}, "marked": True}), flush=True)
"""
    with a_driver(monkeypatch, tmp_path, program) as order, trio.fail_after(60):
        async with ray_nodes(order, tmp_path) as nodes:
            while nodes.urls != {"m": "marked"}:  # noqa: ASYNC110
                await trio.sleep(0.02)


async def test_hanging_or_invalid_driver_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "SILENT_S", 0.5)
    program = ONE_LINE.replace("sys.stdin.read()", "print('not JSON', flush=True); sys.stdin.read()")
    for each in (ONE_LINE, program):
        with a_driver(monkeypatch, tmp_path, each) as order, trio.fail_after(60):
            async with ray_nodes(order, tmp_path) as nodes:
                while nodes.driver_starts < 3:  # noqa: ASYNC110
                    await trio.sleep(0.02)


def test_driver_retries_after_actor_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor whose name is being given back is asked for again; a machine that is refused is not."""
    asked: list[str] = []

    def no_actor(given: HostOrder) -> object:
        asked.append(given.machine.name)
        raise ValueError("the name is taken\nmore")

    monkeypatch.setattr(ray_hosts, "_actor", no_actor)
    order = RayOrder(address="auto", gpus_per_node=8, folder="/x", token="t")
    driver = ray_hosts.RayDriver(order=order)
    cluster = [listed("a"), listed("b/c")]
    assert driver.poll_cluster(cluster, 0.0).problems["a"] == "its actor: the name is taken"
    assert NAME_LABEL in driver.poll_cluster(cluster, 0.5).problems["b/c"]
    marked = listed("m", Resources={HOST_RESOURCE: 1.0})
    assert not driver.poll_cluster(cluster, 2.0).marked
    assert asked == ["a", "a"]
    assert driver.poll_cluster([], 3.0) == RayNews()
    assert driver.poll_cluster([marked], 4.0).marked
    assert driver.poll_cluster(cluster, 9.0) == RayNews(marked=True), (
        "no machine takes the place of a marked one"
    )


def test_driver_line_round_trips() -> None:
    news = RayNews(nodes={"a": "http://a:1"}, problems={"b": "x"})
    with open(os.devnull, "r+b") as sink:
        ray_hosts._write_news(sink, news)
    assert structure(read_json(b'{"nodes": {"a": "http://a:1"}, "problems": {"b": "x"}}'), RayNews) == news


# ── the command ────────────────────────────────────────────────────────────


def test_missing_ray_suggests_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher.importlib.util, "find_spec", lambda name: None)
    found = CliRunner().invoke(main, ["fleet", "--ray", "auto", "--log", "host=/nowhere"])
    assert found.exit_code == 1
    assert "pip install 'polarnode[ray]'" in found.output


def test_stop_needs_a_cluster() -> None:
    found = CliRunner().invoke(main, ["fleet", "--stop"])
    assert found.exit_code == 2
    assert "--ray" in found.output


def test_command_without_cluster_ends_clearly(tmp_path: Path) -> None:
    arguments = ["--ray", "nothing", "--log", "host=/nowhere", "--state-dir", str(tmp_path)]
    argv = [sys.executable, "-m", "polarnode.cli", "fleet", *arguments]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1, found.stderr
    assert "there is no Ray cluster at nothing" in found.stderr
