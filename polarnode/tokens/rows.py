"""The table of model families: one row a family, what its tokenizer and template must show to be of it, and what its marks mean.

Whoever adds a family adds a row, a fixture in `tests/family_fixtures.py` and a golden file; `Template.audit` then says whether it can be
served faithfully. A row is recognised by control strings and by what the template writes for the probe of `families.py`, a question, one
call and another question; never by a model's name, because fine-tunes keep the one and change the other.
"""

from collections.abc import Mapping
from typing import Final

from attrs import field, frozen

from polarnode.tokens.family import CallSyntax, Manner

Pair = tuple[str, str]
_EITHER: Final = Manner(arguments="either")


@frozen(kw_only=True)
class Row:
    """A family in control strings. `written`: one of these stands in the render of the probe; `prompts`: how that may end.

    `turn_end`, `turn_starts`, `call`, `section` and `separator` must be in the tokenizer; `stops`, `think` only count where they are. `ends`:
    what beside `turn_end` ends a turn; `boundaries` are stops that begin what follows.
    """

    name: str
    written: tuple[str, ...]
    prompts: tuple[str, ...]
    turn_end: str | None
    turn_starts: tuple[str, ...]
    stops: tuple[str, ...]
    ends: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()
    think: Pair | None = None
    think_label: str = ""
    call: tuple[str, str | None] | None = None  # without a close, a call goes on to the turn's end
    section: Pair | None = None
    separator: str | None = None
    harmony: Mapping[str, str] | None = None
    syntax: CallSyntax = "none"
    manner: Manner = _EITHER
    known: Mapping[str, str] = field(factory=dict)
    refuses: Mapping[str, str] = field(factory=dict)


_THINK: Final = ("<think>", "</think>")
_HERMES: Final = ("<tool_call>", "</tool_call>")
_IM: Final = "<|im_end|>\n<|im_start|>"
_XML: Final = "<function=look>\n<parameter=b>\n1\n</parameter>\n<parameter=a>\nx\n</parameter>\n</function>"
_EOT: Final = "<|eot_id|><|start_header_id|>"
_LLAMA: Final = ("<|start_header_id|>assistant<|end_header_id|>\n\n",)
_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEP, _EOS, _USER = "<｜tool▁sep｜>", "<｜end▁of▁sentence｜>", "<｜User｜>y"
_ASKED: Final = ("<｜Assistant｜>", "<｜Assistant｜><think>\n", "<｜Assistant｜><think>", "<｜Assistant｜></think>")
_OBJECT: Final = '{"b": 1, "a": "x"}'

_ONE: Final = "the template shows one call a message, so that several of one turn are shown one after another, each with its result"
_ONCE: Final = "the template opens the results of a conversation's first calls only; here those of every turn are opened"

ROWS: Final = (
    Row(
        name="qwen3",  # Qwen2.5 too, Qwen3, Qwen3 2507 instruct and thinking, polarnode-tiny; Qwen3-Coder and Qwen3.5 write calls as XML
        written=(f'<tool_call>\n{{"name": "look", "arguments": {_OBJECT}}}\n</tool_call>{_IM}user\n',),
        prompts=(f"y{_IM}assistant\n", f"y{_IM}assistant\n<think>\n"),
        turn_end="<|im_end|>",
        turn_starts=("<|im_start|>",),
        stops=("<|endoftext|>",),
        think=_THINK,
        call=_HERMES,
        syntax="json",
    ),
    Row(
        name="qwen3_xml",  # Qwen3-Coder, Qwen3.5, Qwen3.6
        written=(f"<tool_call>\n{_XML}\n</tool_call>{_IM}user\n",),
        prompts=(f"y{_IM}assistant\n", f"y{_IM}assistant\n<think>\n", f"y{_IM}assistant\n<think>\n\n</think>\n\n"),
        turn_end="<|im_end|>",
        turn_starts=("<|im_start|>",),
        stops=("<|endoftext|>",),
        think=_THINK,
        call=_HERMES,
        syntax="function_xml",
        manner=Manner(),
    ),
    Row(
        name="chatml",  # SmolLM2, and whoever else writes plain turns: it has no way to call
        written=(f"<|im_start|>assistant\n{_IM}user\ny",),
        prompts=(f"y{_IM}assistant\n",),
        turn_end="<|im_end|>",
        turn_starts=("<|im_start|>",),
        stops=("<|endoftext|>",),
        think=_THINK,
    ),
    Row(
        name="llama3",  # Llama 3.1, 3.2, 3.3
        written=(f'{{"name": "look", "parameters": {_OBJECT}}}{_EOT}user',),
        prompts=_LLAMA,
        turn_end="<|eot_id|>",
        ends=("<|eom_id|>",),
        turn_starts=("<|start_header_id|>",),
        stops=("<|eom_id|>", "<|end_of_text|>"),
        call=("<|python_tag|>", None),  # before code for tools of Llama's own too, which no harness offers: that is text
        syntax="bare_json",
        manner=Manner(arguments="either", text_apart=True, one_call=True),
        known={"two tool": _ONE},
    ),
    Row(
        name="llama3_plain",  # the first Llama 3, whose template knows no tools
        written=(f"assistant<|end_header_id|>\n\n{_EOT}user",),
        prompts=_LLAMA,
        turn_end="<|eot_id|>",
        turn_starts=("<|start_header_id|>",),
        stops=("<|end_of_text|>",),
    ),
    Row(
        name="glm4",  # GLM 4.5, 4.6: a turn is ended by the header of the next, which the model itself samples
        written=(
            "<tool_call>look\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call><|user|>",
        ),
        prompts=("y<|assistant|>", "y<|assistant|>\n<think></think>"),
        turn_end=None,
        turn_starts=("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
        boundaries=("<|user|>", "<|observation|>"),
        stops=("<|endoftext|>",),
        think=_THINK,
        call=_HERMES,
        syntax="arg_xml",
        manner=Manner(),
    ),
    Row(
        name="gptoss",  # a turn is messages with headers of their own; `<|end|>` ends one that is no call in what the template writes
        written=(
            f"<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{_OBJECT}<|call|><|start|>user",
            f"<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{_OBJECT}<|call|><|start|>user",
        ),
        prompts=("y<|end|><|start|>assistant",),
        turn_end="<|end|>",
        ends=("<|return|>", "<|call|>"),
        turn_starts=("<|start|>",),
        stops=("<|return|>", "<|call|>", "<|endoftext|>"),
        harmony={"start": "<|start|>", "channel": "<|channel|>", "message": "<|message|>", "constrain": "<|constrain|>", "end": "<|end|>"},
        syntax="harmony",
        manner=Manner(arguments="either", thinking="thinking", text_apart=True, one_call=True),
        refuses={"several results": "shows a result under the name of the last call, so that several calls of one turn can not be answered"},
    ),
    Row(
        name="deepseek",  # V3 and R1
        written=(f"{_SECTION[0]}{_CALL[0]}function{_SEP}look\n```json\n{_OBJECT}\n```{_CALL[1]}{_SECTION[1]}{_EOS}{_USER}",),
        prompts=_ASKED,
        turn_end=_EOS,
        turn_starts=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        stops=(),
        think=_THINK,
        call=_CALL,
        section=_SECTION,
        separator=_SEP,
        syntax="fenced",
        manner=Manner(arguments="text"),
        known={"tool": _ONCE, "two tool": _ONCE, "tool and user": _ONCE},
    ),
    Row(
        name="deepseek_v3_1",
        written=(f"{_SECTION[0]}{_CALL[0]}look{_SEP}{_OBJECT}{_CALL[1]}{_SECTION[1]}{_EOS}{_USER}",),
        prompts=_ASKED,
        turn_end=_EOS,
        turn_starts=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        stops=(),
        think=_THINK,
        call=_CALL,
        section=_SECTION,
        separator=_SEP,
        syntax="separated",
        manner=Manner(arguments="text"),
    ),
    Row(
        name="deepseek_r1_distill",  # and V3, R1 as first published: calls are shown beside no text at all, and a single one is never ended
        written=(f"<｜Assistant｜>{_EOS}{_USER}",),
        prompts=_ASKED,
        turn_end=_EOS,
        turn_starts=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        stops=(),
        think=_THINK,
        manner=Manner(arguments="text"),
        refuses={"tool": "does not end the calls that a result answers"},
    ),
    Row(
        name="kimi_k2",
        written=(f"<|tool_call_begin|>c0<|tool_call_argument_begin|>{_OBJECT}<|tool_call_end|><|tool_calls_section_end|><|im_end|><|im_user|>user",),
        prompts=("<|im_assistant|>assistant<|im_middle|>",),
        turn_end="<|im_end|>",
        turn_starts=("<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
        stops=("[EOS]",),
        think=_THINK,
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        separator="<|tool_call_argument_begin|>",
        syntax="numbered",
        manner=Manner(arguments="either", spoken_ids=True),
    ),
    Row(
        name="minimax_m2",
        written=(
            '<invoke name="look">\n<parameter name="b">1</parameter>\n<parameter name="a">x</parameter>\n</invoke>\n</minimax:tool_call>[e~[\n]~b]user',
        ),
        prompts=("y[e~[\n]~b]ai\n<think>\n", "y[e~[\n]~b]ai\n"),
        turn_end="[e~[",
        turn_starts=("]~b]",),
        stops=(),
        think=_THINK,
        call=("<minimax:tool_call>", "</minimax:tool_call>"),
        syntax="invoke_xml",
        manner=Manner(),
    ),
    Row(
        name="gemma3",
        written=("<start_of_turn>model\n<end_of_turn>\n<start_of_turn>user\ny",),
        prompts=("y<end_of_turn>\n<start_of_turn>model\n",),
        turn_end="<end_of_turn>",
        turn_starts=("<start_of_turn>",),
        stops=("<eos>",),
    ),
    Row(
        name="gemma4",  # a call is answered within the model's own turn, and the response's mark is what ends the sample
        written=('<|tool_call>call:look{a:<|"|>x<|"|>,b:1}<tool_call|>',),
        prompts=("y<turn|>\n<|turn>model\n", "y<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"),
        turn_end="<turn|>",
        turn_starts=("<|turn>", "<tool_response|>"),
        boundaries=("<|tool_response>",),
        stops=("<eos>",),
        think=("<|channel>", "<channel|>"),
        think_label="thought\n",
        call=("<|tool_call>", "<tool_call|>"),
        syntax="braces",
        manner=Manner(),
    ),
)
