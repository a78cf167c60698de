"""SGLang's own HTTP API as an engine: token ids in, sampled ids with logprobs out, streamed.

This was tried with SGLang 0.5.23. Everything in a chunk is checked against the rest of it: where its tokens
begin in the sample, one logprob for each token, the ids beside the logprobs. Servers differ in whether a
chunk has only the new tokens (`--incremental-streaming-output`) or the whole sample so far. Both are read, by
`completion_tokens`.

The weights of each token are in the last chunk (`weight_versions`), counted by SGLang's scheduler. A release
without them labels whole chunks, after the fact. There the chunk in which the label changes is of unknown
weights, and so is what a disk update left under the old label.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

import httpx2
import orjson
import trio
from attrs import define, evolve, field

from polarnode.core.codec.limits import is_loopback
from polarnode.core.trajectory import UNKNOWN_VERSION
from polarnode.core.weights import PauseMode
from polarnode.engine.drafts import inexact
from polarnode.engine.embedded.control import (
    CONSTRAINTS,
    DraftTotals,
    piece,
    request,
    routed,
    score_arguments,
    scored,
)
from polarnode.engine.external import KEY_VARIABLE, Send, ServerUnreachable, UnfitServer, Versions, Wanted
from polarnode.engine.protocol import (
    Failed,
    Generate,
    Load,
    Piece,
    Ready,
    RoutedRows,
    RowLogprobs,
    ScoreTokens,
    ToNode,
)

UNNAMED_LABELS = frozenset({"default", ""})  # SGLang's labels until somebody names its weights
ANSWER_S = (
    30.0  # seconds for a small request: its loop is behind by seconds when a thousand streams end at once
)
PROBE_TIMEOUT_S = 60.0  # seconds for a request of one token; a cold GPU compiles for it
SCORE_TIMEOUT_S = 600.0  # seconds for a row; one of 128k tokens that waits behind agents takes minutes
PAUSE_S = 600.0  # seconds for a pause; one by `abort` waits until every request has ended
CONNECT_S = 10.0
ANSWER_BYTES = (
    64 << 20
)  # of one chunk: routed experts of 128k tokens on 48 layers of 8 are 200 MB, of 40k 64 MB
REASON_CHARS = 300  # characters of a server's own sentence within one of ours
REFUSALS = frozenset((400, 413, 422))  # statuses by which a server finds fault with what it was asked
COMMON_ID_LIMIT = 1000  # ids below it are in every vocabulary that a model is served with
MIN_CONTEXT_TOKENS = 16  # tokens; a server with less than this is one of something else

# ── chunks ────────────────────────────────────────────────────────────────────


@define(eq=False)
class AnswerReader:
    """Reads the chunks of one request. `take` returns the messages for the node. `failed` is set once one of
    them is a failure.
    """

    order: Generate
    versions: Versions
    wanted: Wanted
    sent: int = field(default=0, init=False)
    over: bool = field(default=False, init=False)
    failed: bool = field(default=False, init=False)
    # Labels of chunks that were not the server's own label when they came.
    labels: set[str] = field(factory=set, init=False)
    _drafts: DraftTotals = field(factory=DraftTotals, init=False)
    _label: str | None = field(init=False)

    @_label.default
    def _make_label(self) -> str | None:
        return self.versions.label

    def take(self, event: Mapping[str, Any]) -> Sequence[ToNode]:
        """The messages of one chunk, in order."""
        if (error := event.get("error")) is not None:
            return [self.fail(*_reason(error))]
        try:
            return self._messages(event, event["meta_info"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return [self.fail(f"a chunk of another shape ({type(error).__name__}: {error})", True)]

    def _messages(self, event: Mapping[str, Any], meta: Mapping[str, Any]) -> Sequence[ToNode]:
        entries, finish = meta.get("output_token_logprobs") or [], meta.get("finish_reason")
        total = int(meta["completion_tokens"])
        if not entries and finish is not None and finish["type"] == "abort":
            # The request was refused or ended before it was sampled from: SGLang counts a token that it does
            # not send.
            total, meta = self.sent, {**meta, "weight_versions": None}
        known = self.sent - (total - len(entries))  # so many of the entries were sent already
        if not 0 <= known <= len(entries):
            numbers = f"{len(entries)} tokens up to {total}, where {self.sent} were sent"
            return [self.fail(f"the server skipped tokens: {numbers}", True)]
        new = entries[known:]
        ids = [int(entry[1]) for entry in new]
        beside = event.get("output_ids")
        if ids and beside is not None and beside[-len(ids) :] != ids:
            return [self.fail("the server's logprobs are of other tokens than its ids", True)]
        found = piece(
            self.order.rid,
            ids,
            {**meta, "output_token_logprobs": _numbers(new), "output_top_logprobs": self._top(meta, known)},
            top_logprobs=self.order.top_logprobs,
            constrained=not CONSTRAINTS.isdisjoint(self.order.sampling),
        )
        if isinstance(found, Failed):
            return [self.fail(found.message, found.retryable, found.refused)]
        self.sent, self.over = total, found.finish is not None
        found = self._named(self._drafts.grown(found, meta), str(meta.get("weight_version", "")))
        return [*self._experts(found, meta), found] if self.over else [found]

    def _named(self, found: Piece, label: str) -> Piece:
        """The piece with the versions that the labels name."""
        seam = self._label is not None and label != self._label
        self._label = label
        version = UNKNOWN_VERSION if seam else self.versions.named(label)
        spans = tuple((self.versions.named(each), start, end) for each, start, end in found.spans)
        return evolve(found, version=version, spans=_merged(spans))

    def unnamed(self, last: Piece) -> Piece:
        """The last piece, if other weights came under the same label during the request."""
        return evolve(
            last, version=UNKNOWN_VERSION, spans=((UNKNOWN_VERSION, 0, self.sent),) if self.sent else ()
        )

    def _top(self, meta: Mapping[str, Any], known: int) -> list[list[tuple[float, int]]]:
        """The alternatives of the new tokens. Minus infinity has no spelling in JSON."""
        if not self.order.top_logprobs:
            return []
        rows = (meta.get("output_top_logprobs") or [])[known:]
        return [
            [(-math.inf if entry[0] is None else entry[0], entry[1]) for entry in row or ()] for row in rows
        ]

    def _experts(self, last: Piece, meta: Mapping[str, Any]) -> Sequence[RoutedRows]:
        if self.order.routed_from is None or self.wanted.experts is None or last.finish == "abort":
            return ()
        rows = routed(self.order, self.wanted.experts, len(self.order.prompt) // 4 + self.sent, meta)
        if isinstance(rows, Failed):
            raise ValueError(rows.message)
        return rows

    def fail(self, message: str, retryable: bool, refused: bool = False) -> Failed:
        self.over = self.failed = True
        sentence = f"{self.wanted.url}: {message}"
        return Failed(rid=self.order.rid, message=sentence, retryable=retryable, refused=refused)


def _numbers(entries: Sequence[Sequence[Any]]) -> list[tuple[float]]:
    """The logprobs. NaN has no spelling in JSON: there it is null, and it makes the request a failure."""
    return [(math.nan if entry[0] is None else float(entry[0]),) for entry in entries]


def _merged(spans: Sequence[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    """The spans, with those of one version next to each other joined: two labels may both be unknown."""
    found: list[tuple[str, int, int]] = []
    for version, start, end in spans:
        if found and found[-1][0] == version and found[-1][2] == start:
            found[-1] = (version, found[-1][1], end)
        else:
            found.append((version, start, end))
    return tuple(found)


def _label(event: Mapping[str, Any]) -> str | None:
    """The label of the weights in a chunk."""
    meta = event.get("meta_info")
    return str(meta.get("weight_version", "")) if isinstance(meta, dict) else None


def _reason(error: object) -> tuple[str, bool, bool]:
    """The sentence of an error in a stream, whether another attempt may succeed, and whether the request is
    at fault.
    """
    if isinstance(error, dict):
        code = error.get("code")
        server = isinstance(code, int) and code >= 500
        return str(error.get("message"))[:REASON_CHARS], server, code in REFUSALS
    return str(error)[:REASON_CHARS], False, False


def generate_body(order: Generate, *, deterministic: bool) -> bytes:
    """The body of /generate. Only what is asked for is named, because an older server does not know the
    rest.
    """
    body = request(order)
    body["sampling_params"] = {
        name: value
        for name, value in order.sampling.items()
        # Without deterministic inference a seed means nothing, and older servers refuse it.
        if name != "sampling_seed" or deterministic
    }
    for name in ("custom_logit_processor", "require_reasoning", "return_routed_experts"):
        if not body[name]:
            del body[name]
    if order.routed_from is None:
        del body["routed_experts_start_len"]
    return orjson.dumps(body)


@define(eq=False)
class EventReader:
    """The events of a stream, however it is cut: `data: JSON` with an empty line between them. `[DONE]` is no
    event.
    """

    _buffer: bytearray = field(factory=bytearray, init=False)

    def feed(self, part: bytes) -> list[Mapping[str, Any]]:
        start = max(0, len(self._buffer) - 1)  # an end may be cut in two, and what is before was searched
        self._buffer += part
        found = []
        while (end := self._buffer.find(b"\n\n", start)) >= 0:
            line = bytes(self._buffer[:end]).removeprefix(b"data:").strip()
            del self._buffer[: end + 2]
            start = 0
            if line and line != b"[DONE]":
                found.append(orjson.loads(line))
        if len(self._buffer) > ANSWER_BYTES:
            raise ServerUnreachable(f"the server sent a chunk of more than {ANSWER_BYTES >> 20} MiB")
        return found


# ── requests ──────────────────────────────────────────────────────────────────


class AnswerTimeout(ServerUnreachable):
    """The server did not answer in time."""


class MissingRoute(UnfitServer):
    """The server has no such route."""


def refusal(status: int, content: bytes) -> tuple[str, bool]:
    """The sentence of an HTTP error, and whether another attempt may succeed."""
    text = " ".join(content[: 4 * REASON_CHARS].decode("utf-8", "replace").split())
    return f"HTTP {status}: {text[:REASON_CHARS]}", status >= 500 or status in (408, 429)


EventHandler = Callable[[Mapping[str, Any]], Awaitable[None]]  # what handles one event of an answer's stream


@define(eq=False)
class HttpApi:
    """Requests to a server of the kind that `kind` names."""

    kind: ClassVar[str]
    wanted: Wanted
    client: httpx2.AsyncClient

    @property
    def _url(self) -> str:
        return self.wanted.url

    async def sent(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, within: float = ANSWER_S
    ) -> Any:
        """Send a request and return the JSON of its answer. None if the answer has no body."""
        content = None if body is None else orjson.dumps(body)
        with self.errors():
            try:
                with trio.fail_after(within):
                    response = await self.client.request(method, path, content=content)
            except trio.TooSlowError:
                raise AnswerTimeout(f"{self._url} did not answer /{path} within {within:.0f} s") from None
        status = response.status_code
        if status == 200:
            try:
                return orjson.loads(response.content) if response.content else None
            except orjson.JSONDecodeError:
                raise UnfitServer(
                    f"{self._url} answers /{path} with no JSON: it is no {self.kind} server"
                ) from None
        if status in (401, 403):
            raise UnfitServer(f"{self._url} wants an API key: set {KEY_VARIABLE} in the node's environment")
        if status == 404:
            raise MissingRoute(
                f"{self._url} has no /{path}: it is no {self.kind} server; of a router name the servers"
            )
        sentence, retryable = refusal(status, response.content)
        raise (ServerUnreachable if retryable else UnfitServer)(
            f"{self._url} answers /{path} with {sentence}"
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise ServerUnreachable for a broken connection."""
        try:
            yield
        except httpx2.HTTPError as error:
            raise ServerUnreachable(f"{self._url}: {str(error) or type(error).__name__}") from error

    async def stream_answer(
        self, path: str, content: bytes, answer: AnswerReader, send: Send, take: EventHandler
    ) -> None:
        """Sample: give each event of the response to `take`, until the answer is over. Raises
        ServerUnreachable if the stream ends before that.
        """
        with self.errors(), trio.CancelScope() as enough:
            async with self.client.stream("POST", path, content=content) as response:
                if response.status_code == 200:
                    await _read(response, answer, take, enough)
                else:
                    status = response.status_code
                    sentence, retryable = refusal(status, await response.aread())
                    send(answer.fail(sentence, retryable, refused=status in REFUSALS))
        if not answer.over:
            raise ServerUnreachable(f"{self._url} ended the stream of an answer early")


async def _read(
    response: httpx2.Response, answer: AnswerReader, take: EventHandler, enough: trio.CancelScope
) -> None:
    reader = EventReader()
    async for part in response.aiter_raw():
        for event in reader.feed(part):
            await take(event)
            if answer.over:
                # Leaving without an error closes the generators inside the response properly.
                enough.cancel()
                break


# ── server ────────────────────────────────────────────────────────────────────


@define(eq=False)
class SglangServer(HttpApi):
    """`Server` over SGLang's HTTP API."""

    kind = "SGLang"
    versions: Versions = field(factory=lambda: Versions(nameless=UNNAMED_LABELS))
    _load: Load = field(factory=lambda: _idle(0), init=False)
    _facts: Mapping[str, Any] = field(factory=dict, init=False)
    _loads: bool = field(default=True, init=False)  # the server has /v1/loads
    _paused: PauseMode | None = field(default=None, init=False)
    _look_lock: trio.Lock = field(factory=trio.Lock, init=False)

    # ── what it is ────────────────────────────────────────────────────────────

    async def model(self) -> str:
        facts = await self._get_facts("model_info", "get_model_info")
        return str(facts.get("tokenizer_path") or facts.get("model_path"))

    async def probe(self) -> Ready:
        model = await self._get_facts("model_info", "get_model_info")
        self._facts = facts = {**await self._get_facts("server_info", "get_server_info"), **model}
        self._check(facts)
        await self._check_tokens()
        self._note(model)
        self._load = _idle(_whole(facts, "max_running_requests"))
        tokens, most = _whole(facts, "max_total_num_tokens"), _whole(facts, "max_req_input_len")
        capacity = min(
            filter(None, (most, _whole(facts, "context_length"), self.wanted.context_length)), default=0
        )
        if capacity < MIN_CONTEXT_TOKENS:
            raise UnfitServer(
                f"{self._url} does not say how long a request may be: start the node with --context-length"
            )
        return Ready(
            vocab_size=self.wanted.vocab_size,
            context_length=capacity,
            capacity=capacity,
            max_total_tokens=tokens,
            weight_version=self._version,
            sglang_version=str(facts.get("version", "")),
            experts=self.wanted.experts,
            drafts=str(facts.get("speculative_algorithm") or ""),
        )

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Raise Unfit for a server whose settings show that it cannot serve the node."""
        rules = (
            (facts.get("is_generation", True), "serves no generating model: name a server that does"),
            (
                facts.get("disaggregation_mode", "null") in ("null", None),
                "does prefill or decode alone: name a server that does both",
            ),
            (
                self.wanted.experts is None or facts.get("enable_return_routed_experts"),
                (
                    "reports no routed experts: start it with --enable-return-routed-experts, or the node"
                    " without --routed-experts"
                ),
            ),
        )
        for holds, sentence in rules:
            if not holds:
                raise UnfitServer(f"{self._url} {sentence}")
        if facts.get("speculative_algorithm") and (reason := inexact(facts)):
            raise UnfitServer(f"{self._url} was started with {reason}")

    async def _check_tokens(self) -> None:
        """Sample behind words of the node's tokenizer, and compare what the server makes of them. The common
        words come first, because an id beyond its vocabulary ends an SGLang server.
        """
        words = self.wanted.words
        if await self._compare([word for word in words if word[0] < COMMON_ID_LIMIT] or [(0, "")]) and words:
            await self._compare(words)

    async def _compare(self, words: Sequence[tuple[int, str]]) -> bool:
        """Sample one token. Returns whether the server has the texts of ids, which are then the same. A
        server without a tokenizer has none.
        """
        ids = [token for token, _ in words]
        body = {
            "input_ids": ids,
            "rid": uuid4().hex,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_text_in_logprobs": True,
        }
        try:
            answer = await self.sent("POST", "generate", body, within=PROBE_TIMEOUT_S)
        except AnswerTimeout:
            raise ServerUnreachable(
                f"{self._url} did not sample a token within {PROBE_TIMEOUT_S:.0f} s: is its generation"
                " paused?"
            ) from None
        try:
            meta = answer["meta_info"]
            ((logprob, sampled, *_),) = meta["output_token_logprobs"]
            exact = [entry[1] for entry in meta["input_token_logprobs"]] == ids
            exact = exact and isinstance(logprob, float) and isinstance(sampled, int)
            texts = [entry[2] for entry in meta["input_token_logprobs"]]
        except (KeyError, TypeError, IndexError, ValueError):
            exact, texts = False, []
        if not exact:
            raise UnfitServer(
                f"{self._url} gives no exact ids and logprobs of what it samples: it cannot be recorded"
            )
        for (token, text), theirs in zip(words, texts, strict=True):
            # Some decoders leave out the space before a lone word.
            if theirs is not None and text and theirs.strip() != text.strip():
                raise UnfitServer(
                    f"{self._url} has another vocabulary than --model: token {token} is {theirs!r} there and"
                    f" {text!r} here; name the folder of the model that it serves"
                )
        return None not in texts

    # ── looks ─────────────────────────────────────────────────────────────────

    async def look(self) -> Load:
        await self._look_at_weights()
        if self._loads:
            await self._look_at_load()
        self._load = evolve(self._load, weight_version=self._version)
        return self._load

    async def _look_at_weights(self) -> None:
        async with self._look_lock:  # one after another, because an older answer must not replace a newer one
            self._note(await self._get_facts("model_info", "get_model_info"))

    async def _look_at_load(self) -> None:
        try:
            ranks = (await self.sent("GET", "v1/loads", None))["loads"]
        except (UnfitServer, KeyError, TypeError):  # an older release, so the node counts its own requests
            self._loads = False
            return
        self._load = evolve(
            self._load,
            running=sum(_whole(rank, "num_running_reqs") for rank in ranks),
            waiting=sum(_whole(rank, "num_waiting_reqs") for rank in ranks),
            token_usage=max((float(rank.get("token_usage") or 0.0) for rank in ranks), default=0.0),
            max_running=sum(_whole(rank, "max_running_requests") for rank in ranks),
        )

    def _note(self, model: Mapping[str, Any]) -> None:
        self.versions.note(str(model.get("weight_version", "")), str(model.get("model_path")))

    @property
    def _version(self) -> str:
        return self.versions.named(self.versions.label or "")

    # ── generation ────────────────────────────────────────────────────────────

    async def generate(self, order: Generate, send: Send) -> None:
        if order.constraint_after is not None and not self._facts.get("reasoning_parser"):
            sentence = (
                f"{self._url}: the constraint begins after a thought, which this server does not see: start"
                " it with --reasoning-parser, or ask without thinking"
            )
            send(Failed(rid=order.rid, message=sentence, retryable=False, refused=True))
            return
        answer = AnswerReader(order, self.versions, self.wanted)
        body = generate_body(order, deterministic=bool(self._facts.get("enable_deterministic_inference")))
        await self.stream_answer("generate", body, answer, send, partial(self._take, answer, send))
        if answer.failed:
            await self.abort(order.rid)

    async def _take(self, answer: AnswerReader, send: Send, event: Mapping[str, Any]) -> None:
        label = _label(event)
        if label is not None and label != self.versions.label and label not in answer.labels:
            # Chunks of the weights before may still be on their way, so this looks once.
            answer.labels.add(label)
            send(await self.look())
        messages = list(answer.take(event))
        last = messages[-1]
        if isinstance(last, Piece) and last.finish is not None and label not in (None, *UNNAMED_LABELS):
            await self._look_at_weights()
            if self.versions.named(label or "") == UNKNOWN_VERSION:
                messages[-1] = answer.unnamed(last)
        for message in messages:
            send(message)

    async def score(self, order: ScoreTokens) -> RowLogprobs | Failed:
        began = self._version
        try:
            answer = await self.sent(
                "POST", "generate", {**score_arguments(order), "stream": False}, within=SCORE_TIMEOUT_S
            )
            meta = answer["meta_info"]
            label = str(meta.get("weight_version", ""))
            if label != self.versions.label:
                await self._look_at_weights()
            version = self.versions.named(label)
            # If other weights may have read a part of the row, no version is named.
            return scored(order, meta, version if version == began else UNKNOWN_VERSION)
        except UnfitServer as error:
            return Failed(rid=order.rid, message=str(error), retryable=False)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            message = f"{self._url}: an answer of another shape ({type(error).__name__}: {error})"
            return Failed(rid=order.rid, message=message, retryable=False)

    async def abort(self, rid: str) -> None:
        # A server with an admin key refuses this, and ends the request because nobody reads it any more.
        with suppress(UnfitServer):
            await self.sent("POST", "abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
        if mode == "abort" and self._paused in ("in_place", "retract"):
            await self.resume()  # frozen requests do not notice that they are aborted
        self._paused = mode
        await self.sent("POST", "pause_generation", {"mode": mode}, within=PAUSE_S)

    async def resume(self) -> None:
        await self.sent("POST", "continue_generation", {})
        self._paused = None

    async def _get_facts(self, path: str, before: str) -> Mapping[str, Any]:
        """A GET under its name, or under the name that older releases have for it."""
        try:
            found: Mapping[str, Any] = await self.sent("GET", path, None)
        except MissingRoute:
            found = await self.sent("GET", before, None)
        return found


def _whole(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _idle(most: int) -> Load:
    return Load(running=0, waiting=0, token_usage=0.0, weight_version=UNKNOWN_VERSION, max_running=most)


@asynccontextmanager
async def open_client(wanted: Wanted, key: str | None) -> AsyncIterator[httpx2.AsyncClient]:
    """Connections to the server at an address. Nothing is sent yet."""
    base = httpx2.URL(wanted.url.rstrip("/") + "/")
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    async with httpx2.AsyncClient(
        base_url=base,
        headers=headers,
        timeout=httpx2.Timeout(None, connect=CONNECT_S),
        # The node's queue decides how many requests there are at once.
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=not is_loopback(base.host),
    ) as client:
        yield client
