"""Protocols that higher rooms implement for the rooms below them: tokenizer, engine, runtime, judge, harness.

Protocols only, so that pure code can name them without waiting, opening anything or importing Trio.
"""

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeVar, runtime_checkable

from attrs import field, frozen

from polarnode.core.arrays import RoutedExperts, TopLogprobs
from polarnode.core.conversation import Constraint, FinishReason, Json, Sampling
from polarnode.core.task import McpServerSpec
from polarnode.core.trajectory import VersionSpan


class Tokenizer(Protocol):
    """A model's tokenizer and chat template, loaded. `control` maps every added token's text to its id."""

    @property
    def vocab_size(self) -> int: ...  # ids of the embedding, including those unknown to the tokenizer

    @property
    def control(self) -> Mapping[str, int]: ...

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text with the vocabulary alone: it never yields a control token."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for; for a control token, those of its text."""

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Mapping[str, Json]],
        generation_prompt: bool,
        thinking: bool | None,
    ) -> str:
        """Render a conversation, in the OpenAI shape that templates read, with the chat template."""


@frozen(kw_only=True)
class LogitSteering:
    """A logit processor of the engine's own kind, and its parameters. Tests use it to make answers
    predictable, research to change sampling.

    `processor` is SGLang's spelling (`CustomLogitProcessor.to_str()`). The engine must have been started with
    `enable_custom_logit_processor`.
    """

    processor: str
    parameters: Mapping[str, Json]


@frozen(kw_only=True)
class GenerateOrder:
    """One generation. `request_id` is 32 hex digits (the engine matches aborts by prefix); `affinity` names
    the session whose prefix is cached, `chain` the conversation within it: the main agent's, or a
    sub-agent's.

    `top_logprobs`: how many alternatives to return with each token. `constraint_after`: the id after which
    `constraint` begins, the end of a thought that the prompt left open; None begins with the first token.
    `routed_from`: the first position of the prompt whose experts are returned, with all later ones; None
    returns none. `adapter`: the name of the adapter to sample by, in the version that is current when the
    call begins; empty: the base. `whole`: its reader shows nothing before the end, so that what comes
    before it may wait, as `WithheldChunks`.
    """

    request_id: str
    prompt: "array[int]"
    sampling: Sampling
    stop_ids: tuple[int, ...]
    affinity: str = ""
    chain: str = ""
    constraint: Constraint | None = None
    top_logprobs: int = 0
    steering: LogitSteering | None = None
    constraint_after: int | None = None
    routed_from: int | None = None
    adapter: str = ""
    whole: bool = False


@frozen(kw_only=True)
class Chunk:
    """Some tokens of a sample, in order. The last chunk has `finish_reason`; `version_spans` index into the
    whole sample so far.

    `finish_reason` is None while more follows, else "stop" (a stop id, which is the last of `ids`), "length"
    or "abort". `first_at`: when the sample's first token came, on the reader's clock; None: as this chunk is
    read. `top_logprobs` has a row for each of `ids` where it was requested. `routed` comes with the
    last chunk where it was requested, unless that is an "abort".
    """

    ids: "array[int]"
    logprobs: "array[float]"
    finish_reason: FinishReason | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    first_at: float | None = None
    top_logprobs: TopLogprobs | None = None
    routed: RoutedExperts | None = None


@frozen(kw_only=True)
class ScoreOrder:
    """A row to score: its ids, int32[T], of which tokens [start, T) get a logprob, each after all tokens
    before it. `start` is 1 or more, because nothing is before the first. `adapter` names one of the engine's.
    `request_id` is 32 hex digits.
    """

    request_id: str
    row: "array[int]"
    start: int = 1
    adapter: str = ""


@frozen(kw_only=True)
class RowScores:
    """The logprobs of a row's tokens from `start` on, float32[T - start], in nats, at temperature 1, and the
    weights that gave them.
    """

    logprobs: "array[float]"
    version: str


class Scorer(Protocol):
    """A model that scores rows of the policy's token ids."""

    async def score(self, order: ScoreOrder) -> RowScores:
        """Score a row. Raises Refused for one that the model cannot read, EngineError when it fails."""


@runtime_checkable
class WithheldChunks(Protocol):
    """A stream of chunks of which some may have arrived and wait for others."""

    def withheld(self) -> Chunk | None:
        """The tokens that have arrived without a reader being woken; None if there are none."""


class Engine(Protocol):
    """The model, for token ids. Leaving the block in any way aborts the generation; a dead engine raises
    EngineError at once.
    """

    def generate(self, order: GenerateOrder) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]: ...


# Shells and Podman give these exit codes the following meanings.
NOT_RUN: Final = {
    126: "a program could not be executed",
    127: "a program was not found in its image",
}
# The exit code of a program that lost its own: it let its monitor trace it (PTRACE_TRACEME), which then takes
# its first stop for its end. Programs have 0 to 255.
LOST: Final = -1


@frozen(kw_only=True)
class Ended:
    """A process in a runtime that ended. Output is bounded; `truncated` says that some was dropped (the end
    is kept). `exit_code` is LOST where the program itself saw to it that there is none.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False


class Runtime(Protocol):
    """A started container with its own model endpoint. Every method may raise RuntimeFault."""

    @property
    def id(self) -> str: ...

    @property
    def workdir(self) -> str: ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
        keep: int | None = None,
    ) -> Ended:
        """Run a program to its end; the last `keep` bytes of each stream are kept (default: the runtime's
        bound). Cancelling ends the whole process group: TERM, then KILL.
        """

    async def put(self, files: Mapping[str, bytes], *, user: str | None = None, mode: int = 0o644) -> None:
        """Write files (absolute path to content), making folders; owned by `user` (default: the
        runtime's).
        """

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes | None:
        """Return a file's first `limit` bytes, None when it does not exist. Never follows a link."""

    async def end_processes(self) -> None:
        """End everything that the session started in the container; only the container's own first process
        stays.
        """


@frozen(kw_only=True)
class TimedProgram:
    """A program to run for at most `within_s` seconds, its start included. Its workdir is the runtime's. Of
    each stream the last `keep` bytes are kept.
    """

    argv: tuple[str, ...]
    within_s: float
    keep: int
    stdin: bytes = b""
    env: Mapping[str, str] = field(factory=dict)
    user: str | None = None


@frozen(kw_only=True)
class TimedResult:
    """How a timed program ended: `ended` is None if its time was over. `seconds`: how long it took."""

    ended: Ended | None
    seconds: float


Work = TypeVar("Work")


class Clock(Protocol):
    """The node's own clock, which no program in a container can stop."""

    async def run(self, runtime: Runtime, program: TimedProgram) -> TimedResult:
        """Run a program to its end or until its time is over, then end every process in its runtime."""

    async def beside(
        self, work: Callable[[], Awaitable[Work]], attend: Callable[[], Awaitable[bool]]
    ) -> Work:
        """The result of `work`. Meanwhile call `attend` again and again, after a pause where it returns
        False. If either raises a PolarnodeError, both end and that error is raised.
        """


@frozen(kw_only=True)
class Question:
    """A question for a judge: chat messages in OpenAI's shape. With `schema` (JSON Schema) the answer must be
    JSON that matches it.
    """

    messages: tuple[Mapping[str, Json], ...]
    schema: Mapping[str, Json] | None = None
    temperature: float = 0.0
    max_tokens: int = 2048  # a rubric's answer with its reasons; a thinking judge needs more


class Judge(Protocol):
    """A model that judges, at an endpoint of the node's config."""

    async def ask(self, question: Question) -> str:
        """Return the text of the judge's answer. Raises EvaluatorError when there is none after its
        retries.
        """

    async def ask_each(self, questions: Sequence[Question]) -> list[str]:
        """Ask several questions, as many at once as the judge accepts; return the answers in order. If one
        fails, all fail.
        """


@frozen(kw_only=True)
class Launch:
    """How to start a harness: a program with its environment, the files it reads (all absolute paths) and its
    standard input. Nothing of it goes through a shell.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    stdin: bytes = b""


@frozen(kw_only=True)
class Endpoint:
    """Where a harness finds its model: `base_url` without a version path (`http://127.0.0.1:8080`), and the
    session's key.
    """

    base_url: str
    key: str
    context_length: int
    model: str


@frozen(kw_only=True)
class HarnessOrder:
    """What a harness module turns into a Launch."""

    instruction: str
    endpoint: Endpoint
    workdir: str
    home: str
    model_name: str | None
    settings: Mapping[str, Json]
    env: Mapping[str, str]
    command: tuple[str, ...] | None = None
    mcp_servers: Mapping[str, McpServerSpec] = field(factory=dict)
    skills: Mapping[str, str] = field(factory=dict)
