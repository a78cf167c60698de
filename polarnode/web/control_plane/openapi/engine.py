"""What the routes to the engine and to captures take and give.

The rule for whoever edits it: as in `operations`, types and never a copy of their fields.
"""

from collections.abc import Mapping
from typing import Final, Literal

from attrs import frozen

from polarnode.conversation import Json
from polarnode.records import Outcome
from polarnode.shell.captures.capture import CaptureStatus, Opened
from polarnode.shell.weights import (
    BroadcastBucket,
    GroupOrder,
    MemoryOrder,
    PauseOrder,
    TensorBucket,
    UpdateOpened,
    UpdateOrder,
    UpdateReport,
    WeightsStatus,
)
from polarnode.tasks import CaptureEnd, CaptureSpec
from polarnode.web.control_plane.openapi.operations import Operation, Where


@frozen(kw_only=True)
class Weights(WeightsStatus):
    """The weights now, and the last updates, newest first."""

    history: tuple[dict[str, Json], ...]


@frozen(kw_only=True)
class Joined:
    """A process group that the engine is in."""

    name: str
    world_size: int
    rank_offset: int


@frozen(kw_only=True)
class Left:
    """A process group that the engine was in."""

    name: str


@frozen(kw_only=True)
class Captures:
    """Those that are open."""

    captures: tuple[CaptureStatus, ...]
    limit: int


@frozen(kw_only=True)
class CaptureOpen(CaptureStatus):
    """A capture under way."""

    outcome: Literal[None]


@frozen(kw_only=True)
class CaptureOver:
    """What became of a capture, without its tokens."""

    session_id: str
    task_id: str
    group_id: str
    sample_index: int
    outcome: Outcome
    reward: float | None
    turns: int
    traces: int
    sampled_tokens: int
    trainable_tokens: int


_UPDATE: Final[Where] = ("POST", "/v1/weights/updates/<update_id>/commit")

ENGINE: Final[Mapping[Where, Operation]] = {
    ("POST", "/v1/weights"): Operation(
        summary="Serve new weights, on every engine host as one version.",
        tag="weights",
        body=UpdateOrder,
        status=201,
        again=200,
        answer=UpdateReport,
        errors=(409, 413, 503),
    ),
    ("GET", "/v1/weights"): Operation(summary="The weights served, and those before.", tag="weights", answer=Weights),
    ("POST", "/v1/weights/updates"): Operation(
        summary="Begin an update of several requests.",
        tag="weights",
        body=UpdateOrder,
        status=201,
        answer=UpdateOpened,
        errors=(409, 413, 503),
        leads_to={"/update_id": _UPDATE},
    ),
    ("POST", "/v1/weights/updates/<update_id>/buckets"): Operation(
        summary="One bucket more.", tag="weights", body=TensorBucket | BroadcastBucket, answer=UpdateOpened, errors=(404, 409, 413, 503)
    ),
    _UPDATE: Operation(summary="Serve what came.", tag="weights", status=201, again=200, answer=UpdateReport, errors=(404, 409, 503)),
    ("DELETE", "/v1/weights/updates/<update_id>"): Operation(summary="Give an update up.", tag="weights", answer=WeightsStatus, errors=(404, 409)),
    ("POST", "/v1/weights/groups"): Operation(
        summary="Join a process group to receive weights in.", tag="weights", body=GroupOrder, status=201, answer=Joined, errors=(409, 413, 503)
    ),
    ("DELETE", "/v1/weights/groups/<name>"): Operation(summary="Leave it.", tag="weights", answer=Left, errors=(404, 409, 503)),
    ("POST", "/v1/engine/pause"): Operation(
        summary="Hold generation.", tag="weights", body=PauseOrder, optional_body=True, answer=WeightsStatus, errors=(409, 413, 503)
    ),
    ("POST", "/v1/engine/resume"): Operation(summary="Let generation go on.", tag="weights", answer=WeightsStatus, errors=(409, 503)),
    ("POST", "/v1/engine/memory/release"): Operation(
        summary="Lend the GPUs' memory.", tag="weights", body=MemoryOrder, optional_body=True, answer=WeightsStatus, errors=(409, 413, 503)
    ),
    ("POST", "/v1/engine/memory/resume"): Operation(
        summary="Take it again.", tag="weights", body=MemoryOrder, optional_body=True, answer=WeightsStatus, errors=(409, 413, 503)
    ),
    ("POST", "/v1/capture"): Operation(
        summary="Open a session whose harness you run yourself.",
        tag="captures",
        body=CaptureSpec,
        optional_body=True,
        status=201,
        again=200,
        answer=Opened,
        errors=(409, 413, 429, 507),
        leads_to={"/session_id": ("DELETE", "/v1/capture/<session_id>")},
    ),
    ("GET", "/v1/capture"): Operation(summary="Captures that are open.", tag="captures", answer=Captures),
    ("GET", "/v1/capture/<session_id>"): Operation(
        summary="A capture, open or over.", tag="captures", answer=CaptureOpen | CaptureOver, errors=(404,)
    ),
    ("DELETE", "/v1/capture/<session_id>"): Operation(
        summary="End a capture into its trajectory.",
        tag="captures",
        body=CaptureEnd,
        optional_body=True,
        answer=CaptureOver,
        errors=(404, 409, 413),
    ),
}
