"""The control plane's OpenAPI 3.1 document, built from the served routes and the types that read and write
their bodies.

Pure. Nothing here repeats what the code states elsewhere: tests compare the parameters with `query`, and
every route with its operation.
"""

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from itertools import starmap
from typing import Any, Final, get_args

from polarnode.api.openapi_shapes import ENGINE, JSON, OPERATIONS, Operation, Where
from polarnode.api.query import MOST_TASKS, PARQUET, Kind
from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.schema import Schema, Schemas
from polarnode.core.codec.trajectories import JSON_SCHEMAS, Turns
from polarnode.core.conversation import Json
from polarnode.core.trajectory import Status
from polarnode.journal.values import EventKind
from polarnode.trainers import FORMATS

# ── parameters ────────────────────────────────────────────────────────────

LARGEST: Final = 10**18 - 1  # the largest number accepted


def _one(description: str, schema: Schema) -> Schema:
    return {"description": description, "schema": schema}


def _enum(values: Iterable[str]) -> Schema:
    return {"type": "string", "enum": list[Json](values)}


_COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": LARGEST}

PARAMETERS: Final[Mapping[str, Schema]] = {
    "consumer": _one(
        "A name whose position the node keeps.",
        {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
    ),
    "after": _one("Begin after this sequence number.", _COUNT),
    "follow": _one(
        "false: end the stream when no more events are stored.", {"type": "boolean", "default": True}
    ),
    "task_id": _one("Only sessions of this task.", {"type": "string"}),
    "group_id": _one("Only sessions of this group.", {"type": "string"}),
    "outcome": _one("Only sessions with this status.", _enum(get_args(Status))),
    "min_reward": _one("Only sessions with at least this reward.", {"type": "number"}),
    "arrays": _one("The encoding of arrays.", _enum(get_args(Arrays))),
    "turns": _one("Whether turns include their tokens.", _enum(get_args(Turns))),
    "format": _one(
        "A trainer's format; parquet, of token rows, only for the export.", _enum((*FORMATS, PARQUET))
    ),
    "kind": _one("sft: one conversation per line.", _enum(get_args(Kind))),
    "limit": _one(
        "The most records returned.", {"type": "integer", "minimum": 1, "maximum": MOST_TASKS, "default": 100}
    ),
    "before": _one("The last task_id of the previous page.", {"type": "string"}),
    "kinds": {
        "description": "The kinds of events sent.",
        "style": "form",
        "explode": False,
        "schema": {"type": "array", "items": _enum(get_args(EventKind)), "minItems": 1},
    },
}


# ── document ────────────────────────────────────────────────────────────

HEADERS: Final[Mapping[str, Schema]] = {
    "Idempotency-Key": {"type": "string"},
    "Last-Event-ID": {"type": "string", "pattern": r"^\d{0,18}$"},
}
REASONS: Final[Mapping[int, str]] = {
    400: "The request is not valid; `path` names the field.",
    401: "The token is missing or wrong.",
    403: "A web page of another origin sent this, or its `Host` is not served.",
    404: "Nothing has this id or name.",
    409: "The request conflicts with the current state, or its id or key is in use.",
    410: "It is in the journal and cannot be read: its row is damaged, or it cannot be written as JSON.",
    413: "The body is too large.",
    415: "The body's type is not JSON.",
    422: "The request is not valid: FastAPI's status for 400.",
    429: "No capacity now: retry after `Retry-After` seconds.",
    500: "A bug of polarnode, or what the message explains.",
    503: "Unavailable now.",
    507: "The journal's disk is full.",
}
_EVERY: Final = (400, 403, 500)
_PLACE: Final = re.compile(r"<(?:\w+:)?(\w+)>")  # of a name in a row's path


def document(rows: Iterable[Where], operations: Mapping[Where, Operation], *, token: bool) -> dict[str, Json]:
    """The document of these routes. `token` is whether the routes need one. Routes without an operation are
    left out.
    """
    asked, given = Schemas(strict=True, suffix="Request"), Schemas(strict=False, known=JSON_SCHEMAS)
    paths: dict[str, Any] = {}
    for where in filter(operations.__contains__, rows):
        method, path = where
        item = paths.setdefault(_braced(path), {})
        item[method.lower()] = _operation(where, operations[where], asked, given, token=token)
    schemes: Schema = {"token": {"type": "http", "scheme": "bearer"}} if token else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "polarnode",
            "version": version("polarnode"),
            "description": "The control plane of a node: described in docs/api.md.",
        },
        "paths": paths,
        "components": {"schemas": {**asked.named, **given.named}, "securitySchemes": schemes},
    }


def _operation(where: Where, op: Operation, asked: Schemas, given: Schemas, *, token: bool) -> Schema:
    method, path = where
    found: Schema = {
        "operationId": _name(method, path),
        "summary": op.summary,
        "tags": [op.tag],
        "parameters": [
            *_in_path(path),
            *(_in_query(name, PARAMETERS[name]) for name in op.query),
            *starmap(_in_query, op.own.items()),
            *map(_in_header, op.headers),
        ],
        "responses": _responses(op, given, token=token and not op.open),
    }
    if op.body is not None:
        found["requestBody"] = {
            "required": not op.optional_body,
            "content": {JSON: {"schema": asked.of(op.body)}},
        }
    if token and not op.open:
        found["security"] = [{"token": []}]
    return found


def _responses(op: Operation, given: Schemas, *, token: bool) -> Schema:
    shape: Schema = {"type": "string"} if op.answer is None else given.of(op.answer)
    links: Schema = {_name(*where): _link(place, where) for place, where in op.leads_to.items()}
    content: Schema = {each: {"schema": shape} for each in (op.content, *op.also)}
    found: Schema = {
        str(op.status): {"description": op.summary, "content": content, **({"links": links} if links else {})}
    }
    if op.again is not None:
        found[str(op.again)] = {"description": "The same answer as before.", "content": content}
    refusal: Schema = {JSON: {"schema": given.of(op.refusal)}}
    unread = [415] if op.body is not None else []
    for status in sorted({*_EVERY, *op.errors, *unread, *([401] if token else [])}):
        # /readyz has the same body in both
        body: Schema = {JSON: {"schema": shape}} if status == 503 and op.open else refusal
        found[str(status)] = {"description": REASONS[status], "content": body}
    return found


def _link(place: str, where: Where) -> Schema:
    return {"operationId": _name(*where), "parameters": {_in_braces(where[1])[0]: f"$response.body#{place}"}}


def _braced(path: str) -> str:
    return _PLACE.sub(r"{\1}", path)


def _in_braces(path: str) -> list[str]:
    return _PLACE.findall(path)


def _name(method: str, path: str) -> str:
    words = re.findall(r"[A-Za-z]\w*", _braced(path))
    return "_".join([method.lower(), *words])


def _in_path(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _in_braces(path)
    ]


def _in_query(name: str, parameter: Schema) -> Json:
    return {"name": name, "in": "query", "required": False, **parameter}


def _in_header(name: str) -> Json:
    return {"name": name, "in": "header", "required": False, "schema": HEADERS[name]}


# ── openapi ────────────────────────────────────────────────────────────

EVERY: Final[Mapping[Where, Operation]] = {**OPERATIONS, **ENGINE}

__all__ = ["EVERY", "Operation", "Where", "document"]
