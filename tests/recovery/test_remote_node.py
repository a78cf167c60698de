"""Captures of agents on other machines: an agent in a network namespace of its own has a URL, a key and the
file of an authority, and nothing else of the node.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from recovery_kit import AT_ONCE, Place, call, captured, place_at, short_temporary
from tls_kit import CertificateAuthority

from polarnode.core.trajectory import Trajectory

pytestmark = pytest.mark.podman

AGENT = Path(__file__).with_name("remote_agent.py")
# long enough that a kill falls into a call, and short enough to wait for
PACED = AT_ONCE.replace("tokens_per_s = 0", "tokens_per_s = 30").replace(
    "answer_tokens = 12", "answer_tokens = 60"
)


@frozen
class Machine:
    """Another machine: a namespace whose one cable leads to this one, at the address `here`."""

    name: str
    here: str

    def start(self, env: "dict[str, str]", *arguments: str) -> "subprocess.Popen[str]":
        """The agent there. It knows nothing but `env`."""
        known = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **env}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, str(AGENT), *arguments],
            env=known,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, env: "dict[str, str]", *arguments: str) -> "list[dict[str, Any]]":
        """What the agent found."""
        with self.start(env, *arguments) as agent:
            output, _ = agent.communicate(timeout=300)
            assert agent.returncode == 0
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def machine() -> Iterator[Machine]:
    tag = secrets.token_hex(3)
    # of the network for tests between machines (RFC 2544), four addresses for each run
    base = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
    fourth = 4 * secrets.randbelow(64)
    found = Machine(name=f"polarnode-{tag}", here=f"{base}.{fourth + 1}")
    cable, end = f"pn{tag}a", f"pn{tag}b"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        ip("netns", "add", found.name)
    except subprocess.CalledProcessError:
        pytest.skip(
            "this user makes no network namespaces here: podman unshare unshare --net --mount sh -c '…'"
        )
    try:
        ip("link", "add", cable, "type", "veth", "peer", "name", end, "netns", found.name)
        ip("addr", "add", f"{found.here}/30", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", found.name, "addr", "add", f"{base}.{fourth + 2}/30", "dev", end)
        ip("-n", found.name, "link", "set", end, "up")
        ip("-n", found.name, "link", "set", "lo", "up")
        yield found
    finally:
        ip("netns", "del", found.name)  # its end of the cable, and so the cable, goes with it


@contextmanager
def place(folder: Path, settings: str) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(folder, temporary, settings=settings)


def test_remote_agent_is_recorded_and_kept(podman_works: None, tmp_path: Path, machine: Machine) -> None:
    """An agent elsewhere is recorded as one here, and a killed node keeps its turns."""
    authority = CertificateAuthority(tmp_path)
    chain, key = authority.issue(machine.here)
    remote = f'capture_listen = "{machine.here}"\ncapture_tls_cert = "{chain}"\ncapture_tls_key = "{key}"\n'
    with place(tmp_path, remote + PACED) as kept:
        with kept.serving() as node:
            opened = call(node, "POST", "/v1/capture", {"metadata": {"row": 7}})
            env = {**opened["env"], "SSL_CERT_FILE": str(authority.pem)}
            assert env["OPENAI_BASE_URL"].startswith(f"https://{machine.here}:")
            texts = [each["text"] for each in machine.run(env, "talk")]
            call(node, "DELETE", f"/v1/capture/{opened['session_id']}", {"reward": 1.0})
            there = captured(node, opened["session_id"])
            assert (len(there.turns), there.reward, there.metadata) == (4, 1.0, {"row": 7})
            assert all(texts)

            open_again = call(node, "POST", "/v1/capture", {})
            env = {**open_again["env"], "SSL_CERT_FILE": str(authority.pem)}
            control = [f"http://{machine.here}:{node.port}/healthz", f"http://127.0.0.1:{node.port}/healthz"]
            found = {each["name"]: each for each in machine.run(env, "try", json.dumps(control))}
            assert {name: each.get("status") for name, each in found.items() if "status" in each} == {
                "right": 200,
                "wrong": 401,
                "none": 401,
                "plain": 400,
            }
            assert found["wrong"]["text"] == found["none"]["text"]
            assert "https://" in found["plain"]["text"]
            assert "CERTIFICATE_VERIFY_FAILED" in found["untrusted"]["text"]
            assert "reached" not in found, "its control plane is on this machine's loopback alone"

            with machine.start(env, "stream") as agent:
                assert agent.stdout is not None
                agent.stdout.readline()  # it has begun to answer
                os.kill(node.process.pid, signal.SIGKILL)
                node.process.wait()
                last = agent.stdout.read().splitlines()[-1]
            assert "error" in json.loads(last), "the agent was in the middle of a call"
            keys = (opened["key"], open_again["key"])
            assert not any(each in node.said() for each in keys)
        (tmp_path / "node.toml").write_text(PACED)
        with kept.serving() as node:
            lost = captured(node, open_again["session_id"])
            assert (lost.outcome.status, len(lost.turns)) == ("interrupted", 1)
            assert captured(node, opened["session_id"]) == there
            here = call(node, "POST", "/v1/capture", {"metadata": {"row": 7}})
            with subprocess.Popen(
                [sys.executable, str(AGENT), "talk"],
                env={**os.environ, **here["env"]},
                stdout=subprocess.DEVNULL,
            ) as agent:
                assert agent.wait(timeout=300) == 0
            call(node, "DELETE", f"/v1/capture/{here['session_id']}", {"reward": 1.0})
            same = captured(node, here["session_id"])
    # the answers are random: what they are given for, and what becomes of them, is the same
    assert [shape(there), shape(same)] == [shape(there)] * 2


def shape(found: Trajectory) -> Any:
    """A trajectory without what is random in it."""
    turns = [(turn.provider, turn.parent, turn.role, turn.kind, turn.messages) for turn in found.turns]
    prompts = [turn.prompt_delta.tolist() for turn in found.turns if turn.parent is None]
    return turns, prompts, len(found.traces), found.outcome, found.reward
