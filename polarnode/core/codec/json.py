"""JSON in and out: bytes to values, values to attrs classes, and each refusal as one sentence with the path
of the field.

Reading is strict: "5" is not a number and 5 is not a text, because a wrong guess would train on wrong data. A
hook returns the value or raises `ValueMismatch` with a predicate ("must be a string, not a number");
`structure` adds the path. Only a client's mistake becomes `Refused`: a type that cannot be structured, or
any other error in a hook, is a bug and is raised unchanged.
"""

import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from operator import eq
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
import orjson
from attrs import define, field, frozen
from cattrs import BaseValidationError, Converter, ForbiddenExtraKeysError
from cattrs.errors import ClassValidationError, IterableValidationError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, override

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.spelling import nearest

# ── kinds ────────────────────────────────────────────────────────────

Hook = Callable[[Any, Any], Any]

KIND_WORDS = {
    "boolean": "a boolean",
    "number": "a number",
    "string": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def _generic_origin(shape: Any) -> Any:
    """`get_origin`, whose stub says ParamSpec for special forms."""
    return get_origin(shape)


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


NAME_CHARS = 80  # characters of a client's text that a refusal shows; a name may be as long as its body


class ValueMismatch(Refused):
    """A value that does not fit. The text is a predicate without its subject."""


def kind_of(value: object) -> str:
    """The JSON kind of a value that a JSON reader returned."""
    kind = _KINDS.get(type(value))
    if kind is not None:
        return kind
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    raise TypeError(f"not a JSON value: {type(value).__name__}")


def misfit(expected: str, value: object) -> ValueMismatch:
    return ValueMismatch(f"must be {expected}, not {KIND_WORDS[kind_of(value)]}")


# ── one hook a kind ───────────────────────────────────────────────────────────


def _string(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise misfit("a string", value)
    return value


def _read_boolean(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise misfit("true or false", value)
    return value


def _whole(value: Any, _: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JavaScript has one kind of number, and writes 1e3 for 1000
    if isinstance(value, float):
        raise ValueMismatch(f"must be a whole number, not {value}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise misfit("a whole number", value)
    if not -(2**63) <= value < 2**63:  # journals and engines hold 64 bits
        raise ValueMismatch("must be a whole number of at most 64 bits")
    return value


def _number(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise misfit("a number", value)
    try:
        return float(value)
    except OverflowError:  # TOML and YAML allow an integer of hundreds of digits
        raise ValueMismatch("must be a number of at most 64 bits") from None


def _nothing(value: Any, _: Any) -> None:
    if value is not None:
        raise misfit("null", value)


def _read_anything(value: Any, _: Any) -> Any:
    return value


def _literal_hook(shape: Any) -> Hook:
    options = get_args(shape)

    def structure_literal(value: Any, _: Any) -> Any:
        for option in options:
            if type(option) is type(value) and option == value:
                return option
        shown = (
            f"{value!r:.{NAME_CHARS}}" if isinstance(value, str | int | float) else KIND_WORDS[kind_of(value)]
        )
        raise ValueMismatch(f"must be {_listed(options)}, not {shown}")

    return structure_literal


def _listed(options: Sequence[object]) -> str:
    return (
        repr(options[0]) if len(options) == 1 else "one of " + ", ".join(repr(option) for option in options)
    )


# ── containers ────────────────────────────────────────────────────────────────


def _sequence_hook(shape: Any, converter: Converter) -> Hook:
    inner = get_args(shape)[0]
    hook = converter.get_structure_hook(inner)
    make: Callable[[list[Any]], Any] = tuple if _generic_origin(shape) is tuple else list

    def structure_sequence(value: Any, _: Any) -> Any:
        if not isinstance(value, list):
            raise misfit("a list", value)
        if hook is _read_anything:
            return make(value)
        return make(_each(enumerate(value), hook, inner, shape))

    return structure_sequence


def _mapping_hook(shape: Any, converter: Converter) -> Hook:
    inner = get_args(shape)[1]
    hook = converter.get_structure_hook(inner)

    def structure_mapping(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise misfit("an object", value)
        if hook is _read_anything:
            return dict(value)
        return dict(zip(value, _each(value.items(), hook, inner, shape), strict=True))

    return structure_mapping


@frozen
class AlreadyRead:
    """A part of a list that was read before, in its place: it is taken as it is."""

    value: Any


def _each(items: Any, hook: Hook, inner: Any, shape: Any) -> list[Any]:
    found = []
    for index, item in items:
        if type(item) is AlreadyRead:
            found.append(item.value)
            continue
        try:
            found.append(hook(item, inner))
        except (BaseValidationError, Refused) as error:
            error.add_note(IterableValidationNote("item", index, inner))
            raise IterableValidationError("items", [error], shape) from None
    return found


def shorthand_of(cls: Any) -> tuple[str, type] | None:
    """The field that a text or a list in place of the object stands for, by its metadata, and which of the
    two: "pi" for {"name": "pi"}.
    """
    found = ((each.name, each.metadata.get("shorthand")) for each in attrs.fields(cls))
    return next(((name, kind) for name, kind in found if kind is not None), None)


def class_hook(cls: Any, converter: Converter, hooks: Mapping[str, Hook] | None = None) -> Hook:
    """A hook that reads an attrs class by its fields' JSON keys. `hooks` read the fields that they name."""
    keys = {each.name: json_key_of(each) for each in attrs.fields(cls)}
    overrides = {
        name: override(rename=key, omit=key is None or None, struct_hook=(hooks or {}).get(name))
        for name, key in keys.items()
    }
    hook = make_dict_structure_fn(cls, converter, **overrides)  # type: ignore[arg-type]
    groups = tuple(dict.fromkeys(key.partition(".")[0] for key in keys.values() if key and "." in key))
    name, short = shorthand_of(cls) or ("", None)
    shorter = "" if short is None else f"a list of {name} or " if short is list else f"a {name} or "

    def structure_class(value: Any, shape: Any) -> Any:
        if short is not None and isinstance(value, short):
            value = {name: value}
        if not isinstance(value, dict):
            raise misfit(f"{shorter}an object", value)
        return hook(_flatten_groups(value, groups) if groups else value, shape)

    return structure_class


def _flatten_groups(value: dict[str, Any], groups: tuple[str, ...]) -> dict[str, Any]:
    """Flatten the objects `groups`: their fields stand beside the others, under dotted keys."""
    flat = dict(value)
    for group in groups:
        if group in value:
            parts = value[group]
            if not isinstance(parts, dict):
                raise Refused(f"{group} {misfit('an object', parts)}", path=f"$.{group}")
            for key, part in parts.items():
                flat[f"{group}.{key}"] = part
    return flat


# ── unions: the JSON kind chooses, then a tag, then the order they are written in ──


def _kinds(shape: Any) -> frozenset[str]:
    if _generic_origin(shape) is Literal:
        return frozenset(kind_of(option) for option in get_args(shape))
    simple = {
        type(None): "null",
        None: "null",
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
    }
    if shape in simple:
        return frozenset({simple[shape]})
    if shape is bytes or _generic_origin(shape) is Annotated:  # packed numbers are a list or base64
        return frozenset({"array", "string"})
    return frozenset({"array" if _is_sequence(shape) else "object"})


def _union_hook(shape: Any, converter: Converter) -> Hook:
    members = [(member, _kinds(member), converter.get_structure_hook(member)) for member in get_args(shape)]
    classes = [member for member in get_args(shape) if attrs.has(member)]
    tags = _shared_tag(classes)
    expected = " or ".join(
        KIND_WORDS[kind] for kind in KIND_WORDS if any(kind in kinds for _, kinds, _ in members)
    )

    fits = {kind: [(member, hook) for member, kinds, hook in members if kind in kinds] for kind in KIND_WORDS}

    def structure_union(value: Any, _: Any) -> Any:
        kind = kind_of(value)
        fitting = fits[kind]
        if not fitting:
            raise misfit(expected, value)
        if kind == "object" and tags is not None:
            chosen = class_by_tag(value, *tags)
            return converter.get_structure_hook(chosen)(value, chosen)
        if len(fitting) == 1:
            member, hook = fitting[0]
            return hook(value, member)
        return _first_fit(value, fitting)

    return structure_union


def _first_fit(value: Any, fitting: Sequence[tuple[Any, Hook]]) -> Any:
    for member, hook in fitting[:-1]:
        try:
            return hook(value, member)
        except (BaseValidationError, Refused):
            continue
    member, hook = fitting[-1]
    return hook(value, member)


def _shared_tag(classes: Sequence[Any]) -> tuple[str, dict[str, Any]] | None:
    """The Literal field that all classes share (`type`, `role` …), and the class of each of its values."""
    if len(classes) < 2:
        return None
    shared = [
        {a.alias: get_args(a.type) for a in attrs.fields(cls) if _generic_origin(a.type) is Literal}
        for cls in classes
    ]
    for tag in shared[0]:
        if all(tag in literals for literals in shared):
            return tag, {
                option: cls for cls, literals in zip(classes, shared, strict=True) for option in literals[tag]
            }
    return None


def class_by_tag(value: dict[str, Any], tag: str, classes: Mapping[str, Any]) -> Any:
    """The class that the field `tag` of an object names. Raises Mismatch when it names none."""
    name = value.get(tag)
    if isinstance(name, str) and name in classes:
        return classes[name]
    options = _listed(sorted(classes))
    raise ValueMismatch(
        f"needs {tag!r}: {options}"
        if name is None
        else f"has an unknown {tag!r}: it must be {options}, not {name!r:.{NAME_CHARS}}"
    )


# ── which hook for which type ─────────────────────────────────────────────────


def _is_union(shape: Any) -> bool:
    return _generic_origin(shape) in (Union, types.UnionType)


def _is_sequence(shape: Any) -> bool:
    origin = _generic_origin(shape)
    inner = get_args(shape)
    return origin in (list, Sequence) or (origin is tuple and inner[1:] == (...,))


def _is_mapping(shape: Any) -> bool:
    return _generic_origin(shape) in (dict, Mapping)


def _is_anything(shape: Any) -> bool:
    anything: list[Any] = [object, Any, Json]
    return shape in anything


def make_converter(*, forbid_extra: bool, hooks: Mapping[Any, Hook] | None = None) -> Converter:
    """A converter for JSON from outside. `hooks` read the types that they name.

    Later rules take precedence, so general rules come first.
    """
    converter = Converter(forbid_extra_keys=forbid_extra, detailed_validation=True, use_alias=True)
    for shape, hook in (
        (str, _string),
        (bool, _read_boolean),
        (int, _whole),
        (float, _number),
        (type(None), _nothing),
    ):
        converter.register_structure_hook(shape, hook)
    converter.register_structure_hook_factory(attrs.has, lambda shape: class_hook(shape, converter))
    converter.register_structure_hook_factory(lambda shape: _generic_origin(shape) is Literal, _literal_hook)
    converter.register_structure_hook_factory(_is_sequence, lambda shape: _sequence_hook(shape, converter))
    converter.register_structure_hook_factory(_is_mapping, lambda shape: _mapping_hook(shape, converter))
    converter.register_structure_hook_factory(_is_union, lambda shape: _union_hook(shape, converter))
    converter.register_structure_hook_func(_is_anything, _read_anything)
    own: Mapping[Any, Hook] = hooks or {}
    for kind, reader in own.items():
        if isinstance(kind, type):
            converter.register_structure_hook(kind, reader)
        else:
            converter.register_structure_hook_func(partial(eq, kind), reader)
    return converter


# ── reading and writing ────────────────────────────────────────────────────────────

T = TypeVar("T")

# Two, because forbidding is a property of a converter: the node's own API refuses unknown fields, a
# provider's API ignores them, as the provider does.
JSON_CONVERTERS = {forbid: make_converter(forbid_extra=forbid) for forbid in (False, True)}


def read_json(body: bytes) -> Json:
    """Parse `body` (UTF-8) as JSON. Raises Refused, with line and column, for invalid JSON, including NaN and
    lone surrogates.
    """
    if not body.strip():
        raise Refused("the body is empty: send a JSON value")
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Refused(f"the body is not JSON: {error.msg} ({where})") from None
    return value


def dump_json(value: Json) -> bytes:
    """Write `value` as compact UTF-8 JSON. A non-finite float becomes null, because JSON has no form for it;
    a lone surrogate becomes �, an integer beyond 64 bits the string of its digits, a key the string of it,
    and what is nested deeper than WRITTEN levels the text TOO_DEEP.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # A harness's log may contain such values, and must not make a trajectory unreadable.
        return orjson.dumps(_writable(value, WRITTEN))


# orjson writes 254 levels. Values are bounded far below that where they enter (`limits.DEPTH`), but older
# journals may hold deeper ones.
WRITTEN = 240
TOO_DEEP = "nested too deeply to be written"
MAX_DECIMAL_BITS = 14_000  # Python refuses to write an integer of more than 4300 digits.


def _writable(value: Json, levels: int) -> Json:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list() | dict() if not levels:
            return TOO_DEEP
        case list():
            return [_writable(part, levels - 1) for part in value]
        case dict():
            return {str(_writable(key, levels)): _writable(part, levels - 1) for key, part in value.items()}
        case int() if not -(2**63) <= value < 2**64:
            return str(value) if value.bit_length() < MAX_DECIMAL_BITS else hex(value)
    return value


def json_key_of(each: "attrs.Attribute[Any]") -> str | None:
    """The key of a field in JSON, as `json_key` sets it; its alias by default."""
    key: str | None = each.metadata.get("json", each.alias)
    return key


# Fields in the order in which they are written: the name of each, the object it is in ("" for the class's
# own) and its key there.
Layout = tuple[tuple[str, str, str], ...]


def layout(cls: Any, *, first: Sequence[str] = (), without: Collection[str] = ()) -> Layout:
    """The order of a class's fields: those in `first`, then the others except `without`."""
    fields = attrs.fields_dict(cls)
    keys = [
        (name, json_key_of(fields[name]))
        for name in (*first, *fields)
        if name in first or name not in without
    ]
    return tuple((name, *key.rpartition(".")[::2]) for name, key in dict(keys).items() if key is not None)


_whole_layout: Callable[[Any], Layout] = cache(layout)


@define(eq=False)
class JsonWriter:
    """Writes values as JSON: attrs classes as objects, tuples as lists, other values unchanged.

    `special` writes values of the types that it names, by exact type.
    """

    special: Mapping[type, Callable[[Any], Json]] = field(factory=dict)

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN_TYPES:
            return value
        if (special := self.special.get(kind)) is not None:
            return special(value)
        if isinstance(value, tuple | list):
            return [self(part) for part in value]
        if isinstance(value, Mapping):
            return {key: self(part) for key, part in value.items()}
        return self.fields(value) if attrs.has(kind) else value

    def fields(self, value: Any, fields: Layout | None = None) -> dict[str, Any]:
        """Write an attrs value as an object; `fields` chooses and orders what is written."""
        found: dict[str, Any] = {}
        for name, group, key in _whole_layout(type(value)) if fields is None else fields:
            part = getattr(value, name)
            if type(part) not in _PLAIN_TYPES:
                part = self(part)
            if group:
                found.setdefault(group, {})[key] = part
            else:
                found[key] = part
        return found


_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
plain = JsonWriter()  # for values without arrays


def structure(
    value: Json, cls: type[T], *, forbid_extra: bool = False, converter: Converter | None = None
) -> T:
    """Read `value` as a `cls` (an attrs class, or a type built of them). Raises Refused with the path of the
    first misfit.

    Strict: the only coercions are whole floats to int and int to float. A field is read by its attrs alias.
    Unions are resolved by JSON kind, then by a Literal field that the classes share (`type`, `role`), then by
    the order in which they are written. Unknown fields are ignored; with `forbid_extra` they are refused, and
    the message names the nearest known field. `converter` reads types without a JSON form of their own.
    """
    converter = converter or JSON_CONVERTERS[forbid_extra]
    # This is before the try, because a shape that cannot be read is a bug of the caller.
    hook = converter.get_structure_hook(cls)
    try:
        found: T = hook(value, cls)
    except (BaseValidationError, Refused) as error:
        raise _refusal(error, "$") from None
    return found


# ── from what cattrs raised to one sentence ───────────────────────────────────


def subject(path: str) -> str:
    """A path as the subject of a sentence: `$.a[0].b` becomes `a[0].b`, the root becomes `the body`."""
    return path.removeprefix("$").removeprefix(".") or "the body"


def _refusal(error: Exception, path: str) -> Refused:
    """The first leaf of the error tree, with its path. A leaf that is not the client's fault is raised
    unchanged.
    """
    if isinstance(error, ClassValidationError | IterableValidationError):
        inner = _first(error)
        if isinstance(inner, KeyError):
            return _missing(inner, path)
        return _refusal(inner, path + _step(inner, error.cl))
    if isinstance(error, ForbiddenExtraKeysError):
        return _unknown(error, path)
    if isinstance(error, ValueMismatch):
        return Refused(f"{subject(path)} {error}", path=path)
    if isinstance(error, Refused):
        return Refused(str(error), path=path + (error.path or "$")[1:])
    raise error


def _first(group: BaseValidationError) -> Exception:
    # An unknown field goes first: it is most often the misspelling that explains the field that is missing.
    found: Exception = min(group.exceptions, key=lambda error: not isinstance(error, ForbiddenExtraKeysError))
    return found


def _step(error: Exception, cls: Any) -> str:
    """The path from a container to the part that failed; empty when the container itself failed."""
    for note in reversed(getattr(error, "__notes__", [])):  # the innermost container added the last note
        if isinstance(note, IterableValidationNote):
            return child("", note.index)
        if hasattr(note, "name"):
            return _key_path(_key(cls, note.name))
    return ""


def _key_path(key: str) -> str:
    """The path of a key set by `json_key`, which may be in an object of its own."""
    return "".join(child("", part) for part in key.split("."))


def child(path: str, key: int | str) -> str:
    """Append a part to a path: `.name`, `[0]`, or `['odd name']`."""
    if isinstance(key, str) and len(key) <= NAME_CHARS and re.fullmatch(r"[A-Za-z_][\w-]*", key):
        return f"{path}.{key}"
    return f"{path}[{key!r:.{NAME_CHARS}}]"


def _key(cls: Any, name: str) -> str:
    found = attrs.fields_dict(cls).get(name) if attrs.has(cls) else None
    return name if found is None else json_key_of(found) or name


def _missing(error: KeyError, path: str) -> Refused:
    where = path + _key_path(str(error.args[0]))
    return Refused(f"{subject(where)} is missing: it is required", path=where)


def _unknown(error: ForbiddenExtraKeysError, path: str) -> Refused:
    name = min(error.extra_fields)
    known = [str(json_key_of(each)) for each in attrs.fields(error.cl) if each.init]
    near = nearest(name, known)
    remedy = f"did you mean {near}?" if near else f"remove it (known are {', '.join(known)})"
    where = child(path, name)
    return Refused(f"{subject(where)} is not a known field: {remedy}", path=where)
