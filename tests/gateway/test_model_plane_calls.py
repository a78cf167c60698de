"""What a call can ask beside its words, through the whole plane: choices, logprobs, one call, constraints,
counts, budgets, and its neighbours.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
import trio
import trio.testing
from attrs import define, evolve
from fakes_engine import ScriptedEngine
from plane_kit import CONTEXT, AsgiClient, HandEngine, answers, new_session, prompts, served, spelled, stage
from providers_kit import a_call
from tokens_kit import model

from polarnode.core.conversation import Constraint, ModelRequest, Sampling
from polarnode.core.errors import EngineError
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.task import BuilderSpec
from polarnode.gateway.call import IncomingCall
from polarnode.gateway.exchange import resumable
from polarnode.merge.attach import Plan
from polarnode.merge.builders import build
from polarnode.merge.invariants import check
from polarnode.providers.anthropic import ANTHROPIC
from polarnode.providers.google import GOOGLE
from polarnode.providers.openai_chat import OPENAI_CHAT
from polarnode.providers.openai_responses import OPENAI_RESPONSES

CHAT, MESSAGES, RESPONSES, GEMINI = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1beta/models/m:generateContent",
)
HI: Any = {"role": "user", "content": "hi"}
SCHEMA: Any = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CALL = '<tool_call>|\n{"name": "look", "arguments": {"path": "a.txt"}}\n|</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "Read a file.", "parameters": SCHEMA}}
]


def scripted(*texts: str, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(
        reply=answers(*texts), vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT, **settings
    )


async def chat(base: str, use: Callable[[openai.OpenAI], Any]) -> Any:
    """What a chat client gets, in a thread."""

    def ask() -> Any:
        with openai.OpenAI(base_url=f"{base}/v1", api_key="key-s1", max_retries=0, timeout=60) as client:
            return use(client)

    return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)


def body(**said: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [HI]} | said).encode()


async def ask(app: Any, path: str, asked: bytes) -> AsgiClient:
    asgi = AsgiClient()
    await asgi.request(app, path, asked)
    return asgi


async def test_call_held_between_render_and_engine(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A call is held once it is rendered and before the engine is asked."""
    engine = scripted("One.", "Two.")
    here = stage(engine)
    held: list[tuple[int, str, int, int]] = []

    async def hold(plan: Plan, request: ModelRequest) -> None:
        text = request.conversation.messages[-1].text
        held.append((plan.index, text, here.s1.calls.count, len(engine.orders)))
        await trio.sleep(5)

    here.s1.before_generation = hold
    began = trio.current_time()
    await ask(here.app, CHAT, body())
    assert trio.current_time() - began >= 5
    await ask(here.app, CHAT, b'{"model": "m"}')
    here.s1.before_generation = None
    await ask(here.app, CHAT, body())
    assert held == [(0, "hi", 1, 0)], "a refused request is not held, nor one of a session without a hook"
    assert len(here.turns) == 2


# ── several answers ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
async def test_three_choices_are_three_turns(stream: bool) -> None:
    engine = scripted("One.", "Two and more.", "Three.")
    here = stage(engine)

    def use(client: openai.OpenAI) -> dict[int, str]:
        if not stream:
            whole = client.chat.completions.create(model="m", messages=[HI], n=3)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == sum(len(turn.sampled) for turn in here.turns)
            return {choice.index: choice.message.content or "" for choice in whole.choices}
        texts: dict[int, str] = {}
        for chunk in client.chat.completions.create(model="m", messages=[HI], n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        return texts

    async with served(here.app) as base:
        texts = await chat(base, use)
    assert sorted(texts.values()) == ["One.", "Three.", "Two and more."]
    assert len({tuple(prompt) for prompt in prompts(engine.orders)}) == 1
    turns = sorted(here.turns, key=lambda turn: turn.index)
    assert [turn.answer.text if turn.answer else None for turn in turns] == [
        texts[index] for index in range(3)
    ]
    assert [(turn.kind, turn.parent) for turn in turns] == [("root", None)] * 3
    counts = check(turns, build(BuilderSpec(name="prefix_merging"), turns))
    assert (counts.trainable, counts.traces) == (sum(len(turn.sampled) for turn in turns), 3)


async def test_stopped_choice_leaves_others_running(autojump_clock: trio.testing.MockClock) -> None:
    engine = scripted("go STOP on", "and on without end", chunk=1)
    here = stage(engine)
    asgi = await ask(here.app, CHAT, body(n=2, stop=["STOP"]))
    said = {choice["message"]["content"].strip() for choice in json.loads(asgi.body)["choices"]}
    assert said == {"go", "and on without end"}  # which of them asks first is nobody's promise
    assert dict(engine.ended) == {"abort": 1, "stop": 1}


@define(eq=False)
class OneFails(ScriptedEngine):
    """The second generation fails, the others never end."""

    async def __anext__(self) -> Any:
        await trio.sleep_forever()

    def __aiter__(self) -> "OneFails":
        return self

    @asynccontextmanager
    async def generate(self, order: GenerateOrder) -> AsyncIterator[AsyncIterator[Chunk]]:
        self.orders.append(order)
        await trio.sleep(len(self.orders))
        if len(self.orders) == 2 and order is self.orders[1]:
            raise EngineError("the host died")
        yield self


async def test_failed_choice_ends_call_at_once(autojump_clock: trio.testing.MockClock) -> None:
    here = stage(OneFails())
    with trio.fail_after(10):
        asgi = await ask(here.app, CHAT, body(n=2))
    assert asgi.status == 500
    assert sorted(turn.state for turn in here.turns) == ["failed", "partial"]


async def test_budgets_count_each_choice(autojump_clock: trio.testing.MockClock) -> None:
    here = stage(scripted("One.", "Two."), max_turns=3)
    assert (await ask(here.app, CHAT, body(n=2))).status == 200
    assert (await ask(here.app, CHAT, body(n=2, seed=1))).status == 400
    assert (here.s1.budget.spent_clock, len(here.turns)) == ("turns", 2)


async def test_session_close_cuts_every_choice(autojump_clock: trio.testing.MockClock) -> None:
    hold = trio.Event()
    here = stage(scripted("One is long.", "Two is long.", chunk=1, hold=hold))
    asgi = AsgiClient()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asgi.request, here.app, CHAT, body(n=2))
        await trio.sleep(1)
        await here.s1.close()
    assert [(turn.state, len(turn.sampled)) for turn in here.turns] == [("partial", 1), ("partial", 1)]
    assert asgi.status == 410


# ── logprobs, one call, constraints ───────────────────────────────────────────


async def test_logprobs_match_engine_token_for_token() -> None:
    here = stage(scripted("Hello there."))

    def use(client: openai.OpenAI) -> Any:
        whole = client.chat.completions.create(model="m", messages=[HI], logprobs=True).choices[0]
        options: Any = {"model": "m", "messages": [HI], "logprobs": True, "stream": True, "seed": 1}
        parts = [
            chunk.choices[0].logprobs for chunk in client.chat.completions.create(**options) if chunk.choices
        ]
        return whole.logprobs.content, [token for part in parts if part for token in part.content or []]  # type: ignore[union-attr]

    async with served(here.app) as base:
        whole, streamed = await chat(base, use)
    assert b"".join(bytes(token.bytes) for token in whole) == b"Hello there."
    assert whole == streamed
    assert {token.logprob for token in whole} == {-0.5}
    assert len(whole) == len(here.turns[0].sampled) - 1  # all but the turn end


async def test_single_call_closed_by_next_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """One call is one call, and the next request closes the turn."""
    engine = scripted(f"Let me see.|{CALL}|\n|{CALL}", "It says hello.")
    here = stage(engine)
    asgi = await ask(here.app, CHAT, body(tools=TOOLS, parallel_tool_calls=False))
    message = json.loads(asgi.body)["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    first = here.turns[0]
    assert list(first.sampled) == spelled(*f"Let me see.|{CALL}".split("|"))
    assert (first.state, first.finish_reason, len(first.logprobs)) == (
        "complete",
        "tool_calls",
        len(first.sampled),
    )
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "hello"}
    await ask(here.app, CHAT, body(messages=[HI, message, result], tools=TOOLS, parallel_tool_calls=False))
    second = here.turns[1]
    assert (second.parent, second.kind, second.close_length) == (0, "extend", 1)
    assert second.prompt_delta[0] == model().family.turn_end
    assert "closed: the first 1 ids end the parent's cut sample" in second.notes
    assert prompts(engine.orders)[1] == prompts(engine.orders)[0] + list(first.sampled) + list(
        second.prompt_delta
    )


async def test_schema_reaches_engine_without_thinking(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A schema reaches the engine where it can hold, and the answer does not think."""
    engine = scripted('{"path": "x"}')
    here = stage(engine)
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    await ask(here.app, CHAT, body(response_format=asked))
    await ask(here.app, CHAT, body(response_format=asked, tools=TOOLS))
    held, left = engine.orders
    assert isinstance(held.constraint, Constraint)
    assert json.loads(held.constraint.text) == SCHEMA
    assert left.constraint is None
    # an empty thought, so that the JSON comes at once
    assert model().tokenizer.control["</think>"] in list(held.prompt)[-8:]
    assert any("schema" in note for note in here.turns[1].notes)


# ── what is not generated ─────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
async def test_prewarm_request_is_no_turn(autojump_clock: trio.testing.MockClock, stream: bool) -> None:
    engine = scripted("Hello.")
    here = stage(engine, max_turns=1)
    warm = json.dumps({"model": "m", "input": "hi", "generate": False, "stream": stream}).encode()
    asgi = await ask(here.app, RESPONSES, warm)
    assert asgi.status == 200
    assert asgi.whole
    assert b'"status":"completed"' in asgi.body
    assert (engine.orders, here.turns, here.s1.metrics()["prewarmed"]) == ([], [], 1)
    assert (await ask(here.app, RESPONSES, json.dumps({"model": "m", "input": "hi"}).encode())).status == 200
    await here.s1.close()
    assert (await ask(here.app, RESPONSES, warm)).status == 410


COUNTS: Any = {
    MESSAGES: ("/v1/messages/count_tokens", "input_tokens", {"model": "m", "max_tokens": 99, "system": "Be brief.",
               "tools": [{"name": "look", "description": "Read.", "input_schema": SCHEMA}]}, "messages"),
    RESPONSES: ("/v1/responses/input_tokens", "input_tokens", {"model": "m", "instructions": "Be brief.",
                "tools": [{"type": "function", "name": "look", "description": "Read.", "parameters": SCHEMA, "strict": False}]}, "input"),
    GEMINI: ("/v1beta/models/m:countTokens", "totalTokens", {"systemInstruction": {"parts": [{"text": "Be brief."}]},
             "tools": [{"functionDeclarations": [{"name": "look", "description": "Read.", "parametersJsonSchema": SCHEMA}]}]}, "contents"),
}  # fmt: skip


def said(path: str, *texts: str) -> Any:
    """A conversation in an API's own words, the user's first."""
    if path != GEMINI:
        return [
            {"role": "assistant" if place % 2 else "user", "content": text}
            for place, text in enumerate(texts)
        ]
    return [
        {"role": "model" if place % 2 else "user", "parts": [{"text": text}]}
        for place, text in enumerate(texts)
    ]


@pytest.mark.parametrize("path", COUNTS)
async def test_counted_tokens_match_rendered_prompt(
    autojump_clock: trio.testing.MockClock, path: str
) -> None:
    """The counted tokens are those of the prompt that would be rendered."""
    counting, field, head, messages = COUNTS[path]
    engine = scripted("<think>|\nA thought that is kept.\n|</think>|\n\nHello.", "Fine.")
    here = stage(engine)
    for texts in (("hi",), ("hi", "Hello.", "How are you?")):
        asked = json.dumps(head | {messages: said(path, *texts)}).encode()
        wanted = (
            asked
            if path != GEMINI
            else json.dumps({"generateContentRequest": {"model": "models/m", **json.loads(asked)}}).encode()
        )
        counted = json.loads((await ask(here.app, counting, wanted)).body)[field]
        assert (await ask(here.app, path, asked)).status == 200
        assert counted == len(engine.orders[-1].prompt)
    assert [turn.parent for turn in here.turns] == [None, 0]


# ── sampling and budgets ──────────────────────────────────────────────────────


async def test_every_task_sampling_field_wins(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """All of the task's sampling wins, and both are recorded."""
    task = Sampling(
        temperature=0.25,
        top_k=7,
        stop=("TASK",),
        seed=3,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
    )
    engine = scripted("one TASK two")
    here = stage(engine, sampling=task)
    asked = {
        "temperature": 2,
        "top_p": 0.5,
        "stop": ["ASKED"],
        "seed": 9,
        "frequency_penalty": 1,
        "presence_penalty": 1,
        "max_tokens": 50,
    }
    asgi = await ask(here.app, CHAT, body(**asked))
    assert json.loads(asgi.body)["choices"][0]["message"]["content"].strip() == "one"
    turn = here.turns[0]
    assert turn.asked == Sampling(
        temperature=2,
        top_p=0.5,
        stop=("ASKED",),
        seed=9,
        frequency_penalty=1,
        presence_penalty=1,
        max_tokens=50,
    )
    assert turn.used == engine.orders[0].sampling == task.over(turn.asked)
    assert (turn.used.stop, turn.used.seed, turn.used.top_p, turn.used.max_tokens) == (("TASK",), 3, 0.5, 50)


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        (CHAT, {"messages": [HI]}, 400),
        (MESSAGES, {"messages": [HI], "max_tokens": 9}, 400),
        (RESPONSES, {"input": "hi"}, 400),
        (GEMINI, {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, 400),
    ],
)
@pytest.mark.parametrize("budget", ["max_turns", "max_tokens"])
async def test_spent_budget_is_refused_per_dialect(
    autojump_clock: trio.testing.MockClock, path: str, asked: Any, status: int, budget: str
) -> None:
    """A spent budget is a plain refusal in every dialect."""
    here = stage(scripted("Hello."), **{budget: 1})
    assert (await ask(here.app, path, json.dumps({"model": "m"} | asked).encode())).status == 200
    for stream in (False, True):
        asgi = await ask(here.app, path, json.dumps({"model": "m", "stream": stream} | asked).encode())
        assert asgi.status == status
        assert f"budget of 1 {budget[4:]}" in json.loads(asgi.body)["error"]["message"]
    assert here.s1.budget.spent_clock == budget[4:]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, GEMINI])
async def test_abort_before_first_token_is_retryable(
    autojump_clock: trio.testing.MockClock, path: str
) -> None:
    """A generation that ended before its first token is to be asked again."""
    engine = HandEngine()
    here = stage(engine, max_turns=1)
    asked = {
        CHAT: {"messages": [HI]},
        MESSAGES: {"messages": [HI], "max_tokens": 9},
        RESPONSES: {"input": "hi"},
    }
    given = json.dumps(
        {"model": "m"} | asked.get(path, {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]})
    ).encode()
    engine.give(finish="abort")
    asgi = await ask(here.app, path, given)
    assert asgi.status in (429, 500, 503, 529)
    assert dict(asgi.sent[0]["headers"])[b"retry-after"].isdigit()
    engine.give("Hello.", "<|im_end|>", finish="stop")
    assert b"Hello." in (await ask(here.app, path, given)).body  # it cost no budget
    assert [(turn.state, turn.kind) for turn in here.turns] == [("failed", "root"), ("complete", "retry")]


# ── neighbours ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("agents", [2, 3])
async def test_parallel_subagents_are_separate_lineages(
    autojump_clock: trio.testing.MockClock, agents: int
) -> None:
    """Sub-agents at once are lines of their own that grow side by side."""
    engine = scripted("Yes.", chunk=1)
    here = stage(engine)

    async def agent(name: str) -> None:
        messages: list[Any] = [{"role": "system", "content": f"You are {name}."}, HI]
        for step in range(3):
            asgi = await ask(here.app, CHAT, body(messages=messages))
            messages += [
                json.loads(asgi.body)["choices"][0]["message"],
                {"role": "user", "content": f"step {step} of {name}"},
            ]

    async with trio.open_nursery() as nursery:
        for place in range(agents):
            nursery.start_soon(agent, f"agent {place}")
    turns = sorted(here.turns, key=lambda turn: turn.index)
    assert len(turns) == 3 * agents
    assert sorted(turn.kind for turn in turns) == ["extend"] * 2 * agents + ["root"] * agents
    assert len({turn.lineage for turn in turns}) == agents
    assert [turn.parent for turn in turns[:agents]] == [None] * agents  # they did run at once
    built = build(BuilderSpec(name="prefix_merging"), turns)
    assert (check(turns, built).trainable, len(built.traces)) == (
        sum(len(turn.sampled) for turn in turns),
        agents,
    )


async def test_parallel_calls_are_branches(autojump_clock: trio.testing.MockClock) -> None:
    """Several calls on one history are branches."""
    engine = scripted("Yes.", "One.", "Two.", chunk=1)
    here = stage(engine)
    first = json.loads((await ask(here.app, CHAT, body())).body)["choices"][0]["message"]
    async with trio.open_nursery() as nursery:
        for text in ("this way", "that way"):
            nursery.start_soon(
                ask, here.app, CHAT, body(messages=[HI, first, {"role": "user", "content": text}])
            )
    kinds = sorted((turn.kind, turn.parent) for turn in here.turns[1:])
    assert kinds == [("branch", 0), ("extend", 0)]


# ── what an answer is remembered by ───────────────────────────────────────────


async def test_previous_response_id_extends_its_turn(autojump_clock: trio.testing.MockClock) -> None:
    engine = scripted("Hello.", "Fine.")
    here = stage(engine)
    first = json.loads(
        (await ask(here.app, RESPONSES, json.dumps({"model": "m", "input": "hi"}).encode())).body
    )
    asked = {"model": "m", "input": "How are you?", "previous_response_id": first["id"]}
    assert (await ask(here.app, RESPONSES, json.dumps(asked).encode())).status == 200
    assert [(turn.kind, turn.parent) for turn in here.turns] == [("root", None), ("extend", 0)]


async def test_prewarm_response_id_can_be_continued(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = scripted("Hello.")
    here = stage(engine)
    warm = json.loads(
        (
            await ask(
                here.app, RESPONSES, json.dumps({"model": "m", "input": "hi", "generate": False}).encode()
            )
        ).body
    )
    assert warm["output"] == []
    await ask(
        here.app,
        RESPONSES,
        json.dumps({"model": "m", "input": [], "previous_response_id": warm["id"]}).encode(),
    )
    await ask(here.app, RESPONSES, json.dumps({"model": "m", "input": "hi"}).encode())
    assert prompts(engine.orders)[0] == prompts(engine.orders)[1]


# ── an upgrade is refused ─────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix", ["", "/v1", "/sessions/key-s1/v1", "/any/prefix"])
@pytest.mark.parametrize("key", ["key-s1", None])
async def test_upgrade_is_426_under_any_prefix(prefix: str, key: str | None) -> None:
    here = stage(scripted("x"))
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    async with served(here.app) as base:
        reply = await trio.to_thread.run_sync(
            lambda: httpx2.get(f"{base}{prefix}/responses", headers=headers)
        )
    assert reply.status_code == 426
    assert reply.json()["error"]["message"].startswith("WebSockets are not served")
    assert reply.headers["content-type"] == "application/json"


def test_attempt_name_is_shared_by_equals() -> None:
    """A name is shared only by those who may have the same answer."""
    session = new_session("s")
    asked = a_call().request
    same = IncomingCall(session=session, dialect=OPENAI_CHAT, request=asked, key="body")
    others = (
        evolve(same, key="other"),
        evolve(same, dialect=ANTHROPIC),
        evolve(same, request=evolve(asked, hints={"agent": "b"})),
    )
    assert same.name == evolve(same, request=evolve(asked, stream=True)).name
    assert len({each.name for each in (same, *others)}) == 4
    cannot: tuple[dict[str, Any], ...] = (
        {"choices": 2},
        {"logprobs": 0},
        {"constraint": Constraint(kind="regex", text="a*")},
    )
    assert resumable(asked)
    assert not any(resumable(evolve(asked, **fields)) for fields in cannot)


def test_every_dialect_is_tested_here() -> None:
    assert {dialect.name for dialect in (OPENAI_CHAT, ANTHROPIC, OPENAI_RESPONSES, GOOGLE)} == {
        "openai_chat",
        "anthropic",
        "openai_responses",
        "google",
    }
