"""The events and commands of the machine that runs one model call. All of them are values.

An event says what happened; a command says what to do next. Times are monotonic seconds, taken by the caller.
Whoever adds an event adds it to `Event`, and a command to `Command`: mypy then names the code that does not
handle it.
"""

from array import array
from typing import Final

from attrs import frozen

from polarnode.core.conversation import Answer, ModelRequest, Usage
from polarnode.core.errors import Busy, EngineError, EngineRefusal, Refused
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn
from polarnode.merge.attach import Plan
from polarnode.providers.contract import STREAM_TYPE, Fault, ModelCallInfo, Reply

# A client that leaves and repeats its request without having got a token costs no turn this many times.
# Clients ask ten times at most (Claude Code); a client that always left could otherwise ask without end.
MAX_FREE_REPEATS: Final = 16


@frozen(kw_only=True)
class UndeliveredResponse:
    """A whole response that did not reach its client, with the ids it was sent under.

    It does not hold its request, which may be megabytes: the client sends the request again.
    """

    id: str
    created: int
    signature: str
    answers: tuple[Answer, ...]
    usage: Usage

    def call(self, request: ModelRequest, *, calls_first: bool = False) -> ModelCallInfo:
        """The call whose response this is, when it is sent again."""
        return ModelCallInfo(
            request=request,
            id=self.id,
            created=self.created,
            signature=self.signature,
            calls_first=calls_first,
        )


@frozen
class CutCall:
    """A call whose client left before it was answered. `turn` is the index of its cut turn, which the same
    request may resume; None where the request has to be answered from the beginning. `repeats` counts how
    often the request was sent again and its client left again without a further token.
    """

    turn: int | None = None
    repeats: int = 0


# ── events ────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class RequestReceived:
    """A request was read. `at` is in monotonic seconds, `wall` in seconds since the epoch.

    `refusal` says why the session accepts no new call; None when it accepts one. `undelivered` is what a
    client that sent this body earlier did not receive: a whole response, or a call that was cut.
    """

    at: float
    wall: float
    refusal: Fault | None = None
    undelivered: UndeliveredResponse | CutCall | None = None


@frozen(kw_only=True)
class PromptRendered:
    """The prompt as ids (int32). It ends with `delta`, whose first `close_length` ids close the parent's cut
    sample.

    `notes` say where the prompt differs from what the template would render, or from what the client sent.
    """

    prompt: "array[int]"
    delta: "array[int]"
    close_length: int = 0
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class RequestRefused:
    """The request is refused by the chat template, because its prompt is too long for the engine, or because
    its session has no room for the prompt now.
    """

    error: Refused | Busy


@frozen(kw_only=True)
class ChunkProduced:
    """The engine sampled some tokens."""

    chunk: Chunk
    at: float
    choice: int = 0


@frozen(kw_only=True)
class EngineFailed:
    """The engine failed this generation, or refused it because of what the request asked for."""

    error: EngineError | EngineRefusal
    at: float
    choice: int = 0


@frozen(kw_only=True)
class ClientLeft:
    """The client disconnected."""

    at: float


@frozen(kw_only=True)
class SessionEnded:
    """The session closed during this call; its client may still be connected."""

    at: float


@frozen
class Quiet:
    """Nothing was sent for so long that the client should get a keep-alive."""


Event = (
    RequestReceived
    | PromptRendered
    | RequestRefused
    | ChunkProduced
    | EngineFailed
    | ClientLeft
    | SessionEnded
    | Quiet
)


# ── commands ────────────────────────────────────────────────────────────


@frozen
class Render:
    """Render the plan as ids. `PromptRendered` or `RequestRefused` follows. Several samples share one prompt,
    and only the plan of the first is rendered.

    `history` are the ids of the turn that the plan extends; None for a root. `prefill` is the text that the
    answer continues, unless the history has it already.
    """

    plan: Plan
    history: "array[int] | None" = None
    prefill: str = ""


@frozen
class StartGeneration:
    """Generate with the engine. `ChunkProduced`, `EngineFailed` or `RequestRefused` follow, until
    `Exchange.ended(choice)`. Several in one list are sampled concurrently.
    """

    order: GenerateOrder
    choice: int = 0


@frozen
class RecordTurn:
    """Record this turn now, without awaiting anything. `resumable`: the same request may resume the turn when
    it is sent again. `owed`: the client got no answer, so the same request, sent again, counts as the same
    turn of the budget.
    """

    turn: Turn
    resumable: bool = False
    owed: bool = False


@frozen
class CountRefusal:
    """Count a refused request."""

    fault: Fault


@frozen
class CountPrewarm:
    """Count a request that asks for no generation; its empty response follows. A later request may refer to
    that response by the id in `call`.
    """

    call: ModelCallInfo


@frozen
class CountReplay:
    """Count an undelivered response that is sent again. The response remains undelivered until its last bytes
    are written.
    """


@frozen
class KeepResponse:
    """Keep a whole response until it is delivered. Its bytes follow."""

    response: UndeliveredResponse


@frozen
class Send:
    """Send bytes of a stream. The first bytes open it with `content_type`. `alone`: write them in a chunk of
    their own, which some clients require.
    """

    data: bytes
    content_type: str = STREAM_TYPE
    alone: bool = False


@frozen
class EndStream:
    """End the stream properly. Either it is whole, or its last bytes report the failure in the way of its
    API.
    """


@frozen
class Break:
    """Break the connection: the stream is not whole, and no client may take it for a whole one."""


# A Reply is a whole response. It only ever comes before the first Send.
OutgoingCommand = Send | EndStream | Break | Reply
BookkeepingCommand = RecordTurn | CountRefusal | CountPrewarm | CountReplay | KeepResponse
Command = Render | StartGeneration | BookkeepingCommand | OutgoingCommand
