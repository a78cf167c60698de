"""Finished sessions as training data: which are accepted and why not, conversations for SFT, rows of tokens.

Pure: trajectories in, values out; `cli/generate*.py` reads and writes the files. Nothing is accepted that was
not evaluated, nothing is written that the session does not contain, and whatever is left out has a reason in
words.
"""

from polarnode.offline.acceptance import (
    COLUMNS,
    Acceptance,
    AcceptanceResult,
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
    manifest_of,
    next_attempt,
    read_manifest,
    slots_of,
)
from polarnode.offline.rows import SftLine, sft_lines

__all__ = [
    "COLUMNS",
    "Acceptance",
    "AcceptanceResult",
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
    "manifest_of",
    "next_attempt",
    "parse_acceptance",
    "read_manifest",
    "sft_lines",
    "slots_of",
]
