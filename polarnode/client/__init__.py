"""What a trainer imports: submit tasks, read groups and trajectories as they come, acknowledge, push weights,
capture an agent of its own.

One set of scripts that do no I/O (`api.py`, and what it is made of), two that obey them: PolarnodeClient of
the standard library, and AsyncPolarnodeClient over httpx2, under Trio and asyncio. The rules for whoever
edits it. Importing this costs a trainer 0.15 s and none of the node's own libraries; the asynchronous client
is imported when it is asked for.
"""

from typing import TYPE_CHECKING

from polarnode.client.api import Captured, CaptureSession
from polarnode.client.blocking import PolarnodeClient
from polarnode.client.values import ClientError, Event, Unreachable
from polarnode.core.status import SessionStatus, Submitted, TaskStatus
from polarnode.core.weights import WeightsReport, WeightsStatus

if TYPE_CHECKING:
    from polarnode.client.asynchronous import AsyncPolarnodeClient

__all__ = [
    "AsyncPolarnodeClient",
    "CaptureSession",
    "Captured",
    "ClientError",
    "Event",
    "PolarnodeClient",
    "SessionStatus",
    "Submitted",
    "TaskStatus",
    "Unreachable",
    "WeightsReport",
    "WeightsStatus",
]


def __getattr__(name: str) -> object:
    if name == "AsyncPolarnodeClient":
        from polarnode.client.asynchronous import AsyncPolarnodeClient

        return AsyncPolarnodeClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
