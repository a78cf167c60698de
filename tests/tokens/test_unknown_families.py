"""Templates of models that are not served yet: each is refused with what the model writes and what is missing,
and none ends in a traceback.
"""

from pathlib import Path

import pytest
from attrs import evolve
from family_fixtures import FAMILIES, trl_template, write_family

from polarnode.core.errors import ModelError
from polarnode.tokens.template import load_model

TURNS = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- ASSISTANT ~ m.content }}{%- for c in m.tool_calls or [] %}{{- CALL }}{%- endfor %}{{- END }}
{%- else %}{{- '<|' ~ m.role ~ '|>' ~ m.content }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- ASSISTANT }}{%- endif %}"""
ARGUMENTS = "{% set a = c.function.arguments %}{% set n = c.function.name %}"


def short(call: str, *, assistant: str, end: str = "") -> str:
    """A template in which a call of a conversation is written so; `a` are its arguments, `n` its name."""
    found = TURNS.replace("{{- CALL }}", ARGUMENTS + call)
    return found.replace("ASSISTANT", repr(assistant)).replace("END", repr(end))


ROW = "a row of its marks (what is between them may be"
READER = "missing is a reader for such calls, and a row of its marks"
OWN = {
    "seed_oss": (
        short(
            "<seed:tool_call>\n<function={{ n }}>\n{% for k, v in a.items() %}<parameter={{ k }}>{{ v }}</parameter>\n"
            "{% endfor %}</function>\n</seed:tool_call>",
            assistant="<seed:bos>assistant\n",
            end="<seed:eos>",
        ),
        f"{ROW} function_xml)",
    ),
    "llama4": (
        short(
            '{"name": "{{ n }}", "parameters": {{ a | tojson }}}',
            assistant="<|header_start|>assistant<|header_end|>\n\n",
            end="<|eot|>",
        ),
        f"{ROW} bare_json)",
    ),
    "mistral": (
        short(
            "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}",
            assistant="",
        ),
        "does not show a call without an error",
    ),
    "deepseek_v3_2": (
        short(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ n }}">\n{% for k, v in a.items() %}<｜DSML｜parameter name='
            '"{{ k }}" string="true">{{ v }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            assistant="<｜Assistant｜>",
        ),
        READER,
    ),
    "kimi_k3": (
        short(
            "<|open|>call<|sep|>{{ n }}<|sep|>{{ a | tojson }}<|close|>", assistant="<|open|>assistant<|sep|>"
        ),
        READER,
    ),
    "hunyuan": (
        short(
            "<tool_calls><tool_call>{{ n }}<tool_sep>{{ a | tojson }}</tool_call></tool_calls>",
            assistant="<|hy_A|>",
        ),
        READER,
    ),
    "command_a": (
        short(
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ n }}", "parameters": {{ a | tojson }}}]'
            "<|END_ACTION|>",
            assistant="<|CHATBOT_TOKEN|>",
        ),
        f"{ROW} bare_json)",
    ),
}
TRL = {
    "lfm2": "shows tools, but no call of one",
    "lfm2_2_5": "[look(b=1, a='x')]",
    "phi3_5": "shows no calls of tools, and its prompts end in '<|end|>\\n<|assistant|>\\n'",
    "cohere2": "missing is a row of its turns",
    "muse_glimmer": READER,
}


def refusal(folder: Path, template: str) -> str:
    write_family(folder, evolve(FAMILIES["qwen3"], control=("<|im_start|>", "<|im_end|>")), template)
    with pytest.raises(
        ModelError, match=r"of no family polarnode knows \(qwen3, .*\. Serve one of those"
    ) as refused:
        load_model(folder)
    return str(refused.value)


@pytest.mark.parametrize("name", OWN)
def test_unserved_format_is_named(tmp_path: Path, name: str) -> None:
    template, words = OWN[name]
    assert words in refusal(tmp_path / "model", template)


@pytest.mark.parametrize("name", TRL)
def test_vendor_template_is_named(tmp_path: Path, name: str) -> None:
    assert TRL[name] in refusal(tmp_path / "model", trl_template(name))
