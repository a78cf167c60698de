"""Our reading of calls against PrimeIntellect's `renderers`, which reads token ids too: a second opinion
where it knows a family.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import frozen
from call_writers import CALL_WRITERS, TOOLS, cases
from renderers import parsing
from syntax_kit import THOUGHTS, TOY_MODELS, ToyModel

_SECTION = {"tool_call_begin_id": 260, "tool_call_end_id": 261}
_TAGGED = {"think_id": 258, "think_end_id": 259, "tool_call_id": 260, "tool_call_end_id": 261}
PARSERS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "json": (parsing.parse_qwen3, {"tool_call_id": 260, "tool_call_end_id": 261, "reasoning_end_id": 259}),
    "function_xml": (parsing.parse_qwen35, _TAGGED),
    "invoke_xml": (parsing.parse_minimax, _TAGGED),
    "arg_xml": (
        parsing.parse_glm,
        {**_TAGGED, "arg_key_id": 263, "arg_key_end_id": 264, "arg_value_id": 265, "arg_value_end_id": 266},
    ),
    "fenced": (
        parsing.parse_deepseek_v3,
        {**_SECTION, "tool_calls_begin_id": 262, "tool_calls_end_id": 263, "tool_sep_id": 264},
    ),
    "numbered": (
        parsing.parse_kimi_k2,
        {
            **_SECTION,
            "tool_calls_section_begin_id": 262,
            "tool_calls_section_end_id": 263,
            "tool_call_argument_begin_id": 264,
        },
    ),
    "harmony": (
        parsing.parse_gpt_oss,
        {
            "return_id": 256,
            "call_id": 258,
            "start_id": 257,
            "end_id": 262,
            "channel_id": 259,
            "message_id": 260,
            "constrain_id": 261,
        },
    ),
}
TYPED = ("function_xml", "invoke_xml", "arg_xml")


@frozen(eq=False)
class Decoder:
    """A toy as `renderers` wants a tokenizer."""

    toy: ToyModel

    def decode(self, ids: Sequence[int], **options: object) -> str:
        return b"".join(map(self.toy.token_bytes, ids)).decode(errors="replace")

    def encode(self, text: str, **options: object) -> list[int]:
        return list(self.toy.spelled(text))

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return self.toy.control.get(text)


def theirs(name: str, text: str) -> Any:
    toy, (parse, marks) = TOY_MODELS[name], PARSERS[name]
    more: dict[str, Any] = {} if name == "harmony" else {"stop_ids": {256}}
    if name in TYPED:
        more["tools"] = [
            {"name": tool.name, "description": "", "parameters": dict(tool.parameters)} for tool in TOOLS
        ]
    return parse(Decoder(toy), list(toy.spelled(text)), **marks, **more)


def ended(name: str, text: str) -> str:
    return text if name == "harmony" else text + next(iter(TOY_MODELS[name].control))


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_both_read_same_calls(name: str) -> None:
    toy = TOY_MODELS[name]
    for calls in cases():
        text = ended(name, CALL_WRITERS[name](calls))
        found = [(call.name, call.arguments) for call in theirs(name, text).tool_calls]
        assert found == calls, text
        assert [
            (call.name, json.loads(call.arguments)) for call in toy.read(toy.spelled(text), tools=TOOLS).calls
        ] == calls


def test_both_read_kimi_call_ids() -> None:
    toy, text = TOY_MODELS["numbered"], CALL_WRITERS["numbered"](cases()[-1])
    parser = toy.parser()
    parser.feed(toy.spelled(text))
    assert parser.model_call_ids == tuple(call.id for call in theirs("numbered", text).tool_calls)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_both_find_same_thought(name: str) -> None:
    toy = TOY_MODELS[name]
    text = (
        f"<|start|>assistant{THOUGHTS[name]}<|channel|>final<|message|>so<|return|>"
        if name == "harmony"
        else THOUGHTS[name] + "so"
    )
    found = theirs(name, ended(name, text))
    answer = toy.read(toy.spelled(ended(name, text)))
    assert (
        (answer.thinking, answer.text)
        == ((found.reasoning_content or "").strip("\n"), found.content.lstrip("\n"))
        == ("hm", "so")
    )
