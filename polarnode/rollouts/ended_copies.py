"""What a second home remembers of tasks that ended, whose copies it dropped.

A task that every reader has is one journal's alone. Whoever sends it again while that journal is away, as a
client does that got no answer, would begin it anew at another node, and its places would be filled twice. In
memory alone: a node that was killed in between has forgotten it, which takes three deaths within minutes.
"""

from typing import Final

from attrs import define, field

from polarnode.core.fleet import CopyRow, TaskCopy
from polarnode.support.bounded import remember

MOST: Final = 10_000  # 5 MB; at 14 tasks a second ten minutes, which is longer than clients send again


@define(eq=False)
class EndedCopies:
    """The latest MOST of them, by task and by idempotency key."""

    _rows: dict[str, CopyRow] = field(factory=dict, init=False)
    _tasks: dict[str, str] = field(factory=dict, init=False)  # by key

    def add(self, copy: TaskCopy) -> None:
        """The copy of a task that ended at its home."""
        row = CopyRow(
            task_id=copy.task_id, role="former", epoch=copy.epoch, home=copy.home, second="", ended=True
        )
        remember(self._rows, copy.task_id, row, most=MOST)
        if copy.idempotency_key is not None:
            remember(self._tasks, copy.idempotency_key, copy.task_id, most=MOST)

    def find(self, task_id: str | None, key: str | None) -> tuple[CopyRow, ...]:
        """The row of a task, by its id or key; at most one."""
        row = self._rows.get(task_id or self._tasks.get(key or "", ""))
        return () if row is None else (row,)
