"""The client against a control plane in its own process, which is killed and comes again; and what importing
it takes of a trainer.

What the child writes it was told by the test, over HTTP or before it started. What holds for both clients is
in test_client_contract.py.
"""

import os
import random
import re
import subprocess
import sys
import threading
import time
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import trio
from client_kit import TASK, Child, free_port
from control_plane_parts import open_plane
from journal_samples import make_spec, make_trajectory
from journal_writes import publish_end

import polarnode.client
from polarnode.client import AsyncPolarnodeClient, CaptureSession, Event, PolarnodeClient, requests, tensors
from polarnode.client.blocking_http import BlockingHttp
from polarnode.client.requests import ask
from polarnode.client.streams import pieces
from polarnode.journal import queries


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Child]:
    child = Child(tmp_path / "journal.sqlite", free_port())
    yield child
    child.kill()


def client_of(node: Child, **more: float) -> PolarnodeClient:
    return PolarnodeClient(node.url, token="secret", **more)


# ── the stream through the node's deaths ──────────────────────────────────────


def test_stream_continues_after_sigkill(node: Child) -> None:
    """The node is killed and started again five times while the client reads 120 events; each comes once, in
    order.
    """
    count, kills = 120, 5
    node.start(sessions=count, pause_s=0.01)
    chance = random.Random(3)

    def kill_now_and_then() -> None:
        for _ in range(kills):
            time.sleep(chance.uniform(0.1, 0.4))
            node.kill()
            node.start(sessions=count, pause_s=0.01)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    found = list(islice(client_of(node).trajectories(), count))
    killer.join()
    assert [event.seq for event in found] == list(range(1, count + 1))
    assert sorted(event.key for event in found) == sorted(f"trajectory:s{number}" for number in range(count))


def test_named_task_is_followed_to_end(node: Child) -> None:
    node.start()
    client = client_of(node)
    client.submit(make_spec(task_id=TASK, num_samples=4))
    keys: list[str] = []
    reader = threading.Thread(
        target=lambda: keys.extend(event.key for event in client.trajectories(task_id=TASK))
    )
    reader.start()
    node.kill()
    node.start(sessions=4)  # the stand-in names the task's sessions t-0 …, these are others of the same task
    client.submit(make_spec(task_id="other"))
    reader.join(1.0)
    assert reader.is_alive(), "its own sessions are still pending"
    assert client.task(TASK)["counts"]["pending"] == 4
    node.kill()
    trio.run(end_task, node.path)
    node.start()
    reader.join(60)
    assert keys[:4] == [f"trajectory:s{number}" for number in range(4)]
    assert keys[4:] == [*(f"trajectory:t-{number}" for number in range(4)), "group:t", "task:t"]


async def end_task(path: Path) -> None:
    async with open_plane(path) as plane:
        for left in await plane.journal.reader.query(queries.unfinished_sessions):
            if left.identity.task_id == TASK:
                publish_end(
                    plane.journal,
                    make_trajectory(left.identity.session_id, task_id=TASK, turns=0, status="interrupted"),
                )


def test_other_events_have_no_trajectory() -> None:
    assert Event(seq=1, kind="gap", key="gap", data={"after": 0, "oldest": 2}).trajectory is None


def test_threads_may_share_a_client(node: Child) -> None:
    node.start(sessions=3)
    client, found = client_of(node), []

    def read() -> None:
        found.append([event.seq for event in client.trajectories(follow=False)])

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert found == [[1, 2, 3]] * 8


def test_requests_leave_nothing_open(node: Child) -> None:
    node.start()
    http = BlockingHttp(base_url=node.url, token="secret")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert http.run(ask(requests.status()))["node"] == "stand-in"
        next(http.iterate(pieces(requests.export())))  # left in the middle
    assert len(os.listdir("/proc/self/fd")) == before


def test_token_is_not_shown() -> None:
    assert "wrong" not in repr(PolarnodeClient("http://127.0.0.1:1", token="wrong")) + repr(
        AsyncPolarnodeClient("http://127.0.0.1:1", token="wrong")
    )


# ── what importing it takes ───────────────────────────────────────────────────

HEAVY = (
    "torch",
    "transformers",
    "trio",
    "asyncio",
    "quart",
    "hypercorn",
    "podman",
    "numpy",
    "httpx2",
    "anyio",
    "sqlite3",
    "polarnode.sources",
    "polarnode.support",
)


def imported(what: str) -> set[str]:
    """The modules that are there after it, in a process of its own."""
    code = f"{what}\nimport sys; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
    )


def test_client_import_loads_no_node() -> None:
    found = imported(
        "from polarnode.client import PolarnodeClient, Event, Submitted, ClientError, Unreachable"
    )
    assert "polarnode.client.blocking" in found
    assert found.isdisjoint(HEAVY)


def test_async_client_import_loads_only_transport() -> None:
    found = imported("from polarnode.client import AsyncPolarnodeClient; AsyncPolarnodeClient()")
    assert {"httpx2", "anyio"} <= found
    assert found.isdisjoint(
        {
            "torch",
            "transformers",
            "quart",
            "hypercorn",
            "podman",
            "numpy",
            "sqlite3",
            "polarnode.sources",
            "polarnode.support",
        }
    )


def test_unknown_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        _ = polarnode.client.Clinet


# ── what the page says ────────────────────────────────────────────────────────

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()


def test_page_calls_existing_methods() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 4
    for block in blocks:
        compile(block, "docs/client.md", "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for owner, name in re.findall(r"\b(client|tensors|session)\.(\w+)", block):
            assert hasattr(
                {"client": PolarnodeClient, "tensors": tensors}.get(owner, CaptureSession), name
            ), name


def test_page_names_every_changing_method() -> None:
    looks = {
        "task",
        "task_status",
        "tasks",
        "cancel",
        "session",
        "status",
        "metrics",
        "artifacts",
        "snapshots",
        "forks",
        "export",
        "export_bytes",
        "formatted",
        "submit_source",
    }
    methods = {
        name
        for name in vars(PolarnodeClient)
        if not name.startswith("_") and callable(getattr(PolarnodeClient, name))
    }
    silent = {name for name in methods - looks if not re.search(rf"\b{name}\b", PAGE)}
    assert silent <= {"consumers", "forget_consumer", "leave_weights_group"}, (
        "told in delivery.md and weights.md"
    )
