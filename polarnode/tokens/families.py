"""What differs between model families, as a table: one row a family.

A family is recognised by what its tokenizer and template do (control tokens, a rendered call), never by a model's name, because fine-tunes
keep the one and change the other. Whoever adds a family adds a row; `Template.audit` then says whether it can be served faithfully.
"""

from typing import Final

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import ModelError, Refused
from polarnode.ports import Tokenizer
from polarnode.tokens.family import CallSyntax, Family


@frozen(kw_only=True)
class _Row:
    """A family by its control strings and by what its template must write for the probe below."""

    name: str
    turn_start: str
    turn_end: str
    other_stops: tuple[str, ...]
    think: tuple[str, str]
    call: tuple[str, str]
    syntax: CallSyntax
    written_call: str
    prompts: tuple[str, ...]  # how a render with generation prompt may end


_ROWS: Final = (
    _Row(
        name="qwen3",  # Qwen3, Qwen3 2507 instruct and thinking, polarnode-tiny; not Qwen3-Coder and Qwen3.5, which write calls as XML
        turn_start="<|im_start|>",
        turn_end="<|im_end|>",
        other_stops=("<|endoftext|>",),
        think=("<think>", "</think>"),
        call=("<tool_call>", "</tool_call>"),
        syntax="json",
        written_call='<tool_call>\n{"name": "look", "arguments": {"b": 1, "a": "x"}}\n</tool_call><|im_end|>\n<|im_start|>user\n',
        prompts=("y<|im_end|>\n<|im_start|>assistant\n", "y<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ),
)
_CALL: Final[Json] = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": {"b": 1, "a": "x"}}}
_PROBE: Final[tuple[dict[str, Json], ...]] = (
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "user", "content": "y"},
)


def family_of(tokenizer: Tokenizer) -> Family:
    """The family a tokenizer's template writes. ModelError for one that no row describes."""
    for row in _ROWS:
        if _is(row, tokenizer):
            return _family(row, tokenizer)
    names = ", ".join(row.name for row in _ROWS)
    raise ModelError(f"this model's control tokens and chat template are of no family polarnode knows ({names}): serve one of those, or describe it")


def _is(row: _Row, tokenizer: Tokenizer) -> bool:
    if not tokenizer.control.keys() >= {row.turn_start, row.turn_end, *row.other_stops, *row.think, *row.call}:
        return False
    try:
        text = tokenizer.render(_PROBE, tools=(), generation_prompt=True, thinking=None)
    except (Refused, ModelError):  # another family's template may not take the probe at all
        return False
    return row.written_call in text and text.endswith(row.prompts)


def _family(row: _Row, tokenizer: Tokenizer) -> Family:
    number = tokenizer.control
    return Family(
        name=row.name,
        turn_end=number[row.turn_end],
        turn_ends=frozenset([number[row.turn_end]]),
        turn_starts=frozenset([number[row.turn_start]]),
        stop_ids=(number[row.turn_end], *(number[text] for text in row.other_stops)),
        think_open=number[row.think[0]],
        think_close=number[row.think[1]],
        call_open=number[row.call[0]],
        call_close=number[row.call[1]],
        call_syntax=row.syntax,
    )
