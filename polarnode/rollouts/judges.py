"""Judges over HTTP: models that evaluators query, at Chat Completions endpoints named in the node's config.

`open_judges` provides them by name while its block runs. A task only names a judge; the config alone decides
the endpoint and the key. Every question ends: `answer_s` bounds one attempt, `attempts` the number of
attempts, and the POST budget the total time. Invariants: `read_reply` alone decides whether another attempt
can help; no error message contains a key.
"""

import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import httpx2
import trio
from attrs import define, field, frozen

from polarnode.core import codec
from polarnode.core.backoff import Backoff
from polarnode.core.codec.limits import is_loopback
from polarnode.core.conversation import Json
from polarnode.core.errors import ConfigError, EvaluatorError, PolarnodeError, Refused, boundary
from polarnode.core.ports import Judge, Question
from polarnode.evaluators.judging import JudgeConfig, unknown_judge

# ── requests and replies ──────────────────────────────────────────────────────

# The statuses, besides 5xx, after which the same request may succeed later.
PASSES = frozenset({408, 409, 425, 429})
REASON_CHARS = 300  # characters of an endpoint's own error in a message
SCHEMA_NAME = "verdict"


@frozen
class TransientFailure:
    """A transient failure; `after_s` is the pause that the endpoint requests."""

    reason: str
    after_s: float = 0.0


@frozen(kw_only=True)
class JudgeReply:
    """An HTTP response of a judge's endpoint."""

    status: int
    headers: Mapping[str, str] = field(factory=dict)
    body: bytes = b""


def request_body(config: JudgeConfig, question: Question) -> bytes:
    """The request as JSON. The config's `body` is merged over it; a null there removes a field."""
    body: dict[str, Json] = {
        "model": config.model,
        "messages": [dict(message) for message in question.messages],
        "temperature": question.temperature,
        "max_tokens": question.max_tokens,
        "stream": False,
    }
    if question.schema is not None and config.structured != "text":
        body["response_format"] = _response_format(config, question.schema)
    return codec.dump_json(
        {name: value for name, value in {**body, **config.body}.items() if value is not None}
    )


def _response_format(config: JudgeConfig, schema: Mapping[str, Json]) -> Json:
    if config.structured == "object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": {"name": SCHEMA_NAME, "strict": True, "schema": dict(schema)},
    }


def read_reply(
    reply: JudgeReply, *, who: str, now: float, secret: str | None = None
) -> str | TransientFailure:
    """The answer's text, or a transient failure. Raises EvaluatorError if another attempt would not help.
    `now` is seconds since the epoch.
    """
    if reply.status == 200:
        return _text(reply, who)
    reason = f"HTTP {reply.status}{_words(reply, secret)}"
    if reply.status in PASSES or reply.status >= 500:
        return TransientFailure(reason, after_s=_retry_after(reply, now))
    raise EvaluatorError(f"{who} refused the question: {reason}")


# ── an answer ─────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class _ChatMessage:
    content: str | None = None
    refusal: str | None = None


@frozen(kw_only=True)
class _ChatChoice:
    message: _ChatMessage
    finish_reason: str | None = None


@frozen(kw_only=True)
class _ChatCompletion:
    choices: tuple[_ChatChoice, ...]


def _text(reply: JudgeReply, who: str) -> str:
    try:
        completion = codec.structure(codec.read_json(reply.body), _ChatCompletion)
    except Refused as refused:
        raise EvaluatorError(f"{who} answered with what is no chat completion: {refused}") from refused
    if not completion.choices:
        raise EvaluatorError(f"{who} answered without a choice")
    choice = completion.choices[0]
    if choice.message.refusal:
        raise EvaluatorError(f"{who} would not answer: {choice.message.refusal[:REASON_CHARS]}")
    if choice.finish_reason == "length":
        raise EvaluatorError(f"{who} was cut at its token limit: raise the evaluator's max_tokens")
    if not choice.message.content:
        raise EvaluatorError(f"{who} answered without text (finish_reason {choice.finish_reason})")
    return choice.message.content


# ── a refusal ─────────────────────────────────────────────────────────────────


def _words(reply: JudgeReply, secret: str | None) -> str:
    """The endpoint's error message in the format of OpenAI, or the beginning of its body."""
    try:
        value = codec.read_json(reply.body)
    except Refused:
        value = None
    error = value.get("error", value) if isinstance(value, dict) else None
    found = error.get("message") if isinstance(error, dict) else error
    text = found if isinstance(found, str) else reply.body[: 4 * REASON_CHARS].decode("utf-8", "replace")
    text = " ".join(text.split())
    if secret:
        text = text.replace(secret, "…")
    return f": {text[:REASON_CHARS]}" if text else ""


def _retry_after(reply: JudgeReply, now: float) -> float:
    """The seconds to wait, from a number or a date in the header; 0 if it is missing or unreadable."""
    header = reply.headers.get("retry-after", "").strip()
    if header.replace(".", "", 1).isdecimal():
        return float(header)
    try:
        found = parsedate_to_datetime(header) if header else None
    except ValueError:
        return 0.0
    if found is None:
        return 0.0
    at: datetime = found if found.tzinfo else found.replace(tzinfo=timezone.utc)  # noqa: UP017
    return max(0.0, at.timestamp() - now)


# ── judges ────────────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

# The limit on the bytes of an answer with the judge's reasons and thoughts, a hundred times a long one.
ANSWER_BYTES = 4 << 20
# The pauses between attempts. Several of the longest must fit in a POST budget of five minutes, and sessions
# that were refused together must not retry together.
PAUSES = Backoff(first_s=1.0, longest_s=30.0, jitter=0.25)
# A judge that requests a longer pause has no quota left, and the session fails at once.
MAX_REQUESTED_PAUSE_S = 120.0
CLOSE_S = 5.0  # for closing idle connections


@frozen(kw_only=True)
class JudgeStatistics:
    """Questions to one judge since the node's start: `asked` by evaluators, retried (`again`) after a
    transient failure, and `failed` for good.
    """

    asked: int = 0
    again: int = 0
    failed: int = 0
    under_way: int = 0
    waiting: int = 0


@define(eq=False, kw_only=True)
class HttpJudge:
    """`polarnode.core.ports.Judge` at one endpoint."""

    name: str
    config: JudgeConfig
    client: httpx2.AsyncClient
    now: Callable[[], float] = time.time  # the clock for a Retry-After that is a date
    _secret: str | None = field(default=None, alias="secret", repr=False)
    _slots: trio.CapacityLimiter = field(init=False)
    _questions: int = field(default=0, init=False)
    _again: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)

    @_slots.default
    def _make_slots(self) -> trio.CapacityLimiter:
        return trio.CapacityLimiter(self.config.at_once)

    async def ask(self, question: Question) -> str:
        """Ask one question and return the answer's text. A question that waits for a retry keeps its slot:
        another would get the same refusal.
        """
        self._questions += 1
        try:
            async with self._slot():
                return await self._answered(request_body(self.config, question))
        except EvaluatorError:
            self._failed += 1
            raise

    async def ask_each(self, questions: Sequence[Question]) -> list[str]:
        """Ask questions concurrently, as slots allow; answers are in order. The first failure cancels the
        others.
        """
        answers: list[str] = [""] * len(questions)
        failed: list[PolarnodeError] = []
        async with trio.open_nursery() as nursery:

            async def one(index: int) -> None:
                try:
                    answers[index] = await self.ask(questions[index])
                except PolarnodeError as error:
                    # It is kept as a value, because the nursery would wrap it in an exception group.
                    failed.append(error)
                    nursery.cancel_scope.cancel()

            for index in range(len(questions)):
                nursery.start_soon(one, index)
        if failed:
            raise failed[0]
        return answers

    def statistics(self) -> JudgeStatistics:
        """The counts now."""
        slots = self._slots.statistics()
        return JudgeStatistics(
            asked=self._questions,
            again=self._again,
            failed=self._failed,
            under_way=slots.borrowed_tokens,
            waiting=slots.tasks_waiting,
        )

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        borrower = object()  # One evaluator may have several questions under way.
        await self._slots.acquire_on_behalf_of(borrower)
        try:
            yield
        finally:
            self._slots.release_on_behalf_of(borrower)

    async def _answered(self, body: bytes) -> str:
        answer = await self._attempt(body)
        for attempt in range(1, self.config.attempts):
            if isinstance(answer, str):
                return answer
            pause = _pause(answer, attempt)
            if answer.after_s > MAX_REQUESTED_PAUSE_S:
                raise EvaluatorError(
                    f"judge {self.name} requests a pause of {answer.after_s:.0f} s: {answer.reason}"
                )
            logger.info("judge %s is asked again in %.1f s: %s", self.name, pause, answer.reason)
            self._again += 1
            await trio.sleep(pause)
            answer = await self._attempt(body)
        if isinstance(answer, str):
            return answer
        attempts = "one attempt" if self.config.attempts == 1 else f"{self.config.attempts} attempts"
        raise EvaluatorError(f"judge {self.name} gave no answer in {attempts}: {answer.reason}")

    async def _attempt(self, body: bytes) -> str | TransientFailure:
        with trio.move_on_after(self.config.answer_s):
            try:
                with boundary(EvaluatorError, f"judge {self.name} could not be asked"):
                    return read_reply(
                        await self._post(body), who=f"judge {self.name}", now=self.now(), secret=self._secret
                    )
            except EvaluatorError as error:
                if isinstance(error.__cause__, httpx2.TransportError):
                    return TransientFailure(
                        f"the connection failed ({error.__cause__ or type(error.__cause__).__name__})"
                    )
                raise
        return TransientFailure(f"no answer within {self.config.answer_s:g} s")

    async def _post(self, body: bytes) -> JudgeReply:
        received = bytearray()
        # Leaving the scope without an error closes the generators inside the response properly.
        with trio.CancelScope() as enough:
            async with self.client.stream("POST", "chat/completions", content=body) as response:
                async for part in response.aiter_raw():  # A small part could decode to a huge one.
                    received += part
                    if len(received) > ANSWER_BYTES:
                        enough.cancel()
        if enough.cancel_called:
            raise EvaluatorError(f"judge {self.name} answered with more than {ANSWER_BYTES >> 20} MiB")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise EvaluatorError(
                f"judge {self.name} sent a compressed answer, which the node requests not to get: turn"
                " compression off at its endpoint"
            )
        return JudgeReply(
            status=response.status_code,
            headers={name.lower(): value for name, value in response.headers.items()},
            body=bytes(received),
        )


def _pause(passes: TransientFailure, attempt: int) -> float:
    return PAUSES.delay(attempt - 1, at_least_s=passes.after_s, draw=random.random())


@define(eq=False)
class NodeJudges:
    """The node's judges. Called with a name it returns that judge; raises EvaluatorError for a name that is
    not in the node's config.
    """

    by_name: Mapping[str, HttpJudge]

    def __call__(self, name: str) -> Judge:
        found = self.by_name.get(name)
        if found is None:
            raise EvaluatorError(unknown_judge(name, self.names))
        return found

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.by_name)

    def statistics(self) -> dict[str, JudgeStatistics]:
        """Each judge's counts."""
        return {name: judge.statistics() for name, judge in self.by_name.items()}


@asynccontextmanager
async def open_judges(
    configs: Mapping[str, JudgeConfig], environment: Mapping[str, str]
) -> AsyncIterator[NodeJudges]:
    """Open the judges of these configs with keys from `environment`. Raises ConfigError when a key is
    missing.
    """
    secrets = {name: _secret(name, config, environment) for name, config in configs.items()}
    async with AsyncExitStack() as stack:
        found: dict[str, HttpJudge] = {}
        for name, config in configs.items():
            client = await stack.enter_async_context(_open_client(config, secrets[name]))
            found[name] = HttpJudge(name=name, config=config, client=client, secret=secrets[name])
        yield NodeJudges(found)


def _secret(name: str, config: JudgeConfig, environment: Mapping[str, str]) -> str | None:
    if config.key_env is None:
        return None
    found = environment.get(config.key_env, "").strip()
    if not found:
        raise ConfigError(
            f"judges.{name}.key_env names {config.key_env}, which is not in the node's environment: set it,"
            " or leave key_env out"
        )
    if not found.isascii() or not found.isprintable():
        raise ConfigError(
            f"the key in {config.key_env} (judges.{name}.key_env) has characters that no HTTP header takes"
        )
    return found


@asynccontextmanager
async def _open_client(config: JudgeConfig, secret: str | None) -> AsyncIterator[httpx2.AsyncClient]:
    base = httpx2.URL(config.base_url.rstrip("/") + "/")
    # A small compressed response could expand to a huge one.
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if secret is not None:
        headers["authorization"] = f"Bearer {secret}"
    limits = httpx2.Limits(max_connections=config.at_once, max_keepalive_connections=config.at_once)
    # Ignore the environment's proxies.
    client = httpx2.AsyncClient(
        base_url=base, headers=headers, timeout=None, limits=limits, trust_env=not is_loopback(base.host)
    )
    try:
        yield client
    finally:
        with (
            trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S),
            suppress(httpx2.HTTPError, OSError, trio.BusyResourceError),
        ):
            await client.aclose()
