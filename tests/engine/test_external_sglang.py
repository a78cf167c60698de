"""An external engine on SGLang's own server, on the CPU: the engines' contract, the weights that its owner
updates, and its deaths.

One server for the whole module: a start takes some 15 seconds. The reference is transformers' forward pass.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
import trio
from engine_reference import CONTEXT, TOLERANCE, Reference, difference, settings
from fakes_engine import contract, joined, order, sample, until_idle
from sglang_server import SglangProcess, open_sglang_server

from polarnode.core.arrays import ids
from polarnode.core.conversation import Constraint
from polarnode.core.errors import Conflict, EngineError, EngineRefusal
from polarnode.core.ports import Chunk, ScoreOrder
from polarnode.core.trajectory import UNKNOWN_VERSION, VersionSpan
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.settings import ExternalEngine

# torch and transformers warn of themselves
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

PROMPT = list(range(100, 200))
TOKENS = 1200  # seconds of sampling, within which an update must begin


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model") / "old", seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model") / "new", seed=2)


@pytest.fixture(scope="module")
def server(old: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangProcess]:
    log = tmp_path_factory.mktemp("server") / "sglang.log"
    extra = ("--context-length", str(CONTEXT), "--skip-tokenizer-init", "--incremental-streaming-output")
    with open_sglang_server(old.path, log, *extra) as found:
        yield found


@asynccontextmanager
async def connected(server: SglangProcess, old: Reference, tmp_path: Path) -> AsyncIterator[Engines]:
    external = ExternalEngine(urls=(server.url,), vocab_size=1000, context_length=CONTEXT)
    with trio.fail_after(240):
        async with open_engines(settings(old, tmp_path, external=external, context_length=None)) as engines:
            yield engines


async def test_external_server_serves_and_updates(
    server: SglangProcess, old: Reference, new: Reference, tmp_path: Path
) -> None:
    async with connected(server, old, tmp_path) as engines:
        assert engines.statistics().kind == "external"
        assert engines.versions == (UNKNOWN_VERSION,)  # SGLang's own label, `default`, names nothing
        await contract(engines)
        await logprobs_are_what_transformers_says(engines, old)
        await its_weights_are_its_owner_s(engines)
        await a_constraint_holds(engines)
        await a_pause_freezes_and_resumes(engines)
        await a_named_update_is_exact_to_the_token(engines, server, old, new)
        await an_unnamed_update_is_of_unknown_weights(engines, server, old)
        await a_server_that_dies_fails_its_calls_and_is_served_again(engines, server, old)


async def logprobs_are_what_transformers_says(engines: Engines, old: Reference) -> None:
    for temperature in (1.0, 0.7):
        chunks = await sample(engines, order(PROMPT, max_tokens=64, temperature=temperature))
        assert difference(chunks, old.logprobs(PROMPT, joined(chunks), temperature)) < TOLERANCE
    row = [*PROMPT, *joined(chunks)]
    scores = await engines.score(ScoreOrder(request_id=uuid4().hex, row=ids(row), start=3))
    expected = old.logprobs(row[:3], row[3:])
    assert max(abs(one - two) for one, two in zip(scores.logprobs, expected, strict=True)) < TOLERANCE
    assert scores.version == UNKNOWN_VERSION


async def its_weights_are_its_owner_s(engines: Engines) -> None:
    with pytest.raises(Conflict, match="at its own servers, http://127"):
        engines.require_own()


async def a_constraint_holds(engines: Engines) -> None:
    """This server has no tokenizer, so it refuses every grammar; the refusal is the call's alone."""
    with pytest.raises(EngineRefusal):
        await sample(engines, order(constraint=Constraint(kind="regex", text="[0-9]+")))
    late = order(constraint=Constraint(kind="regex", text="[0-9]+"), constraint_after=5)
    with pytest.raises(EngineRefusal, match="--reasoning-parser"):
        await sample(engines, late)
    await until_idle(engines)


async def a_pause_freezes_and_resumes(engines: Engines) -> None:
    async with engines.generate(order(max_tokens=3000, temperature=1.0)) as stream:
        await stream.__anext__()
        await engines.pause("in_place")
        with trio.move_on_after(0.5):  # what was on its way still comes
            async for _ in stream:
                pass
        with trio.move_on_after(0.5) as silent:
            await stream.__anext__()
        assert silent.cancelled_caught
        await engines.resume()
        await stream.__anext__()
    await until_idle(engines)


async def updated_within(engines: Engines, server: SglangProcess, model: Path, **named: str) -> list[Chunk]:
    """A sample in whose middle the server's owner updates the weights."""
    chunks: list[Chunk] = []
    async with engines.generate(order(PROMPT, max_tokens=TOKENS, temperature=1.0)) as stream:
        chunks.append(await stream.__anext__())
        await trio.to_thread.run_sync(lambda: update(server, model, **named))
        chunks += [chunk async for chunk in stream]
    assert len(joined(chunks)) == TOKENS
    return chunks


def update(server: SglangProcess, model: Path, **named: str) -> None:
    """As a trainer does it: requests go back to the queue, and read their prompts again."""
    server.post("pause_generation", mode="retract")
    server.post("update_weights_from_disk", model_path=str(model), **named)
    server.post("continue_generation")


async def a_named_update_is_exact_to_the_token(
    engines: Engines, server: SglangProcess, old: Reference, new: Reference
) -> None:
    chunks = await updated_within(engines, server, new.path, weight_version="7")
    before, after = chunks[-1].version_spans
    assert (before.version, before.start, after.version, after.end) == (UNKNOWN_VERSION, 0, "7", TOKENS)
    sampled = joined(chunks)
    assert difference(chunks, old.logprobs(PROMPT, sampled), before) < TOLERANCE
    assert difference(chunks, new.logprobs(PROMPT, sampled), after) < TOLERANCE
    assert engines.versions == (UNKNOWN_VERSION, "7")
    assert engines.statistics().hosts[0].weight_version == "7"
    chunks = await updated_within(engines, server, old.path, weight_version="8")
    before, after = chunks[-1].version_spans
    assert (before.version, after.version) == ("7", "8")
    sampled = joined(chunks)
    assert difference(chunks, new.logprobs(PROMPT, sampled), before) < TOLERANCE
    assert difference(chunks, old.logprobs(PROMPT, sampled), after) < TOLERANCE


async def an_unnamed_update_is_of_unknown_weights(
    engines: Engines, server: SglangProcess, old: Reference
) -> None:
    """The label stays 8, and SGLang goes on saying it."""
    copy = old.path.with_name("copy")
    copy.symlink_to(old.path)
    chunks = await updated_within(engines, server, copy)
    assert chunks[-1].version_spans == (VersionSpan(version=UNKNOWN_VERSION, start=0, end=TOKENS),)
    chunks = await sample(engines, order(PROMPT))
    assert chunks[-1].version_spans == (VersionSpan(version=UNKNOWN_VERSION, start=0, end=8),)
    assert engines.versions[-2:] == ("8", UNKNOWN_VERSION)
    await trio.to_thread.run_sync(lambda: update(server, old.path, weight_version="9"))
    chunks = await sample(engines, order(PROMPT))
    assert chunks[-1].version_spans == (VersionSpan(version="9", start=0, end=8),)
    assert engines.versions[-1] == "9"


async def a_server_that_dies_fails_its_calls_and_is_served_again(
    engines: Engines, server: SglangProcess, old: Reference
) -> None:
    async with engines.generate(order(max_tokens=4000, temperature=1.0)) as stream:
        await stream.__anext__()
        server.kill()
        with pytest.raises(EngineError, match="http://127") as caught, trio.fail_after(20):
            async for _ in stream:
                pass
    assert caught.value.retryable
    while "connect" not in (engines.statistics().hosts[0].last_error or ""):  # noqa: ASYNC110 - a test looks from outside
        await trio.sleep(0.05)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a_call_waits, engines, old)
        await trio.sleep(0.1)
        server.start()
    assert engines.statistics().hosts[0].restarts >= 1


async def a_call_waits(engines: Engines, old: Reference) -> None:
    with trio.fail_after(120):
        assert joined(await sample(engines, order([1, 2, 3]))) == old.greedy([1, 2, 3], 8)
