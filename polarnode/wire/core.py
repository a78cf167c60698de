"""JSON in and out: bytes to values, values to attrs classes, and every refusal one sentence with the path of the field.

The rule for whoever edits it: only what the client did becomes `Refused`. A type we can not structure, or an error inside a hook, is our
bug and passes through as itself (a caught `Exception` here once blamed the client for a missing hook).
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import orjson
from cattrs import BaseValidationError, ForbiddenExtraKeysError
from cattrs.errors import ClassValidationError, IterableValidationError, IterableValidationNote

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.wire.shapes import Mismatch, make_converter

T = TypeVar("T")

# Two, because forbidding is a property of a converter: our own API refuses what it does not know, a provider's API ignores it as they do.
CONVERTERS = {forbid: make_converter(forbid_extra=forbid) for forbid in (False, True)}


def read_json(body: bytes) -> Json:
    """The JSON value in `body` (UTF-8). Refused, with line and column, when it is none; NaN and lone surrogates are no JSON."""
    if not body.strip():
        raise Refused("the body is empty: send a JSON value")
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Refused(f"the body is not JSON: {error.msg} ({where})") from None
    return value


def dump_json(value: Json) -> bytes:
    """`value` as compact UTF-8 JSON. A float that is not finite becomes null, as JSON has no word for it; half a surrogate pair, \ufffd."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(_without_surrogates(value))  # a harness's log may hold them, and must not make a trajectory unreadable


def _without_surrogates(value: Json) -> Json:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_without_surrogates(part) for part in value]
        case dict():
            return {str(_without_surrogates(key)): _without_surrogates(part) for key, part in value.items()}
    return value


def plain(value: Any) -> Any:
    """An attrs value as JSON: classes to objects, tuples to lists, everything else as it is. Not for classes that hold arrays."""
    if attrs.has(type(value)):
        return {field.alias: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return value


def structure(value: Json, cls: type[T], *, forbid_extra: bool = False) -> T:
    """`value` as a `cls` (an attrs class, or any type built of them). Refused with the first misfit's path.

    Strict: nothing is coerced but whole floats to int and int to float. A field is called by its attrs alias. Unions are chosen by JSON
    kind, then by a Literal field the classes share (`type`, `role`), then by the order they are written in. Unknown fields are ignored,
    or with `forbid_extra` refused naming the nearest known one.
    """
    converter = CONVERTERS[forbid_extra]
    hook = converter.get_structure_hook(cls)  # before the try: a shape we can not read is our bug
    try:
        found: T = hook(value, cls)
    except (BaseValidationError, Refused) as error:
        raise _refusal(error, "$") from None
    return found


# ── from what cattrs raised to one sentence ───────────────────────────────────


def subject(path: str) -> str:
    """How a sentence names a path: `$.a[0].b` is `a[0].b`, the root is `the body`."""
    return path.removeprefix("$").removeprefix(".") or "the body"


def _refusal(error: Exception, path: str) -> Refused:
    """The first leaf of the tree, told from its own path; a leaf that is not the client's fault is raised as it is."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        inner = _first(error)
        if isinstance(inner, KeyError):
            return _missing(inner, path)
        return _refusal(inner, path + _step(inner, error.cl))
    if isinstance(error, ForbiddenExtraKeysError):
        return _unknown(error, path)
    if isinstance(error, Mismatch):
        return Refused(f"{subject(path)} {error}", path=path)
    if isinstance(error, Refused):
        return Refused(str(error), path=path + (error.path or "$")[1:])
    raise error


def _first(group: BaseValidationError) -> Exception:
    # An unknown field goes first: it is most often the misspelling that explains the field that is missing.
    found: Exception = min(group.exceptions, key=lambda error: not isinstance(error, ForbiddenExtraKeysError))
    return found


def _step(error: Exception, cls: Any) -> str:
    """The path from a container to the part that failed; empty when the container itself did."""
    for note in reversed(getattr(error, "__notes__", [])):  # the innermost container noted last
        if isinstance(note, IterableValidationNote):
            return child("", note.index)
        if hasattr(note, "name"):
            return child("", _alias(cls, note.name))
    return ""


def child(path: str, key: int | str) -> str:
    """The path of a part: `.name`, `[0]`, or `['odd name']`."""
    if isinstance(key, str) and re.fullmatch(r"[A-Za-z_][\w-]*", key):
        return f"{path}.{key}"
    return f"{path}[{key!r}]"


def _alias(cls: Any, name: str) -> str:
    field = attrs.fields_dict(cls).get(name) if attrs.has(cls) else None
    return name if field is None else str(field.alias)


def _missing(error: KeyError, path: str) -> Refused:
    where = child(path, str(error.args[0]))
    return Refused(f"{subject(where)} is missing: it is required", path=where)


def _unknown(error: ForbiddenExtraKeysError, path: str) -> Refused:
    name = min(error.extra_fields)
    known = [field.alias for field in attrs.fields(error.cl) if field.init]
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"remove it (known are {', '.join(known)})"
    where = child(path, name)
    return Refused(f"{subject(where)} is not a known field: {remedy}", path=where)
