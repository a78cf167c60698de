"""Events and commands of the machine of one model call. Values.

An event says what happened; a command says what to do next. Times are monotonic seconds, taken by the caller.
A new event is added to `Event`, a new command to `Command`: mypy then names the code that does not handle it.
"""

from array import array

from attrs import field, frozen

from polarnode.core.arrays import ids
from polarnode.core.conversation import Answer, ModelRequest, Usage
from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn
from polarnode.merge.attach import Plan
from polarnode.merge.token_extras import CallExtras
from polarnode.providers.contract import STREAM_TYPE, Fault, ModelCallInfo, Reply


@frozen(kw_only=True)
class UndeliveredResponse:
    """A whole response that did not reach its client, with the names it was given under.

    It does not hold its request, which may be megabytes: the client sends that again.
    """

    id: str
    created: int
    signature: str
    answers: tuple[Answer, ...]
    usage: Usage

    def call(self, request: ModelRequest) -> ModelCallInfo:
        """The call under which it is sent again."""
        return ModelCallInfo(request=request, id=self.id, created=self.created, signature=self.signature)


# ── events ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class Requested:
    """A request was read. `at` in monotonic seconds, `wall` in seconds since the epoch.

    `refusal`: why the session takes no new call, None when it does. `undelivered`: what a client that sent
    this body before did not get, a whole response or the number of the turn that was cut.
    """

    at: float
    wall: float
    refusal: Fault | None = None
    undelivered: UndeliveredResponse | int | None = None


@frozen(kw_only=True)
class Planned:
    """The request has its turns, one plan for each sample it asks for.

    `resumed_prefix`: what was already sampled of this answer, when it resumes a cut turn; the prompt then
    ends with it. `signature` is the opaque reference of the first turn, `carry` the token extras its turns
    keep.
    """

    plans: tuple[Plan, ...]
    resumed_prefix: "array[int]" = field(factory=ids)
    signature: str = ""
    carry: CallExtras = field(factory=CallExtras)


@frozen(kw_only=True)
class PromptRendered:
    """The prompt as ids, int32. It ends with `delta`, the first `close_length` of which close the parent's
    cut sample.

    `notes`: where it differs from what the template would show, or from what the client sent.
    """

    prompt: "array[int]"
    delta: "array[int]"
    close_length: int = 0
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class RequestRefused:
    """The lineages, the chat template or the engine do not take this request."""

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
    """The session closed while this call was in progress; its client may still be connected."""

    at: float


@frozen
class Quiet:
    """Nothing was sent for as long as a client should wait for a keep-alive."""


Event = (
    Requested
    | Planned
    | PromptRendered
    | RequestRefused
    | Produced
    | EngineFailed
    | ClientLeft
    | SessionEnded
    | Quiet
)


# ── commands ────────────────────────────────────────────────────────────


@frozen
class PlanTurns:
    """Plan a turn for each sample: `Planned` or `RequestRefused` follows. `resume` is the number of a cut
    turn to go on with, if that is possible.
    """

    resume: int | None = None


@frozen
class Render:
    """Turn the plan into ids: `PromptRendered` or `RequestRefused` follows. Of several samples of one prompt
    only the first is rendered.
    """

    plan: Plan


@frozen
class StartGeneration:
    """Generate with the engine: `Produced`, `EngineFailed` or `RequestRefused` follow, until
    `Exchange.ended(choice)`. Several that come at once are sampled side by side.
    """

    order: GenerateOrder
    choice: int = 0


@frozen
class RecordTurn:
    """Record this turn now, without waiting for anything. `resumable`: the same request sent again may resume
    it.
    """

    turn: Turn
    resumable: bool = False


@frozen
class Abandon:
    """The plan gets no turn. `fault` is the refusal to count; None when the client left, or when it was
    counted for another plan of the same request.
    """

    plan: Plan
    fault: Fault | None


@frozen
class CountRefusal:
    """The request is refused before it has a plan."""

    fault: Fault


@frozen
class CountPrewarm:
    """The request asks for no generation, and its empty response follows. A later request may name it by
    `call`.
    """

    call: ModelCallInfo


@frozen
class CountReplay:
    """An undelivered response follows, once more. It stays undelivered until its last bytes are written."""


@frozen
class KeepResponse:
    """The response is whole and its bytes follow: keep it until they are delivered."""

    response: UndeliveredResponse


@frozen
class Send:
    """Bytes of a stream; the first opens it with `content_type`. `alone`: they are written in a chunk of
    their own, which some clients expect.
    """

    data: bytes
    content_type: str = STREAM_TYPE
    alone: bool = False


@frozen
class EndStream:
    """End the stream properly: it is whole, or it has said in its API's own last words that it is not."""


@frozen
class Break:
    """Cut the connection: the stream is not whole, and no client may take it for one that is."""


Outgoing = Send | EndStream | Break | Reply  # a Reply is a whole response, only ever before the first Send
Bookkeeping = RecordTurn | Abandon | CountRefusal | CountPrewarm | CountReplay | KeepResponse
Command = PlanTurns | Render | StartGeneration | Bookkeeping | Outgoing
