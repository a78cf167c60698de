"""Adapters of a whole node: sessions under three of them at once, one replaced in the middle of its session; and
a node that is killed while an adapter arrives.
"""

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters_kit import write_adapter
from captures_kit import Told
from engine_reference import TOLERANCE
from plugin_kit import run_program
from recovery_kit import AT_ONCE, TOKEN, Place, ServingNode, place_at, short_temporary, until
from safetensors.numpy import load_file

from polarnode.client import ClientError, PolarnodeClient
from polarnode.client.tensors import push_adapter
from polarnode.core.codec.json import read_json
from polarnode.core.conversation import Sampling
from polarnode.core.task import CaptureSpec
from polarnode.core.trajectory import Trajectory
from polarnode.node.config import TINY_MODEL

pytestmark = pytest.mark.podman
SHORT = CaptureSpec(sampling=Sampling(max_tokens=24))


@pytest.fixture
def place(request: pytest.FixtureRequest, podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=request.param)


def push(client: PolarnodeClient, name: str, version: str, folder: Path) -> Any:
    """As a trainer that has it in memory."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return push_adapter(
        client, name, version, tensors, read_json((folder / "adapter_config.json").read_bytes())
    )


@pytest.mark.engine
@pytest.mark.parametrize("place", ["lora_rank = 8\ncontext_length = 4096\n"], indirect=True)
def test_concurrent_sessions_use_own_adapters(place: Place, tmp_path: Path) -> None:
    """Sessions of three adapters at once are sampled by their own."""
    folders = {
        name: write_adapter(tmp_path / name, seed=at) for at, name in enumerate(("a-1", "b-1", "c-1", "a-2"))
    }
    with place.serving() as node:
        client = node.client
        push(client, "a", "a-1", folders["a-1"])
        client.update_adapter("b", "b-1", path=folders["b-1"])
        push(client, "c", "c-1", folders["c-1"])

        def session(name: str) -> Trajectory:
            with client.capture(SHORT, adapter=name) as capture:
                chat = Told(capture.env).chat
                chat()
                assert {each.name: each.sessions for each in client.adapters().adapters}[name] == 1
                if name == "a":
                    push(client, "a", "a-2", folders["a-2"])
                chat("go on")
                capture.reward = 1.0
            return client.trajectory(capture.session_id, turns="full")

        with ThreadPoolExecutor() as pool:
            found = dict(zip("abc", pool.map(session, "abc"), strict=True))
        spans = {
            name: [span.version for turn in each.turns for span in turn.version_spans]
            for name, each in found.items()
        }
        assert spans == {"a": ["a-1", "a-2"], "b": ["b-1"] * 2, "c": ["c-1"] * 2}
        assert [found[name].staleness for name in "abc"] == [1, 0, 0]
        until(lambda: not any(each.loaded for each in client.adapters().adapters), "nobody needs them")
    rows = [(turn.version_spans[0].version, turn) for each in found.values() for turn in each.turns]
    asked = [
        [str(folders[version]), [*map(int, turn.prompt_delta), *map(int, turn.sampled)]]
        for version, turn in rows
    ]
    theirs = run_program("peft_program.py", stdin={"model": str(TINY_MODEL), "rows": asked})
    for (_, turn), logprobs in zip(rows, theirs, strict=True):
        ours = list(turn.logprobs)
        assert (
            max(abs(one - other) for one, other in zip(ours, logprobs[-len(ours) :], strict=True)) < TOLERANCE
        )


@pytest.mark.parametrize("place", [f"lora_rank = 8\n{AT_ONCE}"], indirect=True)
def test_killed_node_serves_previous_adapter(place: Place, tmp_path: Path) -> None:
    """A node that is killed while an adapter arrives serves the one before."""
    first, second = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", seed=2)
    files = place.state_dir / "adapters"
    with place.serving() as node:
        push(node.client, "run-a", "1", first)
        push(node.client, "run-b", "b", second)
        opened = json.loads(request(node, "POST", "/v1/capture", b'{"adapter": "run-a"}'))
        Told(opened["env"]).chat()
        with socket.create_connection(("127.0.0.1", node.port)) as trainer:
            head = (
                "PUT /v1/adapters/run-a/versions/2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n"
            )
            trainer.sendall(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode() + bytes(3_000_000))
            until(lambda: list(files.glob(".incoming-*/*")), "it arrives")
            os.kill(node.process.pid, signal.SIGKILL)
            node.process.wait()
    (files / "run-b" / "b" / "adapter_config.json").write_text("{}")
    with place.serving() as node:
        assert "a version of adapter 'run-a' was not served yet when the node ended" in node.said()
        assert sorted(str(each.relative_to(files)) for each in files.glob("*/*")) == ["run-a/1", "run-b/b"]
        status = node.client.status()["adapters"]["adapters"]
        assert [(each["name"], each["version"]) for each in status] == [("run-a", "1"), ("run-b", "")]
        found = node.client.trajectory(opened["session_id"], turns="full")
        assert (found.outcome.status, found.turns[0].version_spans[0].version) == ("interrupted", "1")
        assert found.staleness == 0
        for name, why in (("run-b", "damaged files"), ("run-c", "name one of run-a")):
            with pytest.raises(ClientError, match=why), node.client.capture(adapter=name):
                raise AssertionError
        assert push(node.client, "run-a", "1", first).created is False
        assert push(node.client, "run-a", "2", second).created is True
        with pytest.raises(ClientError, match="run-a"):
            node.client.update_weights("9", path=TINY_MODEL)


def request(node: ServingNode, method: str, path: str, body: bytes) -> bytes:
    """What the client would end when its node dies."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    answer = httpx.request(method, f"http://127.0.0.1:{node.port}{path}", headers=headers, content=body)
    return answer.raise_for_status().content
