"""Finished sessions as training data: which are accepted, conversations for SFT, and rows of tokens.

This package is pure: trajectories in, values out; `cli/generate*.py` reads and writes the files. A session is
accepted only if it was evaluated, nothing is written that the session does not contain, and everything that
is left out has a reason in words.
"""

from polarnode.offline.acceptance import (
    COLUMNS,
    AcceptanceResult,
    AcceptanceRule,
    facts_of,
    judge,
    parse_acceptance,
)
from polarnode.offline.generation import (
    Attempt,
    GenerationTable,
    Manifest,
    Slot,
    Split,
    TableRow,
    finished,
    list_slots,
    make_manifest,
    next_attempt,
    read_manifest,
)
from polarnode.offline.rows import SftLine, sft_lines

__all__ = [
    "COLUMNS",
    "AcceptanceResult",
    "AcceptanceRule",
    "Attempt",
    "GenerationTable",
    "Manifest",
    "SftLine",
    "Slot",
    "Split",
    "TableRow",
    "facts_of",
    "finished",
    "judge",
    "list_slots",
    "make_manifest",
    "next_attempt",
    "parse_acceptance",
    "read_manifest",
    "sft_lines",
]
