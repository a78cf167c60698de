"""Three machines as three network namespaces: the command of docs/fleet.md, word for word, with hollow nodes. Their
PostgreSQL is reached by its socket, which no namespace hides.

One switch in a namespace of its own joins them, so that nothing of it touches this machine's network.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from fleet_kit import hollow_task
from postgres_kit import Cluster, running_cluster

TOKEN = "a-token-of-all"
ROOT = Path(__file__).parents[2]
KITS = ROOT / "tests/kits"
WAIT_S = 120.0  # for anything to happen, on two busy cores

TRAINER = """
import json, os, sys
from polarnode.client import PolarnodeClient
client = PolarnodeClient(os.environ["POLARNODE_URL"], token=os.environ["POLARNODE_TOKEN"], patience_s=60)
task = client.submit(json.loads(sys.argv[1]))
group = next(client.groups(task_id=task.task_id, consumer="t", ack=True))
print(json.dumps([each.outcome.status for each in group.trajectories]))
"""
STATUS = """
import json, os, sys
from polarnode.client import PolarnodeClient
client = PolarnodeClient(sys.argv[1], token=os.environ["POLARNODE_TOKEN"], patience_s=0)
try:
    print(json.dumps(client.status()))
except Exception as error:
    print(json.dumps({"error": str(error)}))
"""


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"pn{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0


def documented(begin: str) -> str:
    """The line of docs/fleet.md's section that begins so."""
    section = (ROOT / "docs/fleet.md").read_text().partition("## Two machines")[2].partition("\n## ")[0]
    (line,) = [each for each in section.splitlines() if each.startswith(begin)]
    return line


@define(eq=False, kw_only=True)
class FakeMachine:
    """A namespace with an address of its own, and a folder where its programs run."""

    name: str
    folder: Path
    running: "list[subprocess.Popen[bytes]]" = field(factory=list)

    @property
    def env(self) -> dict[str, str]:
        known = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        return known | {
            "PATH": f"{self.folder.parent / 'bin'}:{known['PATH']}",
            "PYTHONPATH": f"{ROOT}:{KITS}",
            "POLARNODE_IMPORT_PATHS": '["session_kit"]',
            "POLARNODE_MEMORY_RESERVE_MB": "1",
            "POLARNODE_DISK_RESERVE_MB": "1",
            "POLARNODE_PODMAN_DIR": str(self.folder / "podman"),
            "POLARNODE_NODE_ID": self.folder.name,  # namespaces share this machine's host name
            "POLARNODE_TOKEN": TOKEN,
            "HOME": str(self.folder),
        }

    def start(self, line: str) -> "subprocess.Popen[bytes]":
        """Run a line of a shell. What it prints is in `out`."""
        with (self.folder / "out").open("wb") as out:
            found = subprocess.Popen(
                ["ip", "netns", "exec", self.name, "bash", "-c", line],
                cwd=self.folder,
                env=self.env,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.running.append(found)
        return found

    def ask(self, program: str, *arguments: str, **env: str) -> Any:
        """The JSON that a program of Python prints there."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, sys.executable, "-c", program, *arguments],
            cwd=self.folder,
            env=self.env | env,
            capture_output=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def end(self, number: int = signal.SIGKILL) -> None:
        """End all that runs there."""
        for each in self.running:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, number)
            each.wait(timeout=WAIT_S)
        self.running.clear()

    @property
    def printed(self) -> str:
        return (self.folder / "out").read_text()


def until(holds: Callable[[], bool], machines: "list[FakeMachine]") -> None:
    """Wait until something holds; what the machines printed otherwise."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "\n".join(each.printed for each in machines)
        time.sleep(0.3)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[FakeMachine]]:
    if not can_make_namespaces():
        pytest.skip("needs root and ip netns")
    tag = secrets.token_hex(3)
    program = tmp_path / "bin/polarnode"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {KITS / "hollow_cli.py"} "$@"\n')
    program.chmod(0o755)

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    switch, found = f"pn{tag}s", []
    with ExitStack() as stack:
        ip("netns", "add", switch)
        stack.callback(ip, "netns", "del", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number in (1, 2, 3):
            machine = FakeMachine(name=f"pn{tag}{number}", folder=tmp_path / f"m{number}")
            machine.folder.mkdir()
            ip("netns", "add", machine.name)
            stack.callback(ip, "netns", "del", machine.name)
            end = f"port{number}"
            ip(
                "-n",
                switch,
                "link",
                "add",
                end,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                machine.name,
            )
            ip("-n", switch, "link", "set", end, "master", "switch", "up")
            ip("-n", machine.name, "addr", "add", f"10.0.0.{number}/24", "dev", "eth0")
            ip("-n", machine.name, "link", "set", "eth0", "up")
            ip("-n", machine.name, "link", "set", "lo", "up")
            stack.callback(machine.end)
            found.append(machine)
        yield found


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as found:
        yield found


def test_three_documented_machines_form_fleet(machines: list[FakeMachine], cluster: Cluster) -> None:
    dsn = f"{cluster.database(())} password=very-secret"
    begun = time.monotonic()

    def start(machine: FakeMachine) -> str:
        """Start its node; the address that it prints for trainers."""
        (machine.folder / "log.dsn").write_text(dsn + "\n")
        line = documented("polarnode --gpus 0-7")
        machine.start(line.replace("10.0.0.5", f"10.0.0.{machine.name[-1]}"))
        until(lambda: "POLARNODE_URL=" in machine.printed, machines)
        (url,) = re.findall(r"POLARNODE_URL='(\S+)'", machine.printed)
        until(lambda: "polarnode submit task.toml; Ctrl-C stops" in machine.printed, machines)
        return str(url)

    def alive(url: str) -> set[str]:
        found = machines[0].ask(STATUS, url, POLARNODE_TOKEN=TOKEN)
        return {each["name"] for each in found.get("nodes", ()) if each["state"] == "alive"}

    urls = [start(machine) for machine in machines]
    assert [url.partition("#")[0] for url in urls] == [f"https://10.0.0.{n}:8080" for n in (1, 2, 3)]
    assert all(len(url.partition("#")[2]) == 64 for url in urls)
    until(lambda: alive(urls[0]) == {"m1", "m2", "m3"}, machines)
    print(f"a fleet of three nodes after {time.monotonic() - begun:.0f} s")
    task = json.dumps(hollow_task(samples=6, seconds=0.2))
    for url in urls:  # any node's address
        found = machines[0].ask(TRAINER, task, POLARNODE_URL=url, POLARNODE_TOKEN=TOKEN)
        assert found == ["completed"] * 6

    # a node dies: the others see it, run what there is, and it comes back
    machines[1].end()
    until(lambda: alive(urls[0]) == {"m1", "m3"}, machines)
    found = machines[0].ask(TRAINER, task, POLARNODE_URL=urls[2], POLARNODE_TOKEN=TOKEN)
    assert found == ["completed"] * 6
    assert start(machines[1]) == urls[1], "its certificate is the same"
    until(lambda: alive(urls[0]) == {"m1", "m2", "m3"}, machines)

    # another certificate at its address: nobody sends it a token
    machines[1].end()
    for name in ("tls.crt", "tls.key"):
        (machines[1].folder / ".polarnode" / name).unlink()
    assert start(machines[1]) != urls[1]
    refused = machines[0].ask(STATUS, urls[1], POLARNODE_TOKEN=TOKEN)["error"]
    assert "shows another certificate" in refused

    for machine in machines:
        kept = machine.printed + (machine.folder / ".polarnode/node.log").read_text()
        assert "very-secret" not in kept
        assert TOKEN not in kept
