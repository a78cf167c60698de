"""One error class for each boundary; each names whose fault it is.

`boundary()` is put around every call into foreign code and turns what it raises into one of these classes.
`str(error)` is one sentence that says what to do; it becomes `Outcome.reason` in a session's record. Add a
class here, and wrap the call, for each new boundary. No other code catches `Exception`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

MAX_MESSAGE_CHARS = 8000  # the ends of four logs; a message may quote a client's text of any length


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of a text, without its middle: a refusal begins with the field and ends with
    the remedy.
    """
    kept = (limit - len(" … ")) // 2
    return text if len(text) <= limit else f"{text[:kept]} … {text[-kept:]}"


class PolarnodeError(Exception):
    """The base of all errors that polarnode raises on purpose. Its text is one sentence for the user who can
    act on it, of at most MAX_MESSAGE_CHARS characters.
    """

    boundary = "node"

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message, MAX_MESSAGE_CHARS))


class Refused(PolarnodeError):
    """A request or a task is not accepted, which is the caller's fault. `path` names the field as a JSON path
    (`$.messages[0].role`).
    """

    boundary = "client"

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class ContextTooLong(Refused):
    """A prompt longer than the model can hold. Harnesses compact when this is reported in their provider's
    own words.
    """

    def __init__(self, *, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and this model holds {limit}: shorten the conversation"
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class EngineRefusal(Refused):
    """The engine refuses the request itself, such as a grammar that does not compile. The engine is well, and
    trying again gives the same.
    """


class ForkError(Refused):
    """A session should go on from a state of another session, and is not in that state. Trying again gives
    the same.
    """

    boundary = "fork"


class Conflict(PolarnodeError):
    """The id, key or place is taken; the text names it."""

    boundary = "client"


class Busy(PolarnodeError):
    """No capacity now; a retry after `retry_after` seconds can succeed."""

    boundary = "node"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DiskFull(PolarnodeError):
    """The journal's disk has no room for what a new session would write."""

    boundary = "journal"


class JournalDamaged(DiskFull):
    """The journal's file is damaged: what is written to it now may be lost, whatever room its disk has."""


class ConfigError(PolarnodeError):
    """A setting of the node that cannot work, named with its remedy."""

    boundary = "config"


class ModelError(PolarnodeError):
    """A checkpoint, tokenizer or chat template that cannot be served faithfully."""

    boundary = "model"


class EngineError(PolarnodeError):
    """The engine host refused, failed or died. `retryable` says whether a retry can succeed."""

    boundary = "engine"

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class RuntimeFault(PolarnodeError):
    """A container that did not start, answer or stop."""

    boundary = "runtime"


class ContentFault(RuntimeFault):
    """The content of a container prevents an operation: a link stands where a file is to be written, a user
    is gone, or the container's memory is used up. In a container that an agent worked in, the agent caused
    it.
    """


class HarnessError(PolarnodeError):
    """A harness that is unknown, misconfigured or not in its image."""

    boundary = "harness"


class EvaluatorError(PolarnodeError):
    """An evaluator that could not judge."""

    boundary = "evaluator"


class SpoiltRuntime(EvaluatorError):
    """Nothing can run in a container any more, because of what ran in it before."""


class JournalError(PolarnodeError):
    """The journal cannot take or return an entry (a full disk, a torn file)."""

    boundary = "journal"


class Unreadable(JournalError):
    """An entry of the journal cannot be returned: its row is damaged, or it cannot be written as JSON. Trying
    again gives the same.
    """


class InvariantViolated(PolarnodeError):
    """A trajectory that violates an invariant of tokens; the text holds the numbers. Always a bug of
    polarnode.
    """

    boundary = "laws"


@contextmanager
def boundary(kind: type[PolarnodeError], what: str) -> Iterator[None]:
    """Turn whatever a foreign library raises inside the block into `kind`, keeping the cause. Errors of this
    module and cancellation pass unchanged.
    """
    try:
        yield
    except PolarnodeError:
        raise
    except Exception as error:
        raise kind(f"{what}: {str(error) or type(error).__name__}") from error
