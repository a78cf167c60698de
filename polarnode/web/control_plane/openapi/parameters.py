"""The parameters of URLs as the document tells them: one for each reader of `query`.

The rule for whoever edits it: a parameter that `query` reads is here, by its name; a test compares the two.
"""

from collections.abc import Iterable, Mapping
from typing import Final, get_args

from polarnode.conversation import Json
from polarnode.records import Status
from polarnode.shell.journal import EventKind
from polarnode.trainers import FORMATS
from polarnode.web.control_plane.query import MOST_TASKS, PARQUET, Kind
from polarnode.wire import Arrays, Turns
from polarnode.wire.schema import Schema

LARGEST: Final = 10**18 - 1  # of a count: what is longer is no number of ours


def _one(description: str, schema: Schema) -> Schema:
    return {"description": description, "schema": schema}


def _enum(values: Iterable[str]) -> Schema:
    return {"type": "string", "enum": list[Json](values)}


_COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": LARGEST}

PARAMETERS: Final[Mapping[str, Schema]] = {
    "consumer": _one("A name whose position the node keeps.", {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"}),
    "after": _one("Begin behind this sequence number.", _COUNT),
    "follow": _one("false: end when there is no more.", {"type": "boolean", "default": True}),
    "task_id": _one("Only this task's.", {"type": "string"}),
    "group_id": _one("Only this group's.", {"type": "string"}),
    "outcome": _one("Only sessions that ended so.", _enum(get_args(Status))),
    "min_reward": _one("Only sessions with this reward or more.", {"type": "number"}),
    "arrays": _one("How arrays are written.", _enum(get_args(Arrays))),
    "turns": _one("Whether each turn's own tokens are in its row.", _enum(get_args(Turns))),
    "format": _one("In a trainer's format; parquet is the export's, of the rows' tokens.", _enum((*FORMATS, PARQUET))),
    "kind": _one("sft: conversations, a line each.", _enum(get_args(Kind))),
    "limit": _one("How many at most.", {"type": "integer", "minimum": 1, "maximum": MOST_TASKS, "default": 100}),
    "before": _one("The last task_id of the page before.", {"type": "string"}),
    "kinds": {
        "description": "Which events come.",
        "style": "form",
        "explode": False,
        "schema": {"type": "array", "items": _enum(get_args(EventKind)), "minItems": 1},
    },
}
