"""A trajectory in a trainer's format, as JSON: by itself, on a stream, as a line of an export.

The rules for whoever edits it: it is made in a reader's thread, one trajectory at a time. A session that a format can not carry is told on a
stream and in an export as one that was `refused`, with the reason, and ends neither.
"""

from base64 import b64encode
from typing import Any

import numpy

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.records import Trajectory
from polarnode.shell.journal import Telling, as_json
from polarnode.trainers import FORMATS, project
from polarnode.web.control_plane.query import PARQUET, Query
from polarnode.wire import Arrays, dump_json, plain


def check_format(query: Query) -> Query:
    """The query, for routes whose formats are trainers' alone."""
    if query.format == PARQUET:
        raise Refused(f"format must be one of {', '.join(FORMATS)} here; parquet is a format of GET /v1/export", path="?format")
    if query.format is not None and query.turns == "full":
        raise Refused("turns=full is of a trajectory's own JSON: leave it out where format= is said", path="?turns")
    return query


def format_json(name: str, trajectory: Trajectory, arrays: Arrays) -> dict[str, Json]:
    """A trajectory in a trainer's format, and whose it is. Refused where the format can not carry it."""
    return _whose(name, trajectory) | {"value": _plain(project(name, trajectory, arrays="numpy"), arrays)}


def _whose(name: str, trajectory: Trajectory) -> dict[str, Json]:
    return {
        "format": name,
        "session_id": trajectory.session_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "outcome": plain(trajectory.outcome),
        "reward": trajectory.reward,
        "metadata": plain(trajectory.metadata),
    }


def told(name: str, trajectory: Trajectory, arrays: Arrays) -> bytes:
    """The same as text, where a refusal is told in its place."""
    try:
        return dump_json(format_json(name, trajectory, arrays))
    except Refused as refused:
        return dump_json(_whose(name, trajectory) | {"value": None, "refused": str(refused)})


def _plain(value: Any, arrays: Arrays) -> Any:
    """Arrays as lists, or as their bytes in base64 with what it takes to read them; bytes as base64."""
    match value:
        case numpy.ndarray():
            return value.tolist() if arrays == "json" else {"dtype": str(value.dtype), "shape": list(value.shape), "data": _base64(value.tobytes())}
        case bytes():
            return _base64(value)
        case dict():
            return {name: _plain(each, arrays) for name, each in value.items()}
        case list():
            return [_plain(each, arrays) for each in value]
    return value


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


# ── events ────────────────────────────────────────────────────────────────────


def telling_of(query: Query) -> Telling:
    """How the trajectories of a stream or an export are written."""
    if query.format is None:
        return as_json(query.arrays, query.turns)
    name, arrays = query.format, query.arrays
    return Telling(name=("format", name, arrays), write=lambda whole: told(name, whole, arrays))
