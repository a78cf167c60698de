"""What a session's container can reach: its own door, and nothing else. Tried from inside, by a harness that
means ill.
"""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_kit import MARK, TOKEN, ServingNode, until

pytestmark = [pytest.mark.podman, pytest.mark.engine]

EXPLORER = Path(__file__).with_name("explorer.py")
DOOR = "0100007F:1F90"  # 127.0.0.1:8080, as the kernel writes it
OPENAI = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"}
ANTHROPIC = {"ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL"}
GOOGLE = {"GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY", "GEMINI_MODEL"}
OURS = {*OPENAI, *ANTHROPIC, *GOOGLE, "POLARNODE_INSTRUCTION"}
PLAIN = {
    "HOME",
    "LANG",
    "TERM",
    "NO_COLOR",
    "DO_NOT_TRACK",
    "PATH",
    "PWD",
    "HOSTNAME",
    "container",
    "OLDPWD",
    "SHLVL",
    "_",
    "LC_CTYPE",
}
METADATA = "169.254.169.254"  # where clouds answer anyone on the machine with its credentials


def machine_addresses() -> list[str]:
    """Every address this machine has, IPv6 without its zone."""
    every = [
        each.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses
    ]
    return sorted({one for one in every if "." in one or ("::" in one and one != "::1")} - {"127.0.0.1"})


@pytest.fixture(scope="module")
def report(node: ServingNode) -> dict[str, Any]:
    """What the explorer found, told through its evaluator, with another session alive beside it."""
    other = node.submit(
        instruction="Wait.",
        harness={"name": "shell", "command": ["sh", "-c", "echo $OPENAI_API_KEY; exec sleep 3600"]},
    )[0]
    key = until(
        lambda: next((line for line in node.log(other).splitlines() if line.startswith("sk-")), None),
        "the other session says its key",
    )
    given = {
        "ports": [node.port, 22, 80],
        "addresses": [*machine_addresses(), METADATA],
        "other_key": key,
        "token": TOKEN,
        "mark": MARK,
    }
    session = node.submit(
        instruction="Explore.",
        harness={"name": "shell", "command": ["python3", "/work/explorer.py", json.dumps(given)]},
        runtime={"files": [{"path": "explorer.py", "text": EXPLORER.read_text()}]},
        evaluator={
            "name": "command",
            "config": {
                "script": "cp /work/report.json /tmp/verdict.json",
                "reward_file": "/tmp/verdict.json",
            },
        },
    )[0]
    trajectory = node.finished(session)
    assert trajectory.outcome.status == "completed", trajectory.outcome
    assert node.session(other) is not None, "it lived all the while"
    node.client.cancel(node.task_of(other))
    assert node.finished(other).turns == ()  # its key was of no use to anybody
    found = trajectory.metrics["evaluation"]
    assert isinstance(found, dict)
    return found


def test_nothing_outside_can_be_reached(report: dict[str, Any], node: ServingNode) -> None:
    """The control plane's port is tried on every address of this machine, with others that might answer."""
    assert report["connected"] == []
    assert report["routes"] == []
    assert not report["datagram"]
    assert not report["resolved"]
    assert node.status()["node"] == node.node_id  # and the node does listen


def test_only_the_endpoint_is_there(report: dict[str, Any]) -> None:
    assert report["listening"] == [DOOR]
    assert report["unix"] == []


def test_endpoint_needs_its_own_key(report: dict[str, Any]) -> None:
    assert report["own_key"] == 200
    assert report["other_key"] == 401
    assert report["other_key_anthropic"] == 401
    assert report["other_key_responses"] == 401
    assert report["other_key_google"] == 401
    assert report["other_key_in_query"] == 401
    assert report["other_key_in_path"] == 401
    assert report["no_key"] == 401


def test_endpoint_has_no_control_plane(report: dict[str, Any]) -> None:
    """Not even for somebody who has its token."""
    assert set(report["control"].values()) == {404}
    assert report["submitted"] == 404


def test_node_environment_stays_outside(report: dict[str, Any]) -> None:
    assert report["leaked"] == []
    assert set(report["environment"]) <= OURS | PLAIN


def test_other_processes_and_rights_are_hidden(report: dict[str, Any]) -> None:
    """Its own process, and the first one of the container. No capability, and no way to gain one."""
    assert len(report["processes"]) == 2, report["processes"]
    assert set(report["capabilities"]) == {"0000000000000000", "1"}
