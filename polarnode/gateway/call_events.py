"""What can happen to a model request. Values; time is in monotonic seconds, taken by whoever waits.

The rule for whoever edits it: a new event is added to `Event`, and mypy then names the machine that does not
answer it.

What an exchange can ask of whoever obeys it. Values.

The rule for whoever edits it: a new command is added to `Command`, and mypy then names the shell that does
not obey it.
"""

from array import array

from attrs import field, frozen

from polarnode.core.arrays import ids
from polarnode.core.conversation import Answer, ModelRequest, Usage
from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn
from polarnode.merge.attach import Plan
from polarnode.providers.contract import STREAM_TYPE, Call, Fault, Reply

# ── events ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Asked:
    """A request was read and planned, once for each sample it asks for. `at` in monotonic seconds, `wall` in
    seconds since the epoch.

    `spoken`: what was sampled of this very answer for a client that left, when it is asked for again. The
    prompt then ends with it.
    """

    request: ModelRequest
    plans: tuple[Plan, ...]
    at: float
    wall: float
    spoken: "array[int]" = field(factory=ids)


@frozen(kw_only=True)
class Rendered:
    """The prompt is there, int32. Its last ids are `delta`, the first `close_length` of which close the
    parent's cut sample.

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


# ── commands ────────────────────────────────────────────────────────────


@frozen
class Render:
    """Turn the plan into ids: `Rendered` or `Unrenderable` follows. Of several samples of one prompt only the
    first is rendered.
    """

    plan: Plan


@frozen
class Generate:
    """Ask the engine: `Produced` or `EngineFailed` of this choice follow. Several that come at once are
    sampled side by side.
    """

    order: GenerateOrder
    choice: int = 0


@frozen
class Abort:
    """Take nothing more from the engine."""

    request_id: str


@frozen
class Record:
    """Keep this turn, now, without waiting for anything."""

    turn: Turn


@frozen
class Abandon:
    """The plan gets no turn; `fault` is why, None when the client just left, or when it was said of another
    plan of the same request.
    """

    plan: Plan
    fault: Fault | None


@frozen(kw_only=True)
class Answered:
    """The answer is whole, and its bytes follow."""

    call: Call
    answers: tuple[Answer, ...]
    usage: Usage


@frozen
class Send:
    """Bytes of a stream; the first opens it, as one of `content_type`. `alone`: they leave as a piece of
    their own, which some clients look for.
    """

    data: bytes
    content_type: str = STREAM_TYPE
    alone: bool = False


@frozen
class Done:
    """The stream is whole, or said in its API's own last words that it is not: end it properly."""


@frozen
class Break:
    """The stream is not whole: cut the connection, so that nobody takes it for one that is."""


Outgoing = Send | Done | Break | Reply  # a Reply is a whole answer, only ever before the first Send
Command = Render | Generate | Abort | Record | Abandon | Answered | Outgoing
