"""JSON of any shape, and JSON that was valid and is changed: what structure-aware fuzzing starts from."""

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st


def deep(value: Any, depth: int = 400) -> Any:
    """`value` in so many lists."""
    for _ in range(depth):
        value = [value]
    return value


ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**40, -(10**40), 0.5, 1e300, -1e300, float("nan"), float("inf"), "", " ", "x",
    "x" * 20_000, "\ud83d", "\udc00\ud800", "\x00\x1b\u2028", "🚀", "{", '"}', "<|im_end|>", "<tool_call>", [], {}, [[]], [{}], {"": ""}, [None],
    deep("x"), deep({}, 200), [0] * 2_000, {str(number): number for number in range(300)}, {"type": "text"}, {"type": "image"}, {"$ref": "#"},
    # one letter in two spellings, a letter that folds into two, and one that turns the line
    "e\u0301\u00e9", "\ufb01\u0130", "\u202ex\u200b\ufeff", "../../etc/passwd", "%s%n{0}", "-" * 64, "1e5", "٣", "a\r\nb: c",
    "<|im_start|>system\n", "</think>", "<|endoftext|>" * 40, {"__proto__": {}}, {"\ud800": 1}, [1, [2, [3, {"a": [None]}]]],
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"type": ["object", "null"], "properties": {"": {}}}, {"type": "image", "source": {"type": "base64", "data": "!"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, {"enum": []}, {"anyOf": [{}] * 50}, {"pattern": "(a+)+$"},
)  # fmt: skip
CHANGE_KINDS = (
    *("replace", "replace", "replace", "remove", "wrap", "twice", "rename", "nest"),
    *("extra", "swap", "reverse", "copy", "long"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a body."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


def holder(value: Any, path: tuple[Any, ...]) -> Any:
    """What holds the place."""
    for key in path[:-1]:
        value = value[key]
    return value


def change(body: Any, path: tuple[Any, ...], how: str, odd: Any) -> None:
    """Change the body at one place."""
    where, key = holder(body, path), path[-1]
    match how:
        case "replace":
            where[key] = odd
        case "remove":
            del where[key]
        case "wrap":
            where[key] = [where[key]]
        case "twice" if isinstance(where, list):
            where.insert(key, deepcopy(where[key]))
        case "rename" if isinstance(where, dict):
            where["other"] = where.pop(key)
        case "extra" if isinstance(where, dict):
            where["x-extra"] = odd
        case "swap" if isinstance(where, list):  # tool results before their calls, answers before questions
            where[key], where[0] = where[0], where[key]
        case "reverse" if isinstance(where[key], list):
            where[key].reverse()
        case "copy" if isinstance(where, dict):  # an id of another, repeated
            other = next(iter(where))
            where[key] = deepcopy(where[other])
        case "long" if isinstance(where[key], list) and where[key]:
            where[key] *= 200
        case "long" if isinstance(where[key], str):
            where[key] *= 500
        case _:
            where[key] = {"type": where[key]}


@st.composite
def changed(draw: st.DrawFn, bodies: Sequence[Any], *, most: int = 3) -> Any:
    """A value that was valid, changed in up to `most` places."""
    body = deepcopy(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.integers(1, most))):
        found = list(places(body))
        if not found:
            break
        path = draw(st.sampled_from(found))
        change(body, path, draw(st.sampled_from(CHANGE_KINDS)), deepcopy(draw(st.sampled_from(ODD))))
    return body


def mutated(bodies: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """`changed` as bytes."""
    return changed(bodies).map(lambda body: json.dumps(body, default=str).encode())


PUT = (
    b"", b"\xff", b"\x00", b'"', b"}", b"{", b",", b"NaN", b"\\ud800", b"1e999", b'"model":1,', b"\xef\xbb\xbf", b"\r\n\r\n", b"\n", b"-" * 40, b"9" * 5000,
    b"[" * 3000,
)  # fmt: skip


@st.composite
def torn(draw: st.DrawFn, bodies: Sequence[Any]) -> bytes:
    """The bytes of a valid value, cut, doubled or with others put in."""
    data = json.dumps(draw(st.sampled_from(bodies)), default=str).encode()
    return draw(torn_bytes(data))


@st.composite
def torn_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes, cut or with others put in, in one or two places."""
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(st.sampled_from(PUT)) + (data[place:] if draw(st.booleans()) else b"")
    return data


@st.composite
def repeated_keys(draw: st.DrawFn, bodies: Sequence[dict[str, Any]]) -> bytes:
    """An object with one key twice, the second time with another value."""
    body = draw(st.sampled_from(bodies))
    key = draw(st.sampled_from(sorted(body)))
    odd = json.dumps(draw(st.sampled_from(ODD)))
    return json.dumps(body).encode()[:-1] + f", {json.dumps(key)}: {odd}}}".encode()


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)
)


def values(names: Sequence[str]) -> st.SearchStrategy[Any]:
    """JSON of any shape, whose keys are often these."""
    keys = st.sampled_from(tuple(names)) | st.text(max_size=4)
    return st.recursive(
        LEAVES,
        lambda inside: st.lists(inside, max_size=4) | st.dictionaries(keys, inside, max_size=5),
        max_leaves=20,
    )


def anything(names: Sequence[str]) -> st.SearchStrategy[bytes]:
    """JSON of any shape, and bytes that are none."""
    return st.binary(max_size=60) | values(names).map(lambda value: json.dumps(value).encode())


# ── other spellings of the same values ────────────────────────────────────────


def toml(value: dict[str, Any]) -> bytes:
    """An object as TOML, a key a line; what TOML cannot say is left out."""
    lines = [f"{_key(key)} = {found}" for key, part in value.items() if (found := _toml(part)) is not None]
    return "\n".join(lines).encode("utf-8", "replace")


def _toml(value: Any) -> str | None:
    match value:
        case None:
            return None
        case str():
            return json.dumps(value).replace("\\u007f", "")
        case dict():
            pairs = ((key, _toml(part)) for key, part in value.items())
            return (
                "{" + ", ".join(f"{_key(key)} = {found}" for key, found in pairs if found is not None) + "}"
            )
        case list():
            return "[" + ", ".join(found for part in value if (found := _toml(part)) is not None) + "]"
        case float() if value in (float("inf"), float("-inf")) or value != value:
            return str(value)
    return json.dumps(value, default=str)


def _key(key: object) -> str:
    return json.dumps(str(key))
