"""What the control plane needs of the node, and how the node says no (its errors: 409, 429, 507)."""

from typing import Protocol

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Busy, Conflict, DiskFull
from polarnode.tasks import TaskSpec
from polarnode.web.control_plane.metrics import Figures

__all__ = ["Busy", "Conflict", "DiskFull", "Service", "Submitted"]


@frozen(kw_only=True)
class Submitted:
    """A task that was taken; `created` is False when it had been taken before and this is the same answer again."""

    task_id: str
    session_ids: tuple[str, ...]
    created: bool = True


class Service(Protocol):
    """The node, as its trainers see it."""

    async def submit(self, spec: TaskSpec, *, idempotency_key: str | None) -> Submitted:
        """Take a task. Raises Refused, Conflict, Busy or DiskFull."""
        ...

    async def cancel(self, task_id: str) -> bool:
        """End a task's sessions with what they have; False when none of them is live."""
        ...

    def status(self) -> dict[str, Json]:
        """The node now, for GET /v1/status; the journal's part is added there."""
        ...

    def figures(self) -> Figures:
        """The node now, for GET /metrics: values that nobody changes, whatever thread reads them."""
        ...

    def ready(self) -> bool:
        """Whether the engines answer and tasks are taken."""
        ...
