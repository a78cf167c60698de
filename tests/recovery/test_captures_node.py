"""Captures of a whole node: killed and started again, stopped, beside sessions in containers whose keys open
nothing here.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from captures_kit import Told, asked
from recovery_kit import AT_ONCE, Place, ServingNode, call, captured, place_at, short_temporary, until

from polarnode.core.errors import ConfigError
from polarnode.http.server import Address, listening_socket
from polarnode.node import node
from polarnode.node.config import NodeConfig

pytestmark = pytest.mark.podman


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=AT_ONCE)


def test_kill_interrupts_and_stop_ends_captures(place: Place) -> None:
    """A killed node makes captures interrupted trajectories, and a stopped one ends them."""
    with place.serving() as node:
        killed = call(node, "POST", "/v1/capture", {"metadata": {"row": 1}})
        texts = [Told(killed["env"]).chat(f"go on {turn}") for turn in range(2)]
        until(
            lambda: call(node, "GET", f"/v1/sessions/{killed['session_id']}")["session"]["turns"] == 2,
            "both turns are on disk",
        )
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait()
    with place.serving() as node:
        found = captured(node, killed["session_id"])
        assert (found.outcome.status, found.metadata, len(found.turns), found.harness) == (
            "interrupted",
            {"row": 1},
            2,
            "capture",
        )
        assert all(texts)
        assert found.trainable_tokens == found.sampled_tokens > 0
        stopped = call(node, "POST", "/v1/capture", {})
        assert stopped["key"] != killed["key"]
        Told(stopped["env"]).messages()
        assert call(node, "GET", "/v1/status")["captures"]["open"][0]["turns"] == 1
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait() == 0
    with place.serving() as node:
        found = captured(node, stopped["session_id"])
        assert (found.outcome.status, found.outcome.reason, len(found.turns)) == (
            "cancelled",
            "its node was stopped",
            1,
        )
        kinds = [event.key.partition(":")[0] for event in node.client.trajectories(after=0, follow=False)]
        assert kinds == ["trajectory", "group", "task"] * 2


def test_capture_and_container_keys_are_separate(place: Place) -> None:
    """The endpoints of captures and of containers open to their own keys alone."""
    with place.serving() as node:
        opened = call(node, "POST", "/v1/capture", {})
        door = opened["base_urls"]["openai"]
        (session_id,) = node.submit(**place.task(turns=1, old_keys=[opened["key"]], budgets={"run_s": 120.0}))
        inside, old = until(lambda: _told_by(node, session_id), "the harness has said its key")
        assert old == [401], "a capture's key opened the door in a container"
        refused = asked(door, inside)
        assert refused.status_code == 401
        node.finished(session_id)
        assert asked(door, inside).status_code == 401
        call(node, "DELETE", f"/v1/capture/{opened['session_id']}", {"reward": 1})
        # what was tried with its key in a container never came here
        assert captured(node, opened["session_id"]).turns == ()
        assert asked(door, opened["key"]).status_code == 410


def _told_by(node: ServingNode, session_id: str) -> "tuple[str, list[int]] | None":
    """The key of a harness in a container, and what the old keys it was given were answered."""
    lines = [line for line in node.log(session_id).splitlines() if line.startswith("{")]
    return (json.loads(lines[0])["key"], json.loads(lines[0])["old"]) if lines else None


async def test_taken_port_is_named() -> None:
    with listening_socket(Address(host="127.0.0.1", port=0)) as taken:
        config = NodeConfig(capture_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"capture_port .* choose another, or 0"):
            async with node.open_captures(config, None, None, None, None):  # type: ignore[arg-type]
                raise AssertionError
