"""Finished sessions as data to train on later: what is accepted and why not, conversations for SFT, rows of
tokens, tables of it.

Pure: trajectories in, values out; whoever reads and writes files is `cli/generate/`. The rule for whoever
edits it: nothing is accepted that was not judged, nothing is written that the session did not say, and of
everything that is left out there is a reason in words.
"""

from polarnode.offline.acceptance import COLUMNS, Acceptance, Judged, facts_of, judge, parse_acceptance
from polarnode.offline.generation import (
    Attempt,
    Group,
    Manifest,
    Slot,
    Split,
    Tally,
    finished,
    manifest_of,
    next_attempt,
    read_manifest,
    slots_of,
)
from polarnode.offline.sft import SftLine, sft_lines

__all__ = [
    "COLUMNS",
    "Acceptance",
    "Attempt",
    "Group",
    "Judged",
    "Manifest",
    "SftLine",
    "Slot",
    "Split",
    "Tally",
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
