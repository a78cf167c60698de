"""vLLM's HTTP API as an engine: token ids in, sampled ids with logprobs out, streamed.

This is written for vLLM 0.33.0 (its sdist). `/inference/v1/generate` of `vllm serve --enable-scale-out` gives
the sampled ids, a logprob for each and, at the end, the weights of each token, as vLLM's engine counted them
(vllm/entrypoints/scale_out/token_in_token_out). The probe also finds out whether logprobs are those of the
distribution that was sampled (`--logprobs-mode processed_logprobs`): vLLM's default are those before
temperature. The RLHF routes (`/pause`, `/weight_info`) exist only with VLLM_SERVER_DEV_MODE=1.

A chunk is brought into SGLang's shape, and is then read and checked as SGLang's are.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import orjson
from attrs import define, evolve, field

from polarnode.core.trajectory import UNKNOWN_VERSION
from polarnode.core.weights import PauseMode
from polarnode.engine.external import Send, Server, ServerUnreachable, UnfitServer, Versions
from polarnode.engine.external_sglang import (
    MIN_CONTEXT_TOKENS,
    PAUSE_S,
    PROBE_TIMEOUT_S,
    SCORE_TIMEOUT_S,
    UNNAMED_LABELS,
    AnswerReader,
    HttpApi,
    MissingRoute,
    SglangServer,
)
from polarnode.engine.protocol import Failed, Generate, Load, Piece, Ready, RowLogprobs, ScoreTokens

GENERATE = "inference/v1/generate"
ABORT_PATH = "inference/v1/abort_requests"
NO_LOGPROB = -9999.0  # vLLM's spelling of minus infinity, of NaN and of a missing logprob
NO_RLHF_ROUTES = "has no /pause and /resume: start vLLM with VLLM_SERVER_DEV_MODE=1"
PROBE_CANDIDATES = (
    5  # candidates compared by the probe; the distance of the first and the last shows the temperature
)
CONSTRAINTS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
# The sampling parameters that have the same name in SGLang, whose names the node's orders have, and in vLLM.
SHARED_PARAMETERS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)

# ── bodies and chunks ─────────────────────────────────────────────────────────


def generate_body(order: Generate) -> dict[str, Any]:
    """The body of GENERATE. Raises ValueError with a sentence for what vLLM cannot do."""
    if order.processor is not None:
        raise ValueError("vLLM takes no logit processor with a request: use the node's own engine or SGLang")
    if order.constraint_after is not None:
        raise ValueError("vLLM serves no constraint that begins after a thought: ask without thinking")
    given = order.sampling
    sampling: dict[str, Any] = {name: given[name] for name in SHARED_PARAMETERS if name in given}
    sampling |= {
        "max_tokens": given["max_new_tokens"],
        "top_k": max(0, int(str(given.get("top_k", -1)))),  # 0 means the whole vocabulary
        "logprobs": order.top_logprobs,
        "detokenize": False,
    }
    if given.get("sampling_seed") is not None:
        sampling["seed"] = given["sampling_seed"]
    structured = {theirs: given[ours] for ours, theirs in CONSTRAINTS.items() if ours in given}
    if structured:
        sampling["structured_outputs"] = structured
    ids = array("i", order.prompt).tolist()
    return {"request_id": order.rid, "token_ids": ids, "sampling_params": sampling, "stream": True}


def sglang_event(chunk: Mapping[str, Any], *, before: int, top_logprobs: int) -> Mapping[str, Any] | None:
    """A chunk as SGLang would send it. None for a chunk without a choice. `before` is the number of tokens of
    earlier chunks.
    """
    if "error" in chunk:
        return chunk
    if not chunk["choices"]:
        return None
    choice = chunk["choices"][0]
    ids: list[int] = choice["token_ids"] or []
    content: Sequence[Mapping[str, Any]] = (choice["logprobs"] or {}).get("content") or []
    meta: dict[str, Any] = {
        "completion_tokens": before + len(ids),
        "output_token_logprobs": [[_entry_logprob(each), each["token_id"]] for each in content],
        "output_top_logprobs": [_best_candidates(each["top_logprobs"], top_logprobs) for each in content],
        "weight_version": "",  # vLLM does not say it of a single chunk
    }
    if choice["finish_reason"] is not None:
        matched = choice.get("stop_reason")
        meta["finish_reason"] = {
            "type": choice["finish_reason"],
            "matched": matched if isinstance(matched, int) else 0,
        }
        meta["weight_versions"] = choice.get("weight_versions") or ()
    return {"meta_info": meta, "output_ids": ids}


def _entry_logprob(entry: Mapping[str, Any]) -> float | None:
    value = float(entry["logprob"])
    return None if value <= NO_LOGPROB else value


def _best_candidates(candidates: Sequence[Mapping[str, Any]], most: int) -> list[list[Any]]:
    """The likeliest candidates. vLLM's list begins with the sampled token, whatever its rank."""
    ranked = sorted(
        (each for each in candidates if each["rank"] is not None and each["rank"] <= most),
        key=lambda each: int(each["rank"]),
    )
    return [[_entry_logprob(each), each["token_id"]] for each in ranked[:most]]


# ── server ────────────────────────────────────────────────────────────────────


@define(eq=False)
class VllmServer(HttpApi):
    """`Server` over vLLM's HTTP API."""

    kind = "vLLM"
    versions: Versions = field(factory=lambda: Versions(nameless=UNNAMED_LABELS))
    _load: Load = field(
        factory=lambda: Load(running=0, waiting=0, token_usage=0.0, weight_version=UNKNOWN_VERSION),
        init=False,
    )
    _known: set[str] = field(factory=set, init=False)  # versions that were sent to the node
    _names: bool = field(default=True, init=False)  # the server has /weight_info

    # ── what it is ────────────────────────────────────────────────────────────

    async def model(self) -> str:
        card = await self._model_card()
        return str(card.get("root") or card["id"])

    async def _model_card(self) -> Mapping[str, Any]:
        cards = (await self.sent("GET", "v1/models", None))["data"]
        card: Mapping[str, Any] = next((each for each in cards if each.get("parent") is None), cards[0])
        return card

    async def probe(self) -> Ready:
        if self.wanted.experts is not None:
            raise UnfitServer(f"{self._url} is vLLM, whose routed experts a node does not read: use SGLang")
        version = str((await self.sent("GET", "version", None)).get("version", ""))
        card = await self._model_card()
        await self._check_words()
        await self._check_logprobs()
        most = card.get("max_model_len") or 0
        capacity = min(filter(None, (int(most), self.wanted.context_length)), default=0)
        if capacity < MIN_CONTEXT_TOKENS:
            raise UnfitServer(
                f"{self._url} does not say how long a request may be: give the node --context-length"
            )
        await self.look()
        return Ready(
            vocab_size=self.wanted.vocab_size,
            context_length=capacity,
            capacity=capacity,
            max_total_tokens=0,
            weight_version=self._load.weight_version,
            sglang_version=f"vLLM {version}",
            experts=None,
        )

    async def _check_words(self) -> None:
        """Compare words of the vocabulary, if the server has a tokenizer."""
        for token, text in self.wanted.words:
            try:
                found = await self.sent("POST", "detokenize", {"tokens": [token]})
            # A server with --tokens-only has no tokenizer, and --model is trusted.
            except (UnfitServer, ServerUnreachable):
                return
            theirs = str(found["prompt"])
            if theirs.strip() != text.strip():
                raise UnfitServer(
                    f"{self._url} has another vocabulary than --model: token {token} is {theirs!r} there and"
                    f" {text!r} here; name the folder of the model that it serves"
                )

    async def _check_logprobs(self) -> None:
        """Sample a token at two temperatures. With twice the temperature the candidates' logprobs, less the
        likeliest's, are half as large, unless they are those before temperature.
        """
        cool, warm = await self._candidate_logprobs(1.0), await self._candidate_logprobs(2.0)
        for one, half in zip(cool, warm, strict=True):
            if abs(half - one / 2) > 0.02 + 0.1 * abs(one):
                raise UnfitServer(
                    f"{self._url} gives logprobs of another distribution than it samples: start vLLM with"
                    " --logprobs-mode processed_logprobs"
                )

    async def _candidate_logprobs(self, temperature: float) -> list[float]:
        """The logprobs of the likeliest tokens, less that of the first."""
        ids = [token for token, _ in self.wanted.words] or [0]
        sampling = {
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": PROBE_CANDIDATES,
            "detokenize": False,
        }
        body = {"request_id": uuid4().hex, "token_ids": ids, "sampling_params": sampling}
        try:
            answer = await self.sent("POST", GENERATE, body, within=PROBE_TIMEOUT_S)
        except MissingRoute:
            raise UnfitServer(
                f"{self._url} is vLLM without /{GENERATE}, which gives exact ids: start it with"
                " --enable-scale-out (vLLM 0.33)"
            ) from None
        try:
            choice = answer["choices"][0]
            (entry,) = choice["logprobs"]["content"]
            best = _best_candidates(entry["top_logprobs"], PROBE_CANDIDATES)
            found = [float(logprob) - float(best[0][0]) for logprob, _ in best if logprob is not None]
            exact = choice["token_ids"] == [entry["token_id"]] and _entry_logprob(entry) is not None
        except (KeyError, TypeError, ValueError, IndexError):
            exact, found = False, []
        if not exact or len(found) != PROBE_CANDIDATES or not all(map(math.isfinite, found)):
            raise UnfitServer(
                f"{self._url} gives no exact ids and logprobs of what it samples: it cannot be recorded"
            )
        return found

    # ── looks ─────────────────────────────────────────────────────────────────

    async def look(self) -> Load:
        """The version that is served. vLLM's load is not asked for, and the node counts its own requests."""
        if self._names:
            try:
                found = await self.sent("GET", "weight_info", None)
            except MissingRoute:  # without VLLM_SERVER_DEV_MODE only the answers say it
                self._names = False
                await self.sent("GET", "version", None)
            else:
                self._serve(str(found["weight_version"]))
        else:
            await self.sent("GET", "version", None)  # asks whether the server is there
        return self._load

    def _serve(self, label: str) -> Load:
        self.versions.note(label, "")
        self._load = evolve(self._load, weight_version=self.versions.named(label))
        self._known.add(self._load.weight_version)
        return self._load

    # ── generation ────────────────────────────────────────────────────────────

    async def generate(self, order: Generate, send: Send) -> None:
        try:
            body = generate_body(order)
        except ValueError as error:
            sentence = f"{self._url}: {error}"
            send(Failed(rid=order.rid, message=sentence, retryable=False, refused=True))
            return
        answer = AnswerReader(order, self.versions, self.wanted)
        take = partial(self._take, answer, send)
        await self.stream_answer(GENERATE, orjson.dumps(body), answer, send, take)
        if answer.failed:
            await self.abort(order.rid)

    async def _take(self, answer: AnswerReader, send: Send, chunk: Mapping[str, Any]) -> None:
        try:
            event = sglang_event(chunk, before=answer.sent, top_logprobs=answer.order.top_logprobs)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            send(answer.fail(f"a chunk of another shape ({type(error).__name__}: {error})", True))
            return
        if event is None:
            return
        messages = answer.take(event)
        last = messages[-1]
        if isinstance(last, Piece) and last.finish is not None:
            await self._send_versions(last, send)
        for message in messages:
            send(message)

    async def _send_versions(self, last: Piece, send: Send) -> None:
        """Send the versions of a sample that the node does not know yet, and then the one served now."""
        new = [version for version, _, _ in last.spans if version not in self._known | {UNKNOWN_VERSION}]
        for version in new:
            send(self._serve(version))
        if new and self._names:
            send(await self.look())

    async def score(self, order: ScoreTokens) -> RowLogprobs | Failed:
        """Score a row by `prompt_logprobs`, which are of the logits at temperature 1 whatever is sampled.
        vLLM then computes the whole prompt, and samples one token.
        """
        ids = array("i", order.row).tolist()
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"request_id": order.rid, "token_ids": ids, "sampling_params": sampling}
        try:
            answer = await self.sent("POST", GENERATE, body, within=SCORE_TIMEOUT_S)
            rows = answer["prompt_logprobs"][order.start :]
            values = [
                float(row[str(token)]["logprob"]) for row, token in zip(rows, ids[order.start :], strict=True)
            ]
        except UnfitServer as error:
            return Failed(rid=order.rid, message=str(error), retryable=False)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            message = f"{self._url} gives no logprobs of a prompt ({type(error).__name__}: {error})"
            return Failed(rid=order.rid, message=message, retryable=False)
        version = (await self.look()).weight_version
        return RowLogprobs(rid=order.rid, logprobs=array("f", values).tobytes(), version=version)

    async def abort(self, rid: str) -> None:
        # vLLM also ends what nobody reads any more.
        with suppress(UnfitServer):
            await self.sent("POST", ABORT_PATH, {"request_ids": [f"generate-tokens-{rid}"]})

    async def pause(self, mode: PauseMode) -> None:
        """Freeze every request (`keep`), the new ones too. With "abort" those in progress are ended first."""
        try:
            if mode == "retract":
                raise ServerUnreachable(
                    f"{self._url}: vLLM cannot retract requests: pause in_place, or by abort"
                )
            if mode == "abort":
                await self.sent("POST", "abort_requests", {}, within=PAUSE_S)
            await self.sent("POST", "pause?mode=keep", None, within=PAUSE_S)
        except MissingRoute:
            raise ServerUnreachable(f"{self._url} {NO_RLHF_ROUTES}") from None
        except UnfitServer as error:
            raise ServerUnreachable(str(error)) from None

    async def resume(self) -> None:
        try:
            await self.sent("POST", "resume", None)
        except MissingRoute:
            raise ServerUnreachable(f"{self._url} {NO_RLHF_ROUTES}") from None
        except UnfitServer as error:
            raise ServerUnreachable(str(error)) from None


# ── which kind ────────────────────────────────────────────────────────────────


@define(eq=False)
class AnyServer(HttpApi):
    """A server of either kind: vLLM has /version, and SGLang has not."""

    kind = "SGLang or vLLM"
    _found: Server | None = field(default=None, init=False)

    async def _server(self) -> Server:
        if self._found is None:
            try:
                await self.sent("GET", "version", None)
            except MissingRoute:
                self._found = SglangServer(self.wanted, self.client)
            else:
                self._found = VllmServer(self.wanted, self.client)
        return self._found

    async def model(self) -> str:
        return await (await self._server()).model()

    async def probe(self) -> Ready:
        return await (await self._server()).probe()

    async def look(self) -> Load:
        return await (await self._server()).look()

    async def generate(self, order: Generate, send: Send) -> None:
        await (await self._server()).generate(order, send)

    async def score(self, order: ScoreTokens) -> RowLogprobs | Failed:
        return await (await self._server()).score(order)

    async def abort(self, rid: str) -> None:
        await (await self._server()).abort(rid)

    async def pause(self, mode: PauseMode) -> None:
        await (await self._server()).pause(mode)

    async def resume(self) -> None:
        await (await self._server()).resume()
