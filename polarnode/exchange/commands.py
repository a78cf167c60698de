"""What an exchange can ask of whoever obeys it. Values.

The rule for whoever edits it: a new command is added to `Command`, and mypy then names the shell that does not obey it.
"""

from attrs import frozen

from polarnode.conversation import Answer, Usage
from polarnode.merge.lineage import Plan
from polarnode.ports import GenerateOrder
from polarnode.providers.dialect import STREAM_TYPE, Call, Fault, Reply
from polarnode.records import Turn


@frozen
class Render:
    """Turn the plan into ids: `Rendered` or `Unrenderable` follows. Of several samples of one prompt only the first is rendered."""

    plan: Plan


@frozen
class Generate:
    """Ask the engine: `Produced` or `EngineFailed` of this choice follow. Several that come at once are sampled side by side."""

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
    """The plan gets no turn; `fault` is why, None when the client just left, or when it was said of another plan of the same request."""

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
    """Bytes of a stream; the first opens it, as one of `content_type`. `alone`: they leave as a piece of their own, which some clients look for."""

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
