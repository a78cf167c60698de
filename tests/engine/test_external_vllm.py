"""vLLM as an external engine, over a stand-in that answers in vLLM 0.33.0's shapes.

The shapes are those of its own classes: vllm/entrypoints/scale_out/token_in_token_out/{protocol,serving,
api_router}.py, vllm/entrypoints/rl/online/api_router.py and vllm/sampling_params.py of the sdist. Its package
is too large for a test environment.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import log
from typing import Any

import pytest
import trio
from attrs import define, field

from polarnode.core.arrays import floats, ids
from polarnode.engine.external import Server, ServerUnreachable, UnfitServer, Wanted, connect
from polarnode.engine.external_vllm import generate_body, sglang_event
from polarnode.engine.protocol import Failed, Generate, Load, Piece, RowLogprobs, ScoreTokens
from polarnode.http.server import Address, open_server

LOGITS = (0.0, -0.5, -1.0, -1.5, -2.0, -2.5)
NAMED = [("1", 0, 3), ("2", 3, 4)]


def order(**more: Any) -> Generate:
    sampling = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0}
    return Generate(
        rid="r", prompt=ids([1, 2]).tobytes(), sampling=sampling | more.pop("sampling", {}), **more
    )


def logprobs(token: int, temperature: float, most: int) -> dict[str, Any]:
    """An entry of `logprobs.content`: the sampled token first, then the likeliest."""
    whole = sum(2.718281828 ** (each / temperature) for each in LOGITS)
    found = [
        {"token_id": at, "logprob": each / temperature - log(whole), "rank": at + 1}
        for at, each in enumerate(LOGITS)
    ]
    top = [found[token], *(each for each in found[:most] if each is not found[token])]
    return {**found[token], "top_logprobs": top}


@define(eq=False)
class Vllm:
    """Answers as vLLM does; samples the tokens 5, 4, 3, 2."""

    processed: bool = True  # --logprobs-mode processed_logprobs
    token_in: bool = True  # --enable-scale-out
    developing: bool = True  # VLLM_SERVER_DEV_MODE=1
    error: str | None = None
    label: str = "default"
    asked: list[tuple[str, Any]] = field(factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path, query = scope["path"], scope["query_string"].decode()
        given = json.loads(body) if body else None
        self.asked.append((path + (f"?{query}" if query else ""), given))
        status, answer = self.answer(path, given)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    def answer(self, path: str, given: Any) -> tuple[int, bytes]:
        known: dict[str, Any] = {
            "/version": {"version": "0.33.0"},
            "/v1/models": {
                "data": [{"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 99}]
            },
            "/detokenize": {"prompt": " word"},
        }
        if self.token_in:
            known["/inference/v1/abort_requests"] = {}
        if self.developing:
            known |= {"/weight_info": {"weight_version": self.label}, "/pause": {"status": "paused"}}
            known |= {"/resume": {"status": "resumed"}, "/abort_requests": {"status": "aborted"}}
        if path == "/inference/v1/generate" and self.token_in:
            return 200, self.sampled(given)
        return (200, json.dumps(known[path]).encode()) if path in known else (404, b"{}")

    def sampled(self, given: Any) -> bytes:
        sampling = given["sampling_params"]
        temperature = sampling["temperature"] if self.processed else 1.0
        if "prompt_logprobs" in sampling:
            found: list[Any] = [None]
            for before, token in zip(given["token_ids"], given["token_ids"][1:], strict=False):
                found.append({str(token): {"logprob": -token / 8, "rank": 1, "decoded_token": None}})
                found[-1][str(before + 100)] = {"logprob": -0.5, "rank": 2}
            return json.dumps({"choices": [], "prompt_logprobs": found}).encode()
        if not given.get("stream"):
            entry = logprobs(1, temperature, sampling["logprobs"])
            choice = {
                "index": 0,
                "token_ids": [1],
                "logprobs": {"content": [entry]},
                "finish_reason": "length",
            }
            return json.dumps({"choices": [choice], "output_mode": "tokens"}).encode()
        text = ""
        for tokens, last in (([5, 4], False), ([3, 2], True)):
            content = [logprobs(token, temperature, sampling["logprobs"]) for token in tokens]
            spans = [{"version": name, "start": start, "end": end} for name, start, end in NAMED]
            choice = {
                "index": 0,
                "finish_reason": "length" if last else None,
                "stop_reason": None,
                "token_ids": tokens,
                "weight_versions": spans if last else None,
                "logprobs": {"content": content},
            }
            text += f"data: {json.dumps({'request_id': 'generate-tokens-r', 'choices': [choice]})}\n\n"
        if self.error is not None:
            text = f"data: {json.dumps({'error': {'message': self.error, 'code': 500}})}\n\n"
        return (text + "data: [DONE]\n\n").encode()


@asynccontextmanager
async def opened(vllm: Vllm, **wanted: Any) -> AsyncIterator[Server]:
    with trio.fail_after(30):
        async with open_server(vllm, Address(host="127.0.0.1", port=0)) as address:
            url = f"http://127.0.0.1:{address.port}"
            async with connect(Wanted(url=url, vocab_size=6, words=((3, "word"),), **wanted), None) as server:
                yield server


async def test_vllm_server_samples_with_weights() -> None:
    vllm = Vllm()
    async with opened(vllm) as server:
        assert await server.model() == "/models/tiny"
        ready = await server.probe()
        assert (ready.capacity, ready.weight_version, ready.sglang_version) == (99, "", "vLLM 0.33.0")
        vllm.label = "2"
        sent: list[Any] = []
        await server.generate(order(top_logprobs=2), sent.append)
    first, *loads, last = sent
    assert [load.weight_version for load in loads if isinstance(load, Load)] == ["1", "2", "2"]
    assert isinstance(first, Piece)
    assert isinstance(last, Piece)
    assert (first.version, first.finish, last.finish, last.spans) == ("", None, "length", tuple(NAMED))
    assert [*ids(first.ids), *ids(last.ids)] == [5, 4, 3, 2]
    wanted = [logprobs(token, 0.7, 0)["logprob"] for token in (5, 4, 3, 2)]
    assert [*floats(first.logprobs), *floats(last.logprobs)] == pytest.approx(wanted)
    assert list(ids(last.alternative_ids)) == [0, 1] * 2  # the likeliest, not the sampled


@pytest.mark.parametrize(
    ("vllm", "sentence"),
    [
        (Vllm(processed=False), "--logprobs-mode processed_logprobs"),
        (Vllm(token_in=False), "--enable-scale-out"),
    ],
)
async def test_unrecordable_server_is_refused_with_flag(vllm: Vllm, sentence: str) -> None:
    async with opened(vllm) as server:
        with pytest.raises(UnfitServer, match=sentence):
            await server.probe()


async def test_another_vocabulary_is_refused() -> None:
    async with open_server(Vllm(), Address(host="127.0.0.1", port=0)) as address:
        wanted = Wanted(url=f"http://127.0.0.1:{address.port}", vocab_size=6, words=((3, "other"),))
        async with connect(wanted, None) as server:
            with pytest.raises(UnfitServer, match="another vocabulary"):
                await server.probe()


async def test_answers_name_weights_without_development() -> None:
    """Without its development routes only the answers name the weights."""
    async with opened(Vllm(developing=False)) as server:
        assert (await server.look()).weight_version == ""
        sent: list[Any] = []
        await server.generate(order(), sent.append)
        assert [each.weight_version for each in sent if isinstance(each, Load)] == ["1", "2"]
        assert (await server.look()).weight_version == "2"
        with pytest.raises(ServerUnreachable, match="VLLM_SERVER_DEV_MODE=1"):
            await server.pause("in_place")


async def test_pause_makes_calls_wait() -> None:
    vllm = Vllm()
    async with opened(vllm) as server:
        await server.pause("abort")
        await server.resume()
        with pytest.raises(ServerUnreachable, match="cannot retract"):
            await server.pause("retract")
        await server.abort("r")
    paths = [path for path, _ in vllm.asked]
    assert paths[1:4] == ["/abort_requests", "/pause?mode=keep", "/resume"]
    assert vllm.asked[-1] == ("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-r"]})


async def test_stream_error_fails_the_call() -> None:
    async with opened(Vllm(error="out of memory")) as server:
        sent: list[Any] = []
        await server.generate(order(), sent.append)
        (failed,) = sent
        assert isinstance(failed, Failed)
        assert (failed.retryable, "out of memory" in failed.message) == (True, True)
        for impossible in (order(constraint_after=7), order(processor="x")):
            sent.clear()
            await server.generate(impossible, sent.append)
            assert sent[0].retryable is False


def test_request_uses_vllm_field_names() -> None:
    schema = {"json_schema": '{"type": "object"}', "sampling_seed": 5}
    body = generate_body(order(sampling=schema, top_logprobs=3))
    assert (body["token_ids"], body["request_id"], body["stream"]) == ([1, 2], "r", True)
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 4,
        "logprobs": 3,
        "detokenize": False,
        "seed": 5,
        "structured_outputs": {"json": '{"type": "object"}'},
    }


def test_missing_logprob_becomes_none() -> None:
    """vLLM writes -9999 for it, for NaN and for minus infinity: the call then fails."""
    entry = {"token_id": 7, "logprob": -9999.0, "rank": None, "top_logprobs": []}
    choice = {"token_ids": [7], "logprobs": {"content": [entry]}, "finish_reason": None}
    event: Any = sglang_event({"choices": [choice]}, before=3, top_logprobs=0)
    assert event["meta_info"]["output_token_logprobs"] == [[None, 7]]
    assert event["meta_info"]["completion_tokens"] == 4
    assert sglang_event({"choices": [], "usage": {}}, before=3, top_logprobs=0) is None


# ── scoring ───────────────────────────────────────────────────────────────────


async def test_row_is_scored_by_prompt_logprobs() -> None:
    vllm = Vllm(label="7")
    async with opened(vllm) as server:
        order = ScoreTokens(rid="r", row=ids([1, 2, 3, 4]).tobytes(), start=2)
        assert await server.score(order) == RowLogprobs(
            rid="r", logprobs=floats([-0.375, -0.5]).tobytes(), version="7"
        )
        _, body = next(each for each in vllm.asked if "generate" in each[0])
        assert body["sampling_params"] == {
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "detokenize": False,
        }
        vllm.token_in = False
        refused = await server.score(order)
        assert isinstance(refused, Failed)
        assert not refused.retryable
