"""Bad input, through the whole model plane: whatever comes is answered, or refused in its API's own shape
with the field's path; never a 5xx, never a stream without an end, and nothing of it is recorded. What a good
request gets afterwards is what it always gets.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import frozen
from fakes_engine import ScriptedEngine
from fuzz_json import anything, mutated, repeated_keys, torn
from fuzz_kit import Target, check_sentence, play, run
from hypothesis import strategies as st
from plane_kit import AsgiClient, Stage, answers, stage
from tokens_kit import model

FOLDER = Path(__file__).parents[1] / "data" / "providers"
SAID = 'Let me see.|<tool_call>|\n{"name": "look", "arguments": {"path": "a.txt"}}\n|</tool_call>'
CONTEXT = 100_000  # more than any body here has tokens: a long context has tests of its own
SCHEMA: Any = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
# seconds of the real clock, as long bodies are read in a thread; an answer here takes a few milliseconds
STUCK = 120
# keys that mean something to one API or another
NAMES = (
    "model",
    "messages",
    "role",
    "content",
    "type",
    "input",
    "contents",
    "parts",
    "text",
    "tools",
    "stream",
)


@frozen(kw_only=True)
class Api:
    """An API under test: where it is asked, what its clients send at their fullest, and how its answers and
    errors are told.
    """

    name: str
    paths: tuple[str, ...]
    harnesses: tuple[str, ...]
    full: Any
    plain: Any
    # the sentence of an error body that has the API's shape, with the path it names
    refusal: Callable[[Any], str]
    ends: bytes  # what a stream that came to its end holds


def _openai(body: Any) -> str:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["type"], str)
    return f"{error['param'] or ''}: {error['message']}"


def _anthropic(body: Any) -> str:
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return str(body["error"]["message"])


def _google(body: Any) -> str:
    error = body["error"]
    assert 400 <= error["code"] < 500
    assert isinstance(error["status"], str)
    violations = [
        violation["field"] for detail in error.get("details", ()) for violation in detail["fieldViolations"]
    ]
    return ": ".join([*violations, error["message"]])


CHAT = Api(
    name="openai_chat",
    paths=("/v1/chat/completions",),
    harnesses=("mini_swe_agent", "openhands", "pi", "qwen_code"),
    full={
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "You code."}]},
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "refusal": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
                    {"id": "call_2", "type": "custom", "custom": {"name": "patch", "input": "x"}},
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "nothing"}]},
            {"role": "tool", "tool_call_id": "call_2", "content": "done"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True},
            },
            {
                "type": "custom",
                "custom": {
                    "name": "patch",
                    "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "s: /a/"}},
                },
            },
        ],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["END"],
        "seed": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "max_completion_tokens": 50,
        "chat_template_kwargs": {"enable_thinking": True},
        "parallel_tool_calls": False,
    },
    plain={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    refusal=_openai,
    ends=b"data: [DONE]\n\n",
)
MESSAGES = Api(
    name="anthropic",
    paths=("/v1/messages", "/v1/messages/count_tokens"),
    harnesses=("claude_code",),
    full={
        "model": "m",
        "max_tokens": 50,
        "system": [{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "document", "source": {"type": "text", "data": "Body."}, "title": "T"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"path": "a"}},
                ],
            },
            {"role": "system", "content": "A note."},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "tool_reference", "tool_name": "later"}],
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [
            {"name": "look", "input_schema": SCHEMA},
            {"name": "later", "input_schema": SCHEMA, "defer_loading": True},
        ],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "top_k": 20,
        "stream": True,
    },
    plain={"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]},
    refusal=_anthropic,
    ends=b"event: message_stop\n",
)
RESPONSES = Api(
    name="openai_responses",
    paths=("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"),
    harnesses=("codex",),
    full={
        "model": "m",
        "instructions": "You code.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "Hm."}],
                "encrypted_content": "c2ln",
            },
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "nothing"},
            {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "x"},
            {
                "type": "custom_tool_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "done"}],
            },
        ],
        "tools": [
            {"type": "function", "name": "look", "parameters": SCHEMA, "strict": False},
            {
                "type": "custom",
                "name": "patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "s: /a/"},
            },
            {
                "type": "namespace",
                "name": "agents",
                "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}],
            },
            {"type": "local_shell"},
        ],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "top_logprobs": 2,
        "reasoning": {"effort": "high"},
        "max_output_tokens": 50,
        "store": True,
        "previous_response_id": None,
        "stream": True,
    },
    plain={"model": "m", "input": "hi"},
    refusal=_openai,
    ends=b'"type":"response.completed"',
)
GEMINI = Api(
    name="google",
    paths=tuple(
        f"/v1beta/models/m:{method}" for method in ("generateContent", "streamGenerateContent", "countTokens")
    ),
    harnesses=("gemini_cli",),
    full={
        "systemInstruction": {"parts": [{"text": "You code."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Look."}]},
            {
                "role": "model",
                "parts": [
                    {
                        "functionCall": {"name": "look", "args": {"path": "a"}, "id": "x"},
                        "thoughtSignature": "c2ln",
                    }
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"name": "look", "response": {"output": "nothing"}, "id": "x"}}
                ],
            },
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "look", "parametersJsonSchema": SCHEMA},
                    {"name": "old", "parameters": {"type": "OBJECT"}},
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}},
        "generationConfig": {
            "temperature": 0.5,
            "topK": 20,
            "maxOutputTokens": 50,
            "stopSequences": ["END"],
            "seed": 7,
            "candidateCount": 2,
            "responseMimeType": "application/json",
            "responseJsonSchema": SCHEMA,
            "responseLogprobs": True,
            "logprobs": 2,
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 100},
        },
    },
    plain={"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    refusal=_google,
    ends=b'"finishReason"',
)
APIS = (CHAT, MESSAGES, RESPONSES, GEMINI)


# ── bodies ────────────────────────────────────────────────────────────────────


def bodies(api: Api) -> list[Any]:
    """What clients really send, in small, and one body with everything."""
    recorded = [
        json.loads((FOLDER / f"{harness}_{number}.json").read_text())["body"]
        for harness in api.harnesses
        for number in (1, 3)
    ]
    held = (
        [api.plain | {"guided_regex": "a+"}, api.plain | {"structured_outputs": {"choice": ["a", "b"]}}]
        if api is CHAT
        else []
    )
    return [api.full, api.full, api.plain, *recorded, *held]


def inputs(api: Api) -> st.SearchStrategy[tuple[str, bytes, tuple[int, ...]]]:
    """A path, a body, and where the body is cut on its way."""
    good = bodies(api)
    kinds = (
        mutated(good) | mutated(good) | torn(good) | repeated_keys(good) | anything((*NAMES, *good[0].keys()))
    )
    paths = st.sampled_from((api.paths[0], *api.paths))
    return st.tuples(paths, kinds, st.lists(st.integers(0, 400), max_size=3).map(tuple))


# ── the property ──────────────────────────────────────────────────────────────


async def answered(here: Stage, path: str, body: bytes, cuts: tuple[int, ...] = ()) -> AsgiClient:
    asgi = AsgiClient()
    with trio.move_on_after(STUCK) as scope:
        await asgi.request(here.app, path, body, cuts=cuts)
    assert not scope.cancelled_caught, "the answer never came to its end"
    assert asgi.whole
    return asgi


def checked(here: Stage, api: Api, asgi: AsgiClient) -> None:
    """An answer that ended, or a refusal that helps; and turns only for answers."""
    if asgi.status == 200:
        if b"event-stream" in dict(asgi.sent[0]["headers"])[b"content-type"]:
            assert api.ends in asgi.body or b"incomplete" in asgi.body
        else:
            json.loads(asgi.body)
        return
    assert asgi.status in (400, 413), f"status {asgi.status}: {asgi.body[:500]!r}"
    said = api.refusal(json.loads(asgi.body))
    check_sentence(said)
    field = said.partition(":")[0]
    # what is found where the whole conversation becomes text has no field of its own
    assert "the body" in said or "the conversation holds" in said or (field and " " not in field.strip()), (
        f"no path in {said!r}"
    )
    assert here.turns == []


async def try_body(api: Api, path: str, body: bytes, cuts: tuple[int, ...]) -> None:
    engine = ScriptedEngine(
        reply=answers(SAID), vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT, chunk=7
    )
    here = stage(engine, context=CONTEXT)
    checked(here, api, await answered(here, path, body, cuts))
    before = len(here.turns)
    good = await answered(here, api.paths[0], json.dumps(api.plain).encode())
    assert good.status == 200
    assert len(here.turns) == before + 1
    assert here.s1.calls.count == 0
    assert here.s1.lineages._graph.plans == {}  # no plan is left under way


def target(api: Api) -> Target:
    def check(value: tuple[str, bytes, tuple[int, ...]]) -> None:
        run(try_body, api, *value, size=len(value[1]))

    return Target(
        name=f"api_{api.name}",
        inputs=inputs(api),
        check=check,
        examples=250,
        always=(
            (api.paths[0], b"", ()),
            (api.paths[0], b"[]", ()),
            (api.paths[0], b"[" * 100_000, ()),
            # several choices end together: their stream once lost its last chunk
            (api.paths[0], json.dumps(api.full).encode(), ()),
        ),
    )


TARGETS = tuple(target(api) for api in APIS)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_any_call_answered_or_refused(target: Target) -> None:
    """Whatever is sent is answered or refused with a path."""
    play(target)
