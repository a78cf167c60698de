"""Three machines as three network namespaces: the commands of docs/fleet.md, word for word, with hollow nodes.

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
    section = (ROOT / "docs/fleet.md").read_text().partition("## Three machines")[2].partition("\n## ")[0]
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


def test_a_newcomers_three_machines_are_a_fleet_over_tls(machines: list[FakeMachine]) -> None:
    front, *nodes = machines
    begun = time.monotonic()

    def start_front(state: str = "") -> tuple[str, dict[str, str]]:
        """The line for GPU hosts, and a trainer's environment, as they are printed."""
        front.start(documented("polarnode fleet --host") + state)
        until(lambda: "POLARNODE_URL=" in front.printed, machines)
        (join,) = re.findall(r"POLARNODE_JOIN=(\S+) polarnode", front.printed)
        (url,) = re.findall(r"POLARNODE_URL='(\S+)'", front.printed)
        folder = front.folder / (state.partition(" --state-dir ")[2] or ".polarnode-fleet")
        token = (folder / "token").read_text().strip()
        return documented("POLARNODE_JOIN=").replace("pnj1.…", join), {
            "POLARNODE_URL": url,
            "POLARNODE_TOKEN": token,
        }

    def up(count: int) -> bool:
        found = front.ask(STATUS, trainer["POLARNODE_URL"], **trainer)
        return sum(each["state"] == "up" for each in found.get("nodes", ())) == count

    line, trainer = start_front()
    for node in nodes:
        node.start(line)
    until(lambda: up(2), machines)
    print(f"a fleet of two nodes after {time.monotonic() - begun:.0f} s")
    task = json.dumps(hollow_task(samples=4, seconds=0.2))
    assert front.ask(TRAINER, task, **trainer) == ["completed"] * 4
    listed = (front.folder / ".polarnode-fleet/joined.txt").read_text().split()
    assert {each.partition("#")[0] for each in listed} == {"https://10.0.0.2:8080", "https://10.0.0.3:8080"}
    assert all(len(each.partition("#")[2]) == 64 for each in listed)

    # a node's restart
    nodes[0].end()
    until(lambda: up(1), machines)
    nodes[0].start(line)
    until(lambda: up(2), machines)

    # another certificate at the front's address: nobody sends it a token
    front.end()
    right = trainer
    start_front(" --state-dir impostor")
    assert "shows another certificate" in front.ask(STATUS, right["POLARNODE_URL"], **right)["error"]
    for node in nodes:
        log = node.folder / ".polarnode/node.log"
        until(lambda log=log: "shows another certificate" in log.read_text(), machines)  # type: ignore[misc]
        own = next(each for each in listed if each.startswith(f"https://10.0.0.{nodes.index(node) + 2}:"))
        joined = node.ask(STATUS, own, **right)["join"]
        assert (joined["front"], joined["joined"]) == ("https://10.0.0.1:8080", False)
        assert "another certificate" in joined["problem"]
    assert (front.folder / "impostor/joined.txt").read_text() == ""

    # the front's restart
    front.end()
    again, trainer = start_front()
    assert (again, trainer) == (line, right), "its certificate and its token are the same"
    until(lambda: up(2), machines)
    assert front.ask(TRAINER, task, **trainer) == ["completed"] * 4

    secret = [right["POLARNODE_TOKEN"], re.findall(r"pnj1\.\S+", line)[0]]
    for node in nodes:
        kept = node.printed + (node.folder / ".polarnode/node.log").read_text()
        assert not any(each in kept for each in secret)
    assert secret[0] not in (front.folder / ".polarnode-fleet/node.log").read_text()
