"""Rollouts on a node: submit a task, wait until it is over, read its trajectory; many at once over one stream.

The rules for whoever edits it. A collection asks for thousands of rollouts at once, and a node's socket takes hundreds of connections, so that
who waits has no stream of its own; and what the stream misses is found by looking, so that a gap delays a rollout and never loses it. A client
that leaves takes its session with it, unless Gym has a name for the rollout, by which it will ask again.
"""

import logging
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

import trio
from attrs import define, field

from polarnode.conversation import Json
from polarnode.errors import PolarnodeError
from polarnode.records import Trajectory
from polarnode.tasks import TaskSpec

logger = logging.getLogger(__name__)

LOOK_S: Final = 30.0  # between looks at a task that the stream says nothing of: a request each, for minutes of work
PATIENCE_S: Final = 600.0  # seconds a node that gives no answer is waited for: it restarts in one or two minutes
CANCEL_S: Final = 10.0  # for saying that nobody waits any more


class NodeClient(Protocol):
    """What is asked of `polarnode.client.AsyncPolarnodeClient`."""

    async def submit(self, spec: TaskSpec | dict[str, Json], *, idempotency_key: str | None = None) -> Any: ...

    async def task_status(self, task_id: str) -> Any: ...

    async def trajectory(self, session_id: str, *, turns: Any = ..., arrays: Any = ...) -> Trajectory: ...

    async def cancel(self, task_id: str) -> bool: ...

    async def status(self) -> dict[str, Any]: ...

    def trajectories(self, *, after: int | None = None, follow: bool | None = None, kinds: Any = ...) -> AbstractAsyncContextManager[Any]: ...


@define(eq=False)
class Rollouts:
    """Of one node. `follow` is the service; `run` is for each rollout."""

    node: NodeClient
    _over: dict[str, trio.Event] = field(factory=dict, init=False)  # tasks that are waited for

    async def follow(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wake who waits for a task when it is over, for ever."""
        last = (await self.node.status())["journal"]["last_seq"]
        task_status.started()
        async with self.node.trajectories(after=last, follow=True, kinds=("task",)) as events:
            async for event in events:
                if event.kind == "task":
                    self._wake(event.data["task_id"])

    async def run(self, spec: TaskSpec, *, key: str | None) -> Trajectory:
        """One rollout, to its trajectory with all its turns."""
        task_id = (await self.node.submit(spec, idempotency_key=key)).task_id
        over = False
        try:
            session_id = await self._wait_over(task_id)
            over = True
        finally:
            if not over and key is None:
                with trio.move_on_after(CANCEL_S, shield=True):
                    await self._give_up(task_id)
        return await self.node.trajectory(session_id, turns="full")

    async def _wait_over(self, task_id: str) -> str:
        """The session that held the task's one place in the end."""
        answered = trio.current_time()
        while True:
            event = self._over.setdefault(task_id, trio.Event())  # before the look, so that an end between the two is not missed
            try:
                status = await self.node.task_status(task_id)
                answered = trio.current_time()
                if status.finished:
                    self._wake(task_id)
                    return str(status.sessions[0].session_id)
            except PolarnodeError as error:
                if trio.current_time() - answered > PATIENCE_S:
                    raise
                logger.warning("task %s could not be looked at, which is tried again: %s", task_id, error)
                await trio.sleep(1)
            with trio.move_on_after(LOOK_S):
                await event.wait()

    def _wake(self, task_id: str) -> None:
        event = self._over.pop(task_id, None)
        if event is not None:
            event.set()

    async def _give_up(self, task_id: str) -> None:
        self._wake(task_id)
        try:
            await self.node.cancel(task_id)
        except PolarnodeError as error:
            logger.warning("task %s could not be cancelled, and ends with its budgets: %s", task_id, error)
