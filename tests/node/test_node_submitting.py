"""A task that is submitted again: the same answer, or 409."""

from pathlib import Path

import attrs
import pytest
from journal_samples import make_spec

from polarnode.core.errors import Conflict
from polarnode.journal.journal import open_journal
from polarnode.node.node import Node


async def test_a_key_stands_for_one_task_id(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 1000.0) as journal:
        spec = make_spec(task_id="first")
        journal.task_submitted(spec, task_id="first", session_ids=("a",), idempotency_key="key")
        await journal.flushed()
        node = Node.__new__(Node)
        node.journal = journal
        for again in (spec, attrs.evolve(spec, task_id=None)):
            found = await node._existing(again, "key")
            assert found is not None
            assert (found.task_id, found.session_ids, found.created) == ("first", ("a",), False)
        with pytest.raises(Conflict, match="first was submitted before"):
            await node._existing(attrs.evolve(spec, task_id="second"), "key")
        with pytest.raises(Conflict, match="another body"):
            await node._existing(attrs.evolve(spec, instruction="do that"), "key")
        assert await node._existing(attrs.evolve(spec, task_id="second"), "another") is None
