"""Servers that are not there, and servers that do not fit: what a node says and does. The servers that answer
here are wrong on purpose; test_external_sglang.py has a real one.
"""

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from fakes_engine import order, sample
from weights_kit import free_port

from polarnode.cli.doctor import servers
from polarnode.core.errors import ConfigError, EngineError
from polarnode.core.trajectory import UNKNOWN_VERSION
from polarnode.engine.engines import open_engines
from polarnode.engine.external import Serving, UnfitServer, Wanted, connect
from polarnode.engine.protocol import ExpertShape, Failed, Forget, Generate, ToNode
from polarnode.engine.routing import MAX_DEATHS, HostDeaths, followed
from polarnode.engine.settings import EngineSettings, ExternalEngine
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.opening import load_node_model, with_served_model
from polarnode.node.settings import engine_settings
from polarnode.tokens.tokenizer import vocabulary_sample

WORDS = ((7, "bread"), (9, " bear"))
MODEL = {"model_path": "/far/away", "weight_version": "3", "is_generation": True}
FACTS = {"max_req_input_len": 500, "max_total_num_tokens": 4000, "version": "0.5.23"}
SAMPLED = {
    "meta_info": {
        "input_token_logprobs": [[None, 7, "bread"], [-1.0, 9, "bear"]],
        "output_token_logprobs": [[-0.5, 3, "x"]],
    }
}


@contextmanager
def answering(answers: Mapping[str, Any]) -> Iterator[str]:
    """A server with these answers by path; 404 for every other path, and an int is a status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path, 404)
            status, body = (found, b"") if isinstance(found, int) else (200, json.dumps(found).encode())
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is printed."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def external(tmp_path: Path, *urls: str, experts: ExpertShape | None = None) -> EngineSettings:
    (tmp_path / "config.json").write_text("{}")
    return EngineSettings(
        model_path=tmp_path,
        device="cuda",
        state_dir=tmp_path / "state",
        external=ExternalEngine(urls=urls, vocab_size=50, context_length=640, words=WORDS, experts=experts),
    )


async def test_node_starts_before_its_servers(tmp_path: Path) -> None:
    """It says what it waits for, and a call waits too."""
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with trio.fail_after(60):
        async with open_engines(external(tmp_path, *urls)) as engines:
            statistics = engines.statistics()
            assert (statistics.kind, statistics.vocab_size, statistics.context_length) == (
                "external",
                50,
                640,
            )
            assert statistics.weight_version == UNKNOWN_VERSION
            for host, url in zip(statistics.hosts, urls, strict=True):
                assert (host.state, host.url) == ("starting", url)
                assert host.last_error is not None
                assert url in host.last_error
            with trio.move_on_after(0.5) as waits:
                await sample(engines, order())
            assert waits.cancelled_caught


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({}, "no SGLang server; of a router name the servers"),
        ({"/model_info": 401}, "set POLARNODE_ENGINE_KEY"),
        ({"/model_info": {**MODEL, "is_generation": False}, "/server_info": FACTS}, "no generating model"),
        (
            {"/model_info": MODEL, "/server_info": FACTS, "/generate": {"text": "x"}},
            "no exact ids and logprobs",
        ),
        (
            {
                "/model_info": MODEL,
                "/server_info": FACTS,
                "/generate": {
                    "meta_info": {
                        **SAMPLED["meta_info"],
                        "input_token_logprobs": [[None, 7, "bread"], [-1.0, 9, "beer"]],
                    }
                },
            },
            "token 9 is 'beer' there and ' bear' here",
        ),
        (
            {"/model_info": MODEL, "/server_info": {}, "/generate": SAMPLED},
            "start the node with --context-length",
        ),
    ],
    ids=["no SGLang", "a key", "embeddings", "no logprobs", "another vocabulary", "no length"],
)
async def test_unrecordable_server_is_named_with_reason(answers: Mapping[str, Any], sentence: str) -> None:
    with answering(answers) as url:
        async with connect(Wanted(url=url, vocab_size=50, words=WORDS), None) as server:
            with pytest.raises(UnfitServer) as caught:
                await server.probe()
        assert sentence in str(caught.value)
        assert url in str(caught.value)


async def test_unfit_server_is_refused_at_start(tmp_path: Path) -> None:
    answers = {"/model_info": MODEL, "/server_info": FACTS, "/generate": SAMPLED}
    wanted = ExpertShape(layers=2, top_k=1, number=4)
    with answering(answers) as url, trio.fail_after(60):
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            async with open_engines(external(tmp_path, url, experts=wanted)):
                pytest.fail("it does not fit")
        async with open_engines(external(tmp_path, url)) as engines:
            assert engines.statistics().context_length == 500
            assert engines.versions == ("3",)
            assert not engines.routes


@pytest.mark.parametrize(("status", "again"), [(400, False), (503, True)])
async def test_refused_request_ends_once(status: int, again: bool) -> None:
    sent: list[ToNode] = []
    asked = Generate(rid="a" * 32, prompt=b"", sampling={})
    with answering({"/generate": status, "/abort_request": {}}) as url:
        async with connect(Wanted(url=url, vocab_size=50), None) as server:
            await server.generate(asked, sent.append)
    (end,) = sent
    assert isinstance(end, Failed)
    assert (f"HTTP {status}" in end.message, end.retryable) == (True, again)


async def test_doctor_reports_like_a_node(tmp_path: Path) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    plain = {**SAMPLED["meta_info"], "input_token_logprobs": [[None, 0, None]]}
    answers = {"/model_info": MODEL, "/server_info": FACTS, "/generate": {"meta_info": plain}}
    with answering(answers) as url, answering({}) as other:
        fits, waits, differs = await servers(NodeConfig(engine=f"{url},{away},{other}"))
    assert (fits.ok, fits.what) == (True, f"{url}: SGLang 0.5.23, 500 tokens a request, weights 3")
    assert (waits.ok, "waits for it" in waits.remedy) == (True, True)
    assert (differs.ok, "no SGLang server" in differs.what) == (False, True)


# ── settings ──────────────────────────────────────────────────────────────────


def test_servers_are_named_by_address() -> None:
    urls = ("http://10.0.0.5:30000", "https://gpu:443/sglang")
    text = "http://10.0.0.5:30000/, https://gpu:443/sglang"
    assert read_config(toml=f'engine = "{text}"').engine_urls == urls
    assert read_config(environment={"POLARNODE_ENGINE": text}).engine_urls == urls
    assert read_config(flags={"engine": text}).engine_urls == urls
    assert read_config(flags={"engine": "simulated"}).engine_urls == ()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ('engine = "vllm"', "addresses of SGLang servers"),
        ('engine = "http://me:secret@a:1"', "without a name or password"),
        ('engine = "http://a:1?key=x"', "POLARNODE_ENGINE_KEY"),
        ('engine = "http://a:1,http://a:1/"', "names a server twice"),
        ('engine = "http://a:1"\ncpu = true', "its servers have the model"),
        ('engine = "http://a:1"\nmemory_saver = "discard"', "memory_saver"),
    ],
)
def test_impossible_addresses_are_refused(settings: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config(toml=settings)


async def test_local_model_comes_from_server(tmp_path: Path) -> None:
    """The model is the one that the server names, where it is on this machine."""
    (tmp_path / "config.json").write_text("{}")
    with answering({"/model_info": {**MODEL, "tokenizer_path": str(tmp_path)}}) as url:
        assert (await with_served_model(NodeConfig(engine=url))).model == str(tmp_path)
        assert (await with_served_model(NodeConfig(engine=url, model="/mine"))).model == "/mine"
    with answering({"/model_info": MODEL}) as url, pytest.raises(ConfigError, match="serves /far/away"):
        await with_served_model(NodeConfig(engine=url))
    with pytest.raises(ConfigError, match="name --model"):
        await with_served_model(NodeConfig(engine=f"http://127.0.0.1:{free_port()}"))


def test_vocabulary_sample_covers_all_ranks(tmp_path: Path) -> None:
    """Vocabularies are compared by words of all ranks."""
    config = NodeConfig(engine="http://a:1")
    model = load_node_model(config)
    words = vocabulary_sample(model.tokenizer)
    assert 8 <= len(words) <= 128
    assert sum(token < 1000 for token, _ in words) >= 4
    assert all(model.tokenizer.token_bytes(token).decode() == text for token, text in words)
    found = engine_settings(config, tmp_path, model).external
    assert found is not None
    assert (found.words, found.vocab_size) == (words, model.tokenizer.vocab_size)


async def test_external_servers_ignore_forgotten_sessions() -> None:
    """Nothing is sent, and nothing is refused: which prefixes such a server keeps is its own affair."""
    serving: Any = Serving(cast(Any, None), cast(Any, None))
    async with trio.open_nursery() as nursery:
        serving._handle(Forget(session="s1"), nursery)
    assert serving._outbox == []


# ── decisions ─────────────────────────────────────────────────────────────────


def test_external_host_is_never_abandoned() -> None:
    deaths = HostDeaths(gives_up=False)
    pauses = [deaths.note(float(at)) for at in range(3 * MAX_DEATHS)]
    assert pauses[:3] == [0.0, 1.0, 2.0]
    assert pauses[-1] == 10.0


def test_versions_follow_servers_one_by_one() -> None:
    history: list[str] = []
    for serving in (["6", "6"], ["7", "6"], ["7", "7"], ["8", "7"], ["8", "8"]):
        history = followed(history, serving)
    assert history == ["6", "7", "8"]
    assert followed(history, ["7", "8"]) == ["6", "7", "8"]
    assert followed(history, ["7", "7"]) == ["6", "7", "8", "7"]  # all went back: it is the newest again
