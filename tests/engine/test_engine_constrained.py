"""The embedded model in a real engine on a CPU, its sampling constrained or steered: what is said is what was
asked, ids and logprobs stay whole.

An engine starts in some 15 seconds: the steps on a living one share it. What runs in its scheduler is
`polarnode.engine.embedded.grammars`.
"""

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import xgrammar
from attrs import evolve
from fakes_engine import joined, order, sample, until_idle
from steering_processor import forced

import polarnode
from polarnode.core.conversation import Constraint
from polarnode.core.errors import EngineError, EngineRefusal
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.engine.embedded.compiling import NotStarted, TooCostly
from polarnode.engine.embedded.control import LATE_GRAMMAR, TOO_COSTLY, piece
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.protocol import Failed
from polarnode.engine.settings import EngineSettings
from polarnode.tokens.template import LoadedModel, load_model

# torch and transformers warn of themselves
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
TINY = Path(polarnode.__path__[0]) / "models" / "tiny"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["lake", "river"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 999},
        "frozen": {"type": "boolean"},
    },
    "required": ["city", "kind", "depth", "frozen"],
    "additionalProperties": False,
}
JSON = Constraint(kind="json_schema", text=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(TINY)


def settings(state_dir: Path, **extra: Any) -> EngineSettings:
    return EngineSettings(
        model_path=TINY, device="cpu", state_dir=state_dir, context_length=4096, extra=extra
    )


def asked(
    model: LoadedModel,
    text: str = "Which lake?",
    *,
    max_tokens: int = 400,
    temperature: float = 1.0,
    **more: Any,
) -> GenerateOrder:
    prompt = model.tokenizer.encode_plain(text)
    return order(
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        **{"stop_ids": model.template.stop_ids, **more},
    )


def said(model: LoadedModel, chunks: Sequence[Chunk]) -> str:
    """The text of a sample that ended by itself, without the id that ended it."""
    ids = joined(chunks)
    assert chunks[-1].finish_reason == "stop"
    assert ids[-1] in model.template.stop_ids
    # As the node decodes text. xgrammar 0.2.7 takes overlong UTF-8 in a JSON string (0xe0 0x80 0x80, asked of
    # its matcher directly), so a sample of a byte-level vocabulary may hold bytes that strict decoding refuses.
    return b"".join(map(model.tokenizer.token_bytes, ids[:-1])).decode(errors="replace")


async def test_sampling_is_constrained_and_steered(model: LoadedModel, tmp_path: Path) -> None:
    with trio.fail_after(600):
        async with open_engines(settings(tmp_path, enable_custom_logit_processor=True)) as engines:
            await an_answer_is_json_of_its_schema(engines, model)
            await control_tokens_are_no_text(engines, model)
            await other_grammars_hold(engines, model)
            await what_is_no_grammar_is_refused_for_that_call_alone(engines, model)
            await what_costs_too_much_keeps_nobody_waiting(engines, model)
            await a_constraint_can_wait_for_the_end_of_a_thought(engines, model)
            await a_steered_answer_is_to_the_letter(engines, model)
            await all_kinds_share_a_batch(engines, model)
            assert engines.statistics().hosts[0].restarts == 0


@pytest.mark.gpu
@pytest.mark.skipif(
    find_spec("sgl_kernel") is None or not Path("/dev/nvidiactl").exists(),
    reason="needs an NVIDIA GPU and the engine's kernels for it",
)
async def test_constraints_and_steering_on_gpu(model: LoadedModel, tmp_path: Path) -> None:
    """The processor of these tests counts what was sampled, which lags where sampling overlaps with
    scheduling; constraints need no such care.
    """
    on_gpu = evolve(settings(tmp_path), device="cuda", gpus=(0,))
    with trio.fail_after(900):
        async with open_engines(on_gpu) as engines:
            await an_answer_is_json_of_its_schema(engines, model)
            await what_is_no_grammar_is_refused_for_that_call_alone(engines, model)
            await a_constraint_can_wait_for_the_end_of_a_thought(engines, model)
        async with open_engines(
            evolve(on_gpu, extra={"enable_custom_logit_processor": True, "disable_overlap_schedule": True})
        ) as engines:
            await a_steered_answer_is_to_the_letter(engines, model)
            await all_kinds_share_a_batch(engines, model)


def test_slow_step_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from polarnode.engine.embedded import grammars  # sglang: seconds, for this test alone

    info = xgrammar.TokenizerInfo([bytes([each]) for each in range(256)], stop_token_ids=[255])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("a*")
    monkeypatch.setattr(grammars, "get_parallel", lambda: SimpleNamespace(tp_size=1, pp_size=1))
    matcher = xgrammar.GrammarMatcher(compiled)
    grammar = grammars.MeasuredGrammar(matcher, 256, compiled, None, "a*", None)
    grammar.fill_vocab_mask(xgrammar.allocate_token_bitmask(1, 256), 0)
    grammar.accept_token(ord("a"))
    monkeypatch.setattr(grammars, "STEP_S", -1.0)
    grammar = grammar.copy()
    with pytest.raises(ValueError, match="costs too much"):
        grammar.accept_token(ord("a"))


@pytest.mark.parametrize("sizes", [{"tp_size": 2, "pp_size": 1}, {"tp_size": 1, "pp_size": 2}])
@pytest.mark.parametrize("thought", [False, True])
def test_slow_step_ends_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], thought: bool
) -> None:
    """Of several ranks the first decides: no rank fails by itself, and the abort is one that SGLang sends to
    all of them, once.
    """
    from polarnode.engine.embedded import grammars  # sglang: seconds, for this test alone

    info = xgrammar.TokenizerInfo([bytes([each]) for each in range(256)], stop_token_ids=[255])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("a*")
    monkeypatch.setattr(grammars, "get_parallel", lambda: SimpleNamespace(**sizes))
    slow, fast = (
        grammars.MeasuredGrammar(xgrammar.GrammarMatcher(compiled), 256, compiled, None, "a*", None).copy()
        for _ in range(2)
    )
    requests = [
        SimpleNamespace(rid=rid, grammar=grammar, finished=lambda: False, to_finish=None)
        for rid, grammar in (("1", slow), ("2", fast), ("3", None))
    ]
    if thought:
        requests[0].grammar = grammars.ReasonerGrammarObject(grammar=slow, think_end_ids=(0,))
    scheduler = SimpleNamespace(collect_inflight_reqs=lambda: requests)
    fast.accept_token(ord("a"))
    assert grammars._slow_requests(scheduler) == []
    monkeypatch.setattr(grammars, "STEP_S", -1.0)
    slow.accept_token(ord("a"))
    assert grammars._slow_requests(scheduler) == ["1"]
    assert grammars._slow_requests(scheduler) == []


@pytest.mark.parametrize("known", [False, True])
def test_late_constraint_is_refused_once(known: bool) -> None:
    """It waited behind others of its session: the next session that asks for it has it compiled."""
    from polarnode.engine.embedded import grammars  # sglang: seconds, for this test alone

    manager, key = waiting(grammars), ("regex", "a*")
    late = queued(key)
    if known:  # another session's was compiled meanwhile
        manager.grammar_backend.set_cache(key, "compiled")
    manager.grammar_queue = [late]
    assert manager.get_ready_grammar_requests() == []
    late.grammar_wait_ct = manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
    assert manager.get_ready_grammar_requests() == [late]
    assert late.said[0].startswith(LATE_GRAMMAR)
    assert manager.grammar_backend.cache.get(key) == ("compiled" if known else None)


@pytest.mark.parametrize("error", [TooCostly(), NotStarted("no process")])
def test_abandoned_constraint_ends_at_once(error: Exception) -> None:
    from polarnode.engine.embedded import grammars  # sglang: seconds, for this test alone

    manager, req = waiting(grammars), queued(("regex", "a*"))
    req.grammar.ended_by = error
    manager.grammar_queue = [req]
    assert manager.get_ready_grammar_requests() == [req]
    end = piece("0" * 32, [], {"finish_reason": {"type": "abort", **req.finish()}})
    assert isinstance(end, Failed)
    machine = isinstance(error, NotStarted)
    assert (end.retryable, end.refused) == (machine, not machine)
    assert end.message == ("no process" if machine else TOO_COSTLY)
    assert not manager.grammar_backend.cache


def waiting(grammars: Any) -> Any:
    """The manager of one rank, with nothing in its queue."""
    manager = object.__new__(grammars.LateGrammarManager)
    manager.__dict__.update(
        pp_rank=0,
        pp_size=1,
        grammar_sync_size=1,
        SGLANG_GRAMMAR_POLL_INTERVAL=0.001,
        SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=1000,
        grammar_backend=grammars.LateBackend(TINY, vocab_size=1, stop_ids=frozenset()),
    )
    return manager


def queued(key: tuple[str, str]) -> Any:
    """A request whose constraint is being compiled."""
    req = SimpleNamespace(grammar=Future(), grammar_key=key, grammar_wait_ct=0, finished=lambda: False)

    def end(message: str, status_code: int = 400) -> None:
        req.grammar, req.said = None, (message, status_code)

    req.set_finish_with_abort = end
    req.finish = lambda: {"message": req.said[0], "status_code": req.said[1]}
    return req


async def an_answer_is_json_of_its_schema(engines: Engines, model: LoadedModel) -> None:
    for _ in range(4):
        chunks = await sample(engines, asked(model, constraint=JSON, top_logprobs=2))
        answer = json.loads(said(model, chunks))
        assert answer.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        assert len(answer["city"]) <= 12
        assert answer["kind"] in ("lake", "river")
        assert 0 <= answer["depth"] <= 999
        assert isinstance(answer["frozen"], bool)
        ids = joined(chunks)
        assert [end.end for end in chunks[-1].version_spans] == [len(ids)]
        assert [len(chunk.logprobs) for chunk in chunks] == [len(chunk.ids) for chunk in chunks]
        # of the constrained choice: no mask left in them
        assert all(-100 < logprob <= 0 for chunk in chunks for logprob in chunk.logprobs)


def test_bounded_string_excludes_control_characters() -> None:
    from polarnode.engine.embedded.grammar_process import StrictStringCompiler  # torch, for this test alone

    info = xgrammar.TokenizerInfo([bytes([each]) for each in range(256)], stop_token_ids=[255])
    schema = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}}
    grammar = StrictStringCompiler(info).compile_json_schema(json.dumps(schema))
    for text, taken in {
        "a": True,
        "aé ": True,
        "a\t": False,
        "a\0": False,
        "a\x1f": False,
        'a"b': False,
    }.items():
        assert xgrammar.GrammarMatcher(grammar).accept_string(f'["{text}"]') is taken, text


async def control_tokens_are_no_text(engines: Engines, model: LoadedModel) -> None:
    """A string may hold any text: that of a control token too, but never the token."""
    anything = Constraint(kind="regex", text=r"(<tool_call>|<think>){3}")
    chunks = await sample(engines, asked(model, constraint=anything))
    assert re.fullmatch(anything.text, said(model, chunks))
    assert not {*joined(chunks)[:-1]} & {*model.tokenizer.control.values()}


async def other_grammars_hold(engines: Engines, model: LoadedModel) -> None:
    assert re.fullmatch(
        r"(ab|cd){2,3}",
        said(
            model,
            await sample(engines, asked(model, constraint=Constraint(kind="regex", text=r"(ab|cd){2,3}"))),
        ),
    )
    grammar = Constraint(kind="ebnf", text='root ::= "x" | "yes " root')
    assert re.fullmatch(r"(yes )*x", said(model, await sample(engines, asked(model, constraint=grammar))))


async def what_is_no_grammar_is_refused_for_that_call_alone(engines: Engines, model: LoadedModel) -> None:
    wrong: list[tuple[Any, str, str]] = [
        ("json_schema", "{", "json"),
        ("json_schema", '{"type": "lake"}', 'Unsupported type "lake"'),
        ("json_schema", '{"type": "object", "properties": 3}', "properties must be an object"),
        ("regex", "((", "parenthesis is not closed"),
        ("regex", "a\0b", "NUL"),
        ("ebnf", "root ::=", "Expect element"),
        ("ebnf", "root ::= root", "leaves nothing to sample"),
        ("json_schema", '{"$ref": "#"}', "leaves nothing to sample"),
    ]
    async with engines.generate(order([1], max_tokens=2000, temperature=1.0)) as beside:
        await beside.__anext__()
        for kind, text, sentence in wrong * 2:  # twice: refusals are remembered
            with pytest.raises(EngineRefusal, match=re.escape(sentence)) as caught:
                await sample(engines, asked(model, constraint=Constraint(kind=kind, text=text)))
            assert "cpp" not in str(caught.value)
        assert (await beside.__anext__()).finish_reason is None
    await until_idle(engines)


COSTLY = (
    Constraint(kind="regex", text="a*" * 4000),
    Constraint(kind="ebnf", text='root ::= root root root | "a" | ""'),
    Constraint(kind="ebnf", text='root ::= s "\\x01"\ns ::= s s s | [ -~] | ""'),
)


async def what_costs_too_much_keeps_nobody_waiting(engines: Engines, model: LoadedModel) -> None:
    """A sibling's calls, plain and with constraints that are new, are answered, the first of each before any of
    those of one session is refused; and each of these is.
    """
    refused: list[str] = []

    async def bad(number: int, constraint: Constraint) -> None:
        wanted = evolve(asked(model, constraint=constraint, max_tokens=3000), affinity="bad")
        with pytest.raises(EngineRefusal, match="costs too much to compile or to follow"):
            await sample(engines, wanted)
        refused.append(constraint.text)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            endless = Constraint(kind="regex", text="a*" * 4000 + str(number))
            nursery.start_soon(bad, number, endless)
        for number in range(5):
            schema = {
                "type": "object",
                "properties": {f"b{number}": {"type": "boolean"}},
                "required": [f"b{number}"],
            }
            good = Constraint(kind="json_schema", text=json.dumps(schema))
            assert json.loads(said(model, await sample(engines, asked(model, constraint=good)))).keys() == {
                f"b{number}"
            }
            await sample(engines, asked(model, max_tokens=4))
            # the others may come after a refusal, on a machine that has little time for them
            assert number or not refused
    for constraint in COSTLY[1:]:
        await bad(0, constraint)


async def a_constraint_can_wait_for_the_end_of_a_thought(engines: Engines, model: LoadedModel) -> None:
    """Any id can end a thought; one the model is sure to sample shows it."""
    free = joined(await sample(engines, asked(model, max_tokens=40, temperature=0.0)))
    after = free[len(free) // 2]
    thought = free[: free.index(after) + 1]
    ids = joined(
        chunks := await sample(
            engines, asked(model, temperature=0.0, constraint=JSON, constraint_after=after)
        )
    )
    assert ids[: len(thought)] == thought
    assert chunks[-1].finish_reason == "stop"
    assert (
        json.loads(b"".join(map(model.tokenizer.token_bytes, ids[len(thought) : -1]))).keys()
        == SCHEMA["properties"].keys()
    )  # type: ignore[attr-defined]


async def a_steered_answer_is_to_the_letter(engines: Engines, model: LoadedModel) -> None:
    family = model.family
    assert family.call_open is not None
    assert family.call_close is not None
    words = [
        family.call_open,
        *model.tokenizer.encode_plain('\n{"name": "look", "arguments": {}}\n'),
        family.call_close,
    ]
    for temperature in (0.0, 1.0):
        chunks = await sample(
            engines,
            asked(model, temperature=temperature, steering=forced(words, family.turn_end), top_logprobs=2),
        )
        assert joined(chunks) == [*words, family.turn_end]
        assert chunks[-1].finish_reason == "stop"
        assert {logprob for chunk in chunks for logprob in chunk.logprobs} == {0.0}  # of the choice it had
        assert {
            logprob
            for chunk in chunks
            if chunk.top_logprobs is not None
            for logprob in chunk.top_logprobs.logprobs[1::2]
        } == {-9999.0}


async def all_kinds_share_a_batch(engines: Engines, model: LoadedModel) -> None:
    answers: dict[str, list[Chunk]] = {}
    turn_end = model.family.turn_end

    async def one(name: str, wanted: GenerateOrder) -> None:
        answers[name] = await sample(engines, wanted)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(one, f"json {number}", asked(model, constraint=JSON))
            nursery.start_soon(
                one,
                f"forced {number}",
                asked(model, steering=forced([number] * (10 + 10 * number), turn_end)),
            )
            nursery.start_soon(
                one, f"free {number}", order([1, 2, number], max_tokens=30, temperature=1.0, top_logprobs=1)
            )
    for number in range(3):
        assert json.loads(said(model, answers[f"json {number}"])).keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        assert joined(answers[f"forced {number}"]) == [*[number] * (10 + 10 * number), turn_end]
        assert len(joined(answers[f"free {number}"])) == 30


async def test_unprepared_engine_refuses_steering(model: LoadedModel, tmp_path: Path) -> None:
    """An engine that was not started for it is neither steered nor repeatable."""
    with trio.fail_after(300):
        async with open_engines(settings(tmp_path)) as engines:
            with pytest.raises(
                EngineError, match="--engine-arg enable_custom_logit_processor=true"
            ) as caught:
                await sample(engines, asked(model, steering=forced([1], 2)))
            assert not caught.value.retryable
            seeded = evolve(asked(model).sampling, seed=7, max_tokens=60)
            answers = {
                tuple(joined(await sample(engines, asked(model, sampling=seeded, stop_ids=()))))
                for _ in range(3)
            }
            # a seed needs enable_deterministic_inference: without it SGLang reads none
            assert len(answers) > 1
