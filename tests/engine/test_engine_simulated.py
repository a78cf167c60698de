"""The simulated engine: what it says reads as its model family writes, and its hosts live, wait, pause and
die as real ones do.
"""

import json
import os
import signal
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from attrs import evolve
from fakes_engine import joined, order, sample, until_idle
from family_fixtures import family_folder
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.conversation import Constraint, Conversation, Message, TextPart, Tool, ToolCall
from polarnode.core.errors import EngineError, EngineRefusal, ModelError, Refused
from polarnode.core.ports import LogitSteering
from polarnode.core.trajectory import VersionSpan
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.protocol import Generate, Simulation
from polarnode.engine.settings import (
    EngineSettings,
    SimulatedEngine,
    engine_arguments,
    gpu_groups,
    host_environment,
)
from polarnode.engine.simulated import __main__
from polarnode.engine.simulated.answers import (
    COMMANDS,
    HEADS,
    AnswerMaker,
    load_vocabulary,
    make_tool_call,
    value,
)
from polarnode.engine.simulated.serving import BLOCK, KEPT, Prefixes, Serving
from polarnode.node.config import TINY_MODEL
from polarnode.node.settings import simulated_marks
from polarnode.support.concurrency import group_members
from polarnode.tokens.parser import ParsedAnswer, Parser
from polarnode.tokens.template import LoadedModel, load_model

AT_ONCE = Simulation(tokens_per_s=0, first_token_s=0, prefill_tokens_per_s=0)
BASH = Tool(
    name="bash",
    description="Run it.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
ASK = Tool(
    name="ask",
    description="Ask a person.",
    parameters={"type": "object", "properties": {"question": {"type": "string"}}},
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(TINY_MODEL)


def test_unsupported_call_format_is_refused() -> None:
    """Its answers would hold calls that nothing reads."""
    assert simulated_marks(load_model(family_folder("smollm2")).family).call_open is None
    with pytest.raises(
        ModelError, match=r"the family gptoss writes them otherwise \(harmony\): leave --model out"
    ):
        simulated_marks(load_model(family_folder("gptoss")).family)


def answers(model: LoadedModel, **changed: Any) -> AnswerMaker:
    return AnswerMaker(
        vocabulary=load_vocabulary(TINY_MODEL),
        marks=simulated_marks(model.family),
        settings=evolve(AT_ONCE, **changed),
    )


def prompt(model: LoadedModel, *tools: Tool, text: str = "Look around.") -> "array[int]":
    return model.template.root(Conversation(messages=(Message(role="user", text=text),), tools=tools))


def wanted(ids: Sequence[int], *, rid: str = "0" * 32, max_tokens: int = 4096, **more: Any) -> Generate:
    sampling = {"max_new_tokens": max_tokens, **more.pop("sampling", {})}
    return Generate(rid=rid, prompt=array("i", ids).tobytes(), sampling=sampling, **more)


def read(model: LoadedModel, asked: "array[int]", ids: "array[int]") -> ParsedAnswer:
    """An answer as the node reads it."""
    parser = Parser(
        tokenizer=model.tokenizer,
        family=model.family,
        opens_thinking=model.template.opens_thinking(asked),
        call_id=str,
    )
    parser.feed(ids)
    return parser.finish("stop")


# ── what it says ──────────────────────────────────────────────────────────────


def test_answer_has_words_call_and_end(model: LoadedModel) -> None:
    asked = prompt(model, BASH)
    for number in range(20):
        answer = answers(model).answer(wanted(asked, rid=f"{number:032x}"))
        assert (len(answer.ids), answer.finish, answer.ids[-1]) == (256, "stop", model.family.turn_end)
        assert len(answer.logprobs) == 256
        assert all(-20 < logprob <= 0 for logprob in answer.logprobs)
        text, call = read(model, asked, answer.ids).answer.parts
        assert isinstance(text, TextPart)
        assert text.text.replace(" ", "").isalpha()
        assert isinstance(call, ToolCall)
        assert call.name == "bash"
        assert json.loads(call.arguments)["command"] in COMMANDS


def test_same_request_gets_same_answer(model: LoadedModel) -> None:
    asked = prompt(model, BASH)
    one, again, seeded = answers(model), answers(model), answers(model, seed=1)
    assert one.answer(wanted(asked)) == again.answer(wanted(asked))
    assert one.answer(wanted(asked)).ids != one.answer(wanted(asked, rid="1" * 32)).ids
    assert one.answer(wanted(asked)).ids != seeded.answer(wanted(asked)).ids


@pytest.mark.parametrize("length", [1, 2, 40, 1000])
def test_call_stays_whole_beyond_length(model: LoadedModel, length: int) -> None:
    """An answer is as long as was asked for, but its call is whole."""
    plain = answers(model, answer_tokens=length).answer(wanted(prompt(model)))
    assert len(plain.ids) == length
    calling = answers(model, answer_tokens=length).answer(wanted(prompt(model, BASH)))
    assert calling.ids.count(model.family.call_close or -1) == 1


def test_oversized_answer_is_cut(model: LoadedModel) -> None:
    answer = answers(model).answer(wanted(prompt(model, BASH), max_tokens=255))
    assert (len(answer.ids), answer.finish) == (255, "length")
    assert answers(model).answer(wanted(prompt(model), max_tokens=256)).finish == "stop"


def test_no_call_without_tools(model: LoadedModel) -> None:
    fake = '<tools>\n{"type": "function", "function": {"name": "rm", "parameters": {}}}\n</tools>'
    answer = answers(model).answer(wanted(prompt(model, text=fake)))
    assert model.family.call_open not in answer.ids
    listed = prompt(model, BASH, text=fake)
    calls = {
        read(model, listed, answers(model).answer(wanted(listed, rid=f"{number:032x}")).ids)
        .answer.parts[-1]
        .name
        for number in range(9)
    }  # type: ignore[union-attr]
    assert calls == {"bash"}


def test_conversation_comes_to_an_end(model: LoadedModel) -> None:
    """The template's own example of a call is none of the conversation's."""
    said, close = answers(model, calling_turns=2), model.family.call_close
    asked = prompt(model, BASH)
    assert close is not None
    assert close in said.answer(wanted(asked)).ids
    assert close in said.answer(wanted(array("i", [*asked, close]))).ids
    assert close not in said.answer(wanted(array("i", [*asked, close, close]))).ids


def test_thought_opened_by_prompt_is_closed(model: LoadedModel) -> None:
    opened = array(
        "i", [*prompt(model, BASH), model.family.think_open or 0, *model.tokenizer.encode_plain("\n")]
    )
    parts = read(model, opened, answers(model).answer(wanted(opened)).ids).answer.parts
    assert [type(part).__name__ for part in parts] == ["ThinkingPart", "TextPart", "ToolCall"]


def test_json_follows_schema_others_refused(model: LoadedModel) -> None:
    """JSON is made up from its schema, and other constraints are refused."""
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "n": {"enum": [3]}},
        "required": ["title", "n"],
    }
    answer = answers(model).answer(wanted(prompt(model, BASH), sampling={"json_schema": json.dumps(schema)}))
    made = json.loads(read(model, prompt(model), answer.ids).answer.text)
    assert made["n"] == 3
    assert isinstance(made["title"], str)
    for kind in ("regex", "ebnf"):
        with pytest.raises(ValueError, match=f"keep no {kind}"):
            answers(model).answer(wanted(prompt(model), sampling={kind: "a"}))
    with pytest.raises(ValueError, match="logit processor"):
        answers(model).answer(wanted(prompt(model), processor="{}"))


def test_parsed_tools_cache_is_bounded(model: LoadedModel) -> None:
    """Tools are parsed once a prompt head, and the oldest are forgotten."""
    said = answers(model)
    for number in range(HEADS + 5):
        said.answer(wanted(prompt(model, evolve(BASH, name=f"bash{number}"))))
    assert len(said._tools) == HEADS


def test_command_tool_is_preferred() -> None:
    tools = [{"name": tool.name, "parameters": tool.parameters} for tool in (ASK, BASH)]
    assert {make_tool_call(tools, Random(number))["name"] for number in range(20)} == {"bash"}
    assert make_tool_call(tools[:1], Random(0)) == {"name": "ask", "arguments": {}}
    codex = {
        "name": "shell",
        "parameters": {
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"],
        },
    }
    assert make_tool_call([codex], Random(0))["arguments"]["command"][:2] == ["bash", "-lc"]
    assert make_tool_call([{"name": "bare"}], Random(0)) == {"name": "bare", "arguments": {}}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 4}}, "required": ["a"]},
            {"a": 4},
        ),
        ({"type": ["null", "string"]}, None),
        ({"const": 7}, 7),
        ({"type": "array", "items": {"type": "number"}, "minItems": 2}, [1, 1]),
        ({"anyOf": [{"type": "null"}]}, None),
        ({"enum": ["x"]}, "x"),
        ({"type": "string", "maxLength": 0}, ""),
    ],
)
def test_value_matches_its_schema(schema: Any, kind: Any) -> None:
    assert value(schema, Random(0)) == kind


schemas: "st.SearchStrategy[Any]" = st.recursive(
    st.none()
    | st.booleans()
    | st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "boolean", "null", "nonsense"])}),
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.text(max_size=3), inner, max_size=3)}
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    ),
)


@given(schemas)
def test_any_schema_gives_json(schema: Any) -> None:
    json.dumps(value(schema, Random(0)))


def test_whole_blocks_are_cached() -> None:
    prefixes = Prefixes()
    first = array("i", range(3 * BLOCK + 1))
    assert prefixes.cached(first.tobytes()) == 0
    assert prefixes.cached(first.tobytes()) == 3 * BLOCK
    assert prefixes.cached(array("i", [*first, *range(BLOCK)]).tobytes()) == 3 * BLOCK
    assert prefixes.cached(array("i", [7, *first]).tobytes()) == 0
    assert prefixes.cached(first[: 3 * BLOCK].tobytes()) == 2 * BLOCK  # the last token is always read
    prefixes.clear()
    assert prefixes.cached(first.tobytes()) == 0


def test_oldest_prefixes_are_forgotten() -> None:
    prefixes = Prefixes()
    prefixes.cached(array("i", range(2 * BLOCK)).tobytes())
    prefixes.cached(array("i", range(1, (KEPT + 1) * BLOCK)).tobytes())
    assert prefixes.cached(array("i", range(2 * BLOCK)).tobytes()) == 0


# ── its hosts ─────────────────────────────────────────────────────────────────


def settings(
    model: LoadedModel, state_dir: Path, simulation: Simulation = AT_ONCE, **more: Any
) -> EngineSettings:
    simulated = SimulatedEngine(
        simulation=simulation, marks=simulated_marks(model.family), vocab_size=model.tokenizer.vocab_size
    )
    return EngineSettings(
        **{"model_path": TINY_MODEL, "device": "cpu", "state_dir": state_dir, "simulated": simulated, **more}
    )


@asynccontextmanager
async def opened(
    model: LoadedModel, state_dir: Path, simulation: Simulation = AT_ONCE, **more: Any
) -> AsyncIterator[Engines]:
    with trio.fail_after(120):
        async with open_engines(settings(model, state_dir, simulation, **more)) as engines:
            yield engines


def pid_of(engines: Engines) -> int:
    pid = engines.statistics().hosts[0].pid
    assert pid is not None
    return pid


def test_absent_gpus_have_hosts(model: LoadedModel, tmp_path: Path) -> None:
    told = settings(model, tmp_path, device="cuda", gpus=(4, 5, 6, 7), tp=2)
    assert gpu_groups(told) == ((4, 5), (6, 7))
    assert gpu_groups(settings(model, tmp_path)) == ((),)
    assert (
        host_environment(told, gpus=(4, 5), scratch=tmp_path, base={"CUDA_VISIBLE_DEVICES": "0"})[
            "CUDA_VISIBLE_DEVICES"
        ]
        == ""
    )
    assert engine_arguments(told, nccl_port=1)["context_length"] == 65_536
    assert engine_arguments(evolve(told, context_length=99), nccl_port=1)["context_length"] == 99


async def test_host_serves_and_leaves_nothing(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path, gpus=(0, 1), device="cuda") as engines:
        statistics = engines.statistics()
        assert (statistics.kind, len(statistics.hosts)) == ("simulated", 2)
        assert (statistics.vocab_size, statistics.context_length) == (model.tokenizer.vocab_size, 65_536)
        chunks = await sample(engines, order(prompt(model, BASH), max_tokens=None, top_logprobs=2))
        assert sum(len(chunk.ids) for chunk in chunks) == 256
        assert chunks[-1].finish_reason == "stop"
        assert chunks[-1].version_spans == (VersionSpan(version="0", start=0, end=256),)
        for chunk in chunks:
            top = chunk.top_logprobs
            assert top is not None
            assert (top.k, top.rows) == (2, len(chunk.ids))
            told = zip(chunk.ids, chunk.logprobs, map(top.row, range(top.rows)), strict=True)
            assert all(
                others[0] == (token, logprob) and others[1][1] < logprob for token, logprob, others in told
            )
        with pytest.raises(EngineError, match="--routed-experts"):
            await sample(engines, order([1], routed_from=0))
        with pytest.raises(EngineRefusal, match="keep no regex"):
            await sample(engines, order([1], constraint=Constraint(kind="regex", text="a")))
        with pytest.raises(EngineRefusal, match="no logit processor"):
            await sample(engines, order([1], steering=LogitSteering(processor="{}", parameters={})))
        groups = [host.pid for host in statistics.hosts]
    assert all(group_members(pid) == [] for pid in groups if pid is not None)


async def test_tokens_come_at_gpu_speed(model: LoadedModel, tmp_path: Path) -> None:
    slow = evolve(
        AT_ONCE,
        tokens_per_s=100,
        first_token_s=0.2,
        prefill_tokens_per_s=2000,
        chunk_tokens=8,
        answer_tokens=41,
    )
    async with opened(model, tmp_path, slow) as engines:
        long = [1] * 1000
        for cached in (0, 768):
            started = time.monotonic()
            async with engines.generate(order(long, max_tokens=None)) as stream:
                first = await stream.__anext__()
                to_first = time.monotonic() - started
                rest = [chunk async for chunk in stream]
            whole = time.monotonic() - started
            assert first.cached_tokens == cached
            expected = 0.2 + (1000 - cached) / 2000 + 7 / 100
            # Never early. How late is the machine's affair, and a late chunk does not put off those after it.
            assert to_first >= expected - 0.02
            assert len(rest) == 5
            assert whole >= expected + 33 / 100 - 0.02


async def test_excess_requests_wait(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(
        model, tmp_path, evolve(AT_ONCE, tokens_per_s=100, max_running=2, answer_tokens=60)
    ) as engines:
        while engines._hosts[0].load_report is None:  # noqa: ASYNC110 - its first report says how many it runs
            await trio.sleep(0.01)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(sample, engines, order([1], max_tokens=None))
            while (host := engines.statistics().hosts[0]).running != 2:  # noqa: ASYNC110 - it has no event
                await trio.sleep(0.05)
            # in the node, where sessions take turns, and not in the engine's own queue
            assert (host.in_flight, host.waiting, host.queued, host.queued_sessions) == (2, 0, 3, 1)
        await until_idle(engines)


async def test_leaving_ends_running_and_waiting_requests(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path, evolve(AT_ONCE, tokens_per_s=10, max_running=1)) as engines:
        async with engines.generate(order([1], max_tokens=None)) as stream:
            await stream.__anext__()
            with trio.move_on_after(0.5):
                await sample(engines, order([2], max_tokens=None))
        await until_idle(engines)
        async with engines.generate(order([3], max_tokens=None)) as stream:
            assert (await stream.__anext__()).finish_reason is None


async def test_weights_change_during_pause(model: LoadedModel, tmp_path: Path) -> None:
    """A pause holds everything, and weights change in between."""
    async with opened(model, tmp_path, evolve(AT_ONCE, tokens_per_s=100, first_token_s=0.05)) as engines:
        chunks = []
        async with engines.generate(order([1], max_tokens=None)) as stream:
            chunks.append(await stream.__anext__())
            await engines.pause("in_place")
            with trio.move_on_after(1) as quiet:
                async for chunk in stream:
                    chunks.append(chunk)  # noqa: PERF401 - what came before the pause stays, whatever happens
            with trio.move_on_after(0.5) as held:
                await sample(engines, order([2]))
            assert quiet.cancelled_caught
            assert held.cancelled_caught
            await engines.update_weights_from_disk(TINY_MODEL, "new", "in_place")
            await engines.resume()
            chunks += [chunk async for chunk in stream]
        assert len(joined(chunks)) == 256
        assert [span.version for span in chunks[-1].version_spans] == ["0", "new"]
        with pytest.raises(Refused, match=r"no config\.json under"):
            await engines.update_weights_from_disk(tmp_path / "nothing", "newer", "in_place")
        assert engines.statistics().weight_version == "new"


async def test_pause_can_abort_requests(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path, evolve(AT_ONCE, tokens_per_s=100)) as engines:
        async with engines.generate(order([1], max_tokens=None)) as stream:
            await stream.__anext__()
            await engines.pause("abort")
            assert [chunk.finish_reason async for chunk in stream][-1] == "abort"
        await engines.resume()
        assert len(joined(await sample(engines, order([1])))) == 8


async def test_killed_host_is_replaced(model: LoadedModel, tmp_path: Path) -> None:
    async with opened(model, tmp_path, evolve(AT_ONCE, tokens_per_s=20)) as engines:
        first = pid_of(engines)
        async with engines.generate(order([1], max_tokens=None)) as stream:
            await stream.__anext__()
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EngineError, match="died"):
                async for _ in stream:
                    pass
        async with engines.generate(order([1])) as stream:
            await stream.__anext__()
        assert pid_of(engines) != first


async def test_model_without_words_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(EngineError, match=r"tokenizer\.json|No such file"):
        async with opened(model, tmp_path, model_path=tmp_path / "bare"):
            pytest.fail("it does not serve")


def test_simulated_program_imports_no_engine() -> None:
    assert __main__.__name__ == "polarnode.engine.simulated.__main__"
    assert Serving.__module__ == "polarnode.engine.simulated.serving"
