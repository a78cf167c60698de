"""Whether a node has room for a task: what it is refused for now, and that a real node asks."""

from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from polarnode.core import codec
from polarnode.core.errors import Busy
from polarnode.journal import queries
from polarnode.journal.journal import open_journal
from polarnode.journal.values import TASK_BACKLOG_BYTES, TASK_DISK_FREE_BYTES, JournalStatistics
from polarnode.node.config import NodeConfig
from polarnode.node.opening import open_node
from polarnode.rollouts.admission import backpressure

QUIET: dict[str, Any] = {"pending": 0, "more": 8, "limit": 100}


@pytest.fixture
async def roomy(tmp_path: Path) -> JournalStatistics:
    plenty = {
        "backlog_bytes": 0,
        "disk_free": 10 * TASK_DISK_FREE_BYTES,
        "free_bytes": 0,
        "unacknowledged_bytes": 0,
        "most_bytes": 1000 << 20,
    }
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1.0) as journal:
        await journal.consumers.acknowledge("trainer", 0)
        return evolve(journal.health.statistics(), **plenty)


async def test_quiet_node_has_room(roomy: JournalStatistics) -> None:
    assert backpressure(roomy, **QUIET) is None
    assert backpressure(roomy, pending=92, more=8, limit=100) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"backlog_bytes": TASK_BACKLOG_BYTES + 1}, "wait for the journal's disk"),
        ({"disk_free": TASK_DISK_FREE_BYTES - 1}, "the journal's disk has 511 MiB left"),
        ({"unacknowledged_bytes": 960 << 20}, "960 of 1000 MiB are kept that no consumer has acknowledged"),
    ],
)
async def test_each_shortage_names_its_cause(
    roomy: JournalStatistics, wrong: dict[str, int], words: str
) -> None:
    assert words in (backpressure(evolve(roomy, **wrong), **QUIET) or "")


async def test_oldest_results_forgotten_without_consumer(roomy: JournalStatistics) -> None:
    assert backpressure(evolve(roomy, unacknowledged_bytes=999 << 20, positions={}), **QUIET) is None


async def test_task_queue_is_limited(roomy: JournalStatistics) -> None:
    assert "over pending_limit (100)" in (backpressure(roomy, pending=93, more=8, limit=100) or "")


@pytest.mark.podman
async def test_full_node_refuses_tasks(tmp_path: Path) -> None:
    """Refused tasks leave nothing; the same one is taken when there is room."""
    task = codec.read_task(
        {"task_id": "t", "num_samples": 3, "instruction": "x", "harness": {"command": ["true"]}}
    )
    settings = NodeConfig(
        engine="simulated", gpus=(0,), port=0, state_dir=str(tmp_path / "state"), pending_limit=2, warm=0
    )
    with trio.fail_after(300):
        async with open_node(settings, report=print) as node:
            with pytest.raises(Busy, match="3 more they would be over pending_limit"):
                await node.submit(task, idempotency_key=None)
            assert await node.journal.reader.query(queries.task, "t") is None
            node.config = evolve(settings, pending_limit=3)
            assert (await node.submit(task, idempotency_key=None)).created
            node.cancel_all()
