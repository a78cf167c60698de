"""What a trainer imports: submit tasks, read groups and trajectories, acknowledge, push weights, capture an
agent.

The scripts (`api.py` and the modules it uses) do no I/O; two clients run them: PolarnodeClient on the
standard library, and AsyncPolarnodeClient on httpx2, under Trio and asyncio. Keep the import of this package
light: it takes 0.15 s and loads none of the node's own libraries. The asynchronous client is imported on
first use.
"""

from typing import TYPE_CHECKING

from polarnode.client.api import Captured, CaptureSession
from polarnode.client.blocking import PolarnodeClient
from polarnode.client.values import ClientError, Event, Unreachable
from polarnode.core.status import (
    EvaluationStatus,
    RewardEvent,
    ScoredRow,
    ScoreRow,
    SessionStatus,
    Submitted,
    TaskStatus,
    UnreadableEvent,
)
from polarnode.core.weights import WeightsReport, WeightsStatus
from polarnode.groups.policy_difference import SessionDifference

if TYPE_CHECKING:
    from polarnode.client.asynchronous import AsyncPolarnodeClient

__all__ = [
    "AsyncPolarnodeClient",
    "CaptureSession",
    "Captured",
    "ClientError",
    "EvaluationStatus",
    "Event",
    "PolarnodeClient",
    "RewardEvent",
    "ScoreRow",
    "ScoredRow",
    "SessionDifference",
    "SessionStatus",
    "Submitted",
    "TaskStatus",
    "Unreachable",
    "UnreadableEvent",
    "WeightsReport",
    "WeightsStatus",
]


def __getattr__(name: str) -> object:
    if name == "AsyncPolarnodeClient":
        from polarnode.client.asynchronous import AsyncPolarnodeClient

        return AsyncPolarnodeClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
