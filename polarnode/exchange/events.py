"""What can happen to a model request. Values; time is in monotonic seconds, taken by whoever waits.

The rule for whoever edits it: a new event is added to `Event`, and mypy then names the machine that does not answer it.
"""

from array import array

from attrs import field, frozen

from polarnode.conversation import ModelRequest
from polarnode.errors import EngineError, Refused
from polarnode.merge.lineage import Plan
from polarnode.ports import Chunk
from polarnode.records import ids


@frozen(kw_only=True)
class Asked:
    """A request was read and planned, once for each sample it asks for. `at` in monotonic seconds, `wall` in seconds since the epoch.

    `spoken`: what was sampled of this very answer for a client that left, when it is asked for again. The prompt then ends with it.
    """

    request: ModelRequest
    plans: tuple[Plan, ...]
    at: float
    wall: float
    spoken: "array[int]" = field(factory=ids)


@frozen(kw_only=True)
class Rendered:
    """The prompt is there, int32. Its last ids are `delta`, the first `close_length` of which close the parent's cut sample.

    `notes`: where it differs from what the template would show, or from what the client said.
    """

    prompt: "array[int]"
    delta: "array[int]"
    close_length: int = 0
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class Unrenderable:
    """The chat template, or the model, does not take this conversation."""

    error: Refused


@frozen(kw_only=True)
class Produced:
    """The engine sampled some tokens."""

    chunk: Chunk
    at: float
    choice: int = 0


@frozen(kw_only=True)
class EngineFailed:
    """The engine gave up on this generation."""

    error: EngineError
    at: float
    choice: int = 0


@frozen(kw_only=True)
class ClientLeft:
    """Nobody reads the answer any more."""

    at: float


@frozen(kw_only=True)
class SessionEnded:
    """The session closed while this call was under way; its client may still be there."""

    at: float


@frozen
class Quiet:
    """Nothing was sent for as long as a client should wait for a sign of life."""


Event = Asked | Rendered | Unrenderable | Produced | EngineFailed | ClientLeft | SessionEnded | Quiet
