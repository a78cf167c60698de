"""A task that is submitted again: the same answer, or 409. One whose image is nowhere: refused."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import attrs
import httpx2
import pytest
import trio
from hollow_node import NO_IMAGE, open_hollow
from journal_samples import make_spec
from journal_writes import submit_task

from polarnode.core.errors import Busy, Conflict, DiskFull, Refused
from polarnode.core.task import RuntimeSpec
from polarnode.journal import health, queries
from polarnode.journal.journal import open_journal
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.journal.values import TASK_DISK_FREE_BYTES
from polarnode.node.config import NodeConfig
from polarnode.node.node import Node


async def test_key_stands_for_one_task_id(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1000.0) as journal:
        spec = make_spec(task_id="first")
        submit_task(journal, spec, task_id="first", session_ids=("a",), idempotency_key="key")
        await journal.writer.flush()
        node = Node.__new__(Node)
        node.log = SqliteLog(journal)
        for again in (spec, attrs.evolve(spec, task_id=None)):
            found = await node._find_existing(again, "key")
            assert found is not None
            assert (found.task_id, found.session_ids, found.created) == ("first", ("a",), False)
        with pytest.raises(Conflict, match="first was submitted before"):
            await node._find_existing(attrs.evolve(spec, task_id="second"), "key")
        with pytest.raises(Conflict, match="another body"):
            await node._find_existing(attrs.evolve(spec, instruction="do that"), "key")
        assert await node._find_existing(attrs.evolve(spec, task_id="second"), "another") is None


class NoImages:
    """A store that lost every image."""

    async def refusal(self, name: str) -> str | None:
        await trio.lowlevel.checkpoint()
        return f"no image is called {name}"

    async def ensure(self, name: str) -> None:
        await trio.lowlevel.checkpoint()


async def test_only_new_tasks_need_image(tmp_path: Path) -> None:
    """A task without an image is refused, and one that was taken before is not."""
    config = NodeConfig(engine="simulated", port=0, state_dir=str(tmp_path / "state"))
    there, lost = (RuntimeSpec(image=name) for name in ("localhost/mine:1", NO_IMAGE))
    async with open_hollow(config) as (node, _):
        with pytest.raises(
            Refused, match=r"^runtime\.image: no image is called localhost/none/such"
        ) as caught:
            await node.submit(make_spec(task_id="lost", runtime=lost), idempotency_key=None)
        assert caught.value.path == "$.runtime.image"
        assert await node.journal.reader.query(queries.task, "lost") is None, "nothing of it was taken"
        taken = await node.submit(make_spec(task_id="t", runtime=there), idempotency_key=None)
        node.images = NoImages()
        again = await node.submit(make_spec(task_id="t", runtime=there), idempotency_key=None)
        assert again == attrs.evolve(taken, created=False)
        with pytest.raises(Refused, match="no image is called localhost/mine:1"):
            await node.submit(make_spec(task_id="u", runtime=there), idempotency_key=None)


def on_disk(*, free: int, flags: int = 0) -> SimpleNamespace:
    """What the kernel says of a file system."""
    return SimpleNamespace(f_flag=flags, f_bavail=free, f_frsize=1)


def gone(_: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_readiness_depends_on_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that says ready where every task is refused sends them all to a full disk."""
    config = NodeConfig(engine="simulated", port=0, state_dir=str(tmp_path / "state"))
    async with open_hollow(config) as (node, address):

        async def probed() -> tuple[int, Any]:
            async with httpx2.AsyncClient(trust_env=False) as client:
                found = await client.get(f"http://{address.host}:{address.port}/readyz")
            return found.status_code, found.json()

        assert await probed() == (200, {"ready": True})
        monkeypatch.setattr(health.os, "statvfs", lambda _: on_disk(free=1 << 40, flags=os.ST_RDONLY))
        status, body = await probed()
        assert (status, body["ready"]) == (503, False)
        assert "the journal's disk is read-only" in body["reason"]
        with pytest.raises(DiskFull):
            await node.submit(make_spec(task_id="t"), idempotency_key=None)
        monkeypatch.setattr(health.os, "statvfs", gone)
        assert "the journal's disk does not answer" in (await probed())[1]["reason"]
        assert node.figures()  # they are looked at in the background
        monkeypatch.undo()
        left = attrs.evolve(node.journal.commits.progress, disk_free=TASK_DISK_FREE_BYTES - 1, free_bytes=0)
        node.journal.commits.progress = left
        assert (await probed())[1]["reason"].startswith("the journal's disk has 511 MiB left")
        with pytest.raises(Busy, match="511 MiB left"):
            await node.submit(make_spec(task_id="t"), idempotency_key=None)
