"""Calls as each family's own template writes them, spelled in any tokens, whole and in pieces: they are read as
the calls they were.
"""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
import tokens_kit as kit
from family_fixtures import FAMILIES, family_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polarnode.core.conversation import Answer, Json, Message, Tool, ToolCall
from polarnode.tokens.parser import Parser
from polarnode.tokens.rendering import messages_shape, tools_shape

SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "where": {"type": "object"},
        "kinds": {"type": "array"},
    },
}
TOOLS = (Tool(name="look", parameters=SCHEMA), Tool(name="stop-2", parameters={"type": "object"}))
# no family escapes its own closing tags, which these letters do not spell
TEXT = st.text("ab 1.,:{}[]<>/\"\\\n\t'é日🙂", max_size=16)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**12) | st.sampled_from((0.5, -2.25)) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("abé", min_size=1), inner, max_size=2)
    ),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "path": TEXT,
        "lines": st.integers(-(10**12), 10**12),
        "share": st.sampled_from((0.5, -2.25, 1e30, 3)),
        "deep": st.booleans(),
        "where": st.dictionaries(st.text("abé", min_size=1), NESTED, max_size=2),
        "kinds": st.lists(NESTED, max_size=3),
    },
)
CALLS = st.lists(ARGUMENTS.map(lambda told: ("look", told)) | st.just(("stop-2", {})), min_size=1, max_size=3)
# the others' templates show no calls
CALLING = [
    name
    for name, fixture in FAMILIES.items()
    if fixture.row not in ("llama3_plain", "chatml", "gemma3", "deepseek_r1_distill")
]


def written(model: kit.Model, calls: list[tuple[str, Any]]) -> str:
    """What the template writes for a message of these calls, from the first call to the end of the turn."""
    message = Message(
        role="assistant",
        calls=tuple(
            ToolCall(
                id=f"functions.{name}:{place}", name=name, arguments=json.dumps(told, ensure_ascii=False)
            )
            for place, (name, told) in enumerate(calls)
        ),
    )
    rendered = model.reference.apply_chat_template(
        messages_shape((Message(role="user", text="QQ"), message), manner=model.family.manner),
        tools=tools_shape(TOOLS) if model.template.limits.allow((), TOOLS) else None,
        add_generation_prompt=False,
        tokenize=False,
    )
    after = rendered[rendered.rindex("QQ") :]
    begin = re.search(BEGIN[model.family.call_syntax], after)
    assert begin is not None, after
    return after[begin.end() :].rstrip("\n")


# what stands before the first call
BEGIN = {
    "json": "(?=<tool_call>)",
    "function_xml": "(?=<tool_call>)",
    "arg_xml": "(?=<tool_call>)",
    "bare_json": r"assistant<\|end_header_id\|>\n\n",
    "harmony": r"<\|start\|>assistant",
    "invoke_xml": "(?=<minimax:tool_call>)",
    "fenced": "(?=<｜tool▁calls▁begin｜>)",
    "separated": "(?=<｜tool▁calls▁begin｜>)",
    "numbered": r"(?=<\|tool_calls_section_begin\|>)",
    "braces": r"(?=<\|tool_call>)",
}


def read(model: kit.Model, sample: Any, *, opened: bool, cuts: list[int]) -> Answer:
    """The answer of a sample that arrives in pieces."""
    parser = Parser(
        tokenizer=model.tokenizer,
        family=model.family,
        call_id=lambda place: f"call_{place}",
        opens_thinking=opened,
        stop=(),
        tools=TOOLS,
        prompt=None,
    )
    places = [0, *sorted(cuts), len(sample)]
    for start, end in pairwise(places):
        parser.feed(sample[start:end])
    return parser.finish("stop").answer


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=CALLS, data=st.data())
def test_written_calls_are_read(name: str, calls: list[tuple[str, Any]], data: st.DataObject) -> None:
    model = kit.model(family_folder(name))
    calls = calls[: 1 if model.family.manner.one_call else None]
    text = written(model, calls)
    close = {number: text for text, number in model.tokenizer.control.items()}.get(
        model.family.think_close or -1
    )
    opened = close is not None and data.draw(st.booleans(), label="opened")
    sample = model.spelled(*pieces(model, (f"hm{close}\n" if opened else "") + text))
    cuts = data.draw(st.lists(st.integers(0, len(sample)), max_size=6), label="cuts")
    whole = read(model, sample, opened=opened, cuts=[])
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls, text
    assert (whole.thinking.strip(), whole.text.strip()) == ("hm" if opened else "", "")
    assert read(model, sample, opened=opened, cuts=cuts) == whole


def pieces(model: kit.Model, text: str) -> list[str]:
    """A text cut at its control strings."""
    control = sorted(model.tokenizer.control, key=len, reverse=True)
    return [piece for piece in re.split("(" + "|".join(map(re.escape, control)) + ")", text) if piece]
