"""Which family a model is of: the row of `rows.py` that its control strings and its template fit, in the model's own ids.

The rule for whoever edits it: a model is recognised by what its template does with the probe, never by its name, and by one row only.
"""

from typing import Final

from polarnode.conversation import Json
from polarnode.errors import ModelError, Refused
from polarnode.ports import Tokenizer
from polarnode.tokens.family import Family, HarmonyMarks
from polarnode.tokens.rows import ROWS, Row

_ARGUMENTS: Final[dict[str, Json]] = {"b": 1, "a": "x"}
_TEXT: Final = '{"b": 1, "a": "x"}'


def family_of(tokenizer: Tokenizer) -> Family:
    """The family a tokenizer's template writes. ModelError for one that no row describes."""
    row = next((row for row in ROWS if fits(row, tokenizer)), None)
    if row is not None:
        return _family(row, tokenizer)
    names = ", ".join(row.name for row in ROWS)
    raise ModelError(f"this model's control tokens and chat template are of no family polarnode knows ({names}): serve one of those, or describe it")


def fits(row: Row, tokenizer: Tokenizer) -> bool:
    """Whether a row describes this tokenizer and its template."""
    if not tokenizer.control.keys() >= set(_needed(row)):
        return False
    try:
        text = tokenizer.render(_probe(row), tools=(), generation_prompt=True, thinking=None)
    except (Refused, ModelError):  # another family's template may not take the probe at all
        return False
    return any(written in text for written in row.written) and text.endswith(row.prompts)


def _needed(row: Row) -> tuple[str, ...]:
    maybe = (row.turn_end, row.separator, *(row.call or ()))
    single = (text for text in maybe if text is not None)
    return (*single, *row.turn_starts, *row.boundaries, *(row.section or ()), *(row.harmony or {}).values())


def _probe(row: Row) -> list[dict[str, Json]]:
    arguments: Json = _TEXT if row.manner.arguments == "text" else _ARGUMENTS
    call: Json = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "y"}]


def _family(row: Row, tokenizer: Tokenizer) -> Family:
    number = tokenizer.control

    def mark(pair: tuple[str, str | None] | None, place: int) -> int | None:
        return None if pair is None else number.get(pair[place] or "")

    def known(*texts: str | None) -> tuple[int, ...]:
        return tuple(dict.fromkeys(number[text] for text in texts if text is not None and text in number))

    stops = (*row.boundaries, *row.stops) if row.harmony else (row.turn_end, *row.boundaries, *row.stops)
    return Family(
        name=row.name,
        stop_ids=known(*stops),
        turn_end=None if row.turn_end is None else number[row.turn_end],
        turn_ends=frozenset(known(row.turn_end, *row.ends, *row.boundaries)),
        turn_starts=frozenset(known(*row.turn_starts)),
        boundaries=frozenset(known(*row.boundaries)),
        think_open=mark(row.think, 0),
        think_close=mark(row.think, 1),
        think_label=row.think_label,
        call_open=mark(row.call, 0),
        call_close=mark(row.call, 1),
        section_open=mark(row.section, 0),
        section_close=mark(row.section, 1),
        separator=None if row.separator is None else number[row.separator],
        harmony=None if row.harmony is None else HarmonyMarks(**{name: number[text] for name, text in row.harmony.items()}),
        call_syntax=row.syntax,
        manner=row.manner,
        known=row.known,
        refuses=row.refuses,
    )
