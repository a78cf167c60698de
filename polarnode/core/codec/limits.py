"""Limits of what enters: depth and size of free JSON, numbers, and addresses, each with its reason.

A value that passes can be written wherever it may stand later: in an event, a trajectory, an export, a task.
Pure, and without recursion, because the value may be built to break a reader. Use `value_fault` where a task,
an evaluator or a capture brings a value of its own; `exceeds_depth` where only the depth matters.
"""

import ipaddress
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from attrs import frozen

from polarnode.core.codec.json import child, subject
from polarnode.core.errors import Refused

# ── numbers ───────────────────────────────────────────────────────────────────

COUNT: Final = 2**31 - 1  # counts and ranks have 32 bits in the engine; a larger one crashes it
# The engine divides logits by the repetition penalty in float32. At a hundredth they stay under 1e5 and their
# softmax is exact; a smaller penalty makes logprobs that are not numbers.
REPETITION_RANGE: Final[tuple[float, float]] = (0.01, 2)
SEED: Final = 2**63 - 1025  # 64 bits in the engine, with room for one more seed of each choice
STOPS: Final = 64  # each is searched for in every chunk of an answer; OpenAI allows four, Google sixteen
# In characters. So much of an answer is held back from its stream while it may become a stop string.
MAX_STOP_CHARS: Final = 1000
SECONDS: Final = 30 * 86_400.0  # 30 days: longer than any session, and every clock here can add it up
CPUS: Final = (0.01, 4096.0)  # the kernel's smallest share is 1 ms of each 100; no machine has more CPUs
MAX_MEBIBYTES: Final = 16 << 20  # 16 TiB of memory or disk: no machine gives one session more
PIDS: Final = 1 << 22  # Linux's PID_MAX_LIMIT
# Trainers hold rewards as 32-bit floats, and an advantage squares them: beyond 1.8e19 the square is infinite.
REWARD: Final = 1e18
REASON_CHARS: Final = 8000  # The reason that ends a capture may be as long as the ends of four logs.

# ── values ────────────────────────────────────────────────────────────────────

# Lists and objects inside each other. orjson writes 254, an event nests a value some ten deeper, and real
# values have about ten.
DEPTH: Final = 100
MAX_BODY_DEPTH: Final = DEPTH + 10  # a body's fields that hold a free value are a few levels deep


@frozen(kw_only=True)
class ValueLimits:
    """How deep and how large one value may be: `size` in bytes of JSON, `count` of values inside it."""

    # Metadata and metrics are in every event of a session, and 4096 sessions of a task may have them.
    size: int = 1 << 20
    # A walk over so many values takes a tenth of a second of the event loop.
    count: int = 100_000
    depth: int = DEPTH


FREE: Final = ValueLimits()  # for metadata, metrics and settings
# An evaluator's config carries the files of its tests, so it may be as large as a request that the control
# plane takes.
CONFIG: Final = ValueLimits(size=64 << 20)

SIZE_REMEDY: Final = "put large data into a file of the runtime or its image"

# Values of a whole body: ten times what a free value may have. Parsing and checking so many holds the event
# loop for half a second; the 20 million that fit into 64 MiB took 2 GB, and all sessions waited for 30 s.
MAX_BODY_VALUES: Final = 1_000_000
# A text of JSON, or the rest of the body where it has no end.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_MARKS: Final = (b",", b"[", b"{")  # each value has at least one of these before it, outside of texts


def exceeds_values(body: bytes, most: int = MAX_BODY_VALUES) -> bool:
    """Whether a body of JSON has more than `most` values, found before it is parsed. Free for a small one."""
    # This also counts the marks in texts, of which files of tests have many.
    if sum(map(body.count, _MARKS)) <= most:
        return False
    count = end = 0
    for text in _TEXT.finditer(body):
        count += sum(body.count(mark, end, text.start()) for mark in _MARKS)
        end = text.end()
        if count > most:
            return True
    return count + sum(body.count(mark, end) for mark in _MARKS) > most


def exceeds_depth(value: object, limit: int = DEPTH) -> bool:
    """Whether more than `limit` lists and objects are inside each other. `value` is what a JSON reader
    returned: 60 ns for each list and object, whatever its shape.
    """
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            part
            for each in level
            for part in (each.values() if isinstance(each, dict) else each)
            if isinstance(part, dict | list)
        ]
    return bool(level)


# A value, how many lists and objects it is in, and its path: the path of what holds it, and its key there.
Path = tuple["Path | None", str | int]
Found = tuple[Any, int, Path | None]


def value_fault(value: object, path: str, limits: ValueLimits = FREE) -> Refused | None:
    """Why a free JSON value cannot be kept, with the path of the part at fault; None when it can.

    Equal parts count each time that they occur, so a YAML document whose parts refer to each other is
    measured as it would be written.
    """
    size, count = 0, 0
    waiting: list[Found] = [(value, 0, None)]
    while waiting:
        part, depth, where = waiting.pop()
        reason = _part_fault(part)
        if reason is None and depth == limits.depth and isinstance(part, dict | list):
            reason = f"is nested more than {limits.depth} levels deep: flatten it, or write it as a string"
        if reason is not None:
            place = path + _written(where)
            return Refused(f"{subject(place)} {reason}", path=place)
        size += _size(part)
        count += 1
        if size > limits.size or count + len(waiting) > limits.count:
            return _too_large(path, limits, size)
        if isinstance(part, dict):
            waiting += ((each, depth + 1, (where, key)) for key, each in part.items())
        elif isinstance(part, list):
            if count + len(waiting) + len(part) > limits.count:
                return _too_large(path, limits, size)
            waiting += ((each, depth + 1, (where, index)) for index, each in enumerate(part))
    return None


def _too_large(path: str, limits: ValueLimits, size: int) -> Refused:
    many = f"has more than {limits.count:,} values" if size <= limits.size else ""
    large = many or f"is larger than {limits.size >> 20} MiB as JSON"
    return Refused(f"{subject(path)} {large}: {SIZE_REMEDY}", path=path)


def _part_fault(part: object) -> str | None:
    """Why one part, without what is inside it, is no JSON; a predicate."""
    match part:
        case None | bool() | list():
            return None
        case str():
            return (
                None if _is_unicode(part) else "is no valid Unicode (half of a surrogate pair): replace that"
            )
        case int():
            fits = -(2**63) <= part < 2**64
            return None if fits else "is a whole number beyond 64 bits: write it as a string"
        case float():
            return (
                None if isfinite(part) else f"is {part}, which JSON has no form for: write null or a string"
            )
        case dict():
            return _key_fault(part)
    return f"is a value of type {type(part).__name__}, which JSON has no form for: write it as a string"


def _key_fault(keys: Iterable[object]) -> str | None:
    for key in keys:
        if not isinstance(key, str):
            return f"has the key {key!r:.80}, which is no string: quote it"
        if not _is_unicode(key):
            return "has a key that is no valid Unicode (half of a surrogate pair): replace that"
    return None


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _size(part: object) -> int:
    """About the bytes of JSON of one part, without what is inside it; at least those of a number."""
    match part:
        case str():
            return len(part.encode()) + 3
        case dict():
            return 2 + sum(len(key.encode()) + 3 for key in part)
    return 2


SHOWN: Final = 4  # steps of a path that a sentence shows: enough to find the part, however deep it is


def _written(where: Path | None) -> str:
    steps: list[str | int] = []
    while where is not None:
        where, key = where
        steps.append(key)
    written = ""
    for key in steps[: -SHOWN - 1 : -1]:
        written = child(written, key)
    return written


def check_nesting(value: object) -> None:
    """Raise Refused, with the path of the part, for a body with more than MAX_BODY_DEPTH lists and objects
    inside each other. What reads the body further may then be recursive.
    """
    if exceeds_depth(value, MAX_BODY_DEPTH):
        fault = value_fault(
            value, "$", ValueLimits(size=sys.maxsize, count=sys.maxsize, depth=MAX_BODY_DEPTH)
        )
        raise fault or Refused(
            f"the body is nested more than {MAX_BODY_DEPTH} levels deep: flatten it", path="$"
        )


def check_body_size(body: bytes) -> None:
    """Raise Refused for a body with more values than may be parsed at once."""
    if exceeds_values(body):
        raise Refused(f"the body has more than {MAX_BODY_VALUES:,} values: {SIZE_REMEDY}", path="$")


def check_value(value: object, path: str, limits: ValueLimits = FREE) -> None:
    """Raise the Refused of `value_fault`."""
    fault = value_fault(value, path, limits)
    if fault is not None:
        raise fault


# ── addresses ─────────────────────────────────────────────────────────────────

MAX_URL_CHARS: Final = 2048  # longer URLs do not get through proxies either
URL_CHARS_PATTERN: Final = re.compile(r"[\x21-\x7e]+")
HEADER: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
# This is a DNS name, which has at most 253 characters and may end in a dot, or an IPv4 address.
HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_.])?")


def url_fault(text: str) -> str | None:
    """Why a text is not the address of an HTTP server, as a predicate; None when it is."""
    if len(text) > MAX_URL_CHARS:
        return f"must be at most {MAX_URL_CHARS} characters long, not {len(text)}"
    if not URL_CHARS_PATTERN.fullmatch(text) or "\\" in text:
        return (
            "has a space, a control character, a backslash or a letter outside ASCII: write it as %20 and the"
            " like, and a host's name as xn--..."
        )
    url = address(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        return "must be an http or https address with a host"
    if "@" in url.netloc:
        return "must be an http or https address without a name or password in it"
    if not _host_fits(url):
        return (
            "has a host that is no name and no address: write it in letters, digits, '.', '-' and '_', with"
            " nothing encoded, and an IPv6 address in brackets"
        )
    if not _port_fits(url):
        return "has no port from 1 to 65535 after its host"
    return None


def _host_fits(url: SplitResult) -> bool:
    """Whether the host is spelled as every program reads it: what one decodes and another does not leads each
    somewhere else.
    """
    host = str(url.hostname)
    if "[" in url.netloc:
        try:
            return ipaddress.IPv6Address(host).scope_id is None
        except ValueError:
            return False
    return HOST.fullmatch(host) is not None


def _port_fits(url: SplitResult) -> bool:
    try:
        return url.port is None or url.port > 0
    except ValueError:
        return False


def address(text: str) -> SplitResult:
    """The parts of an address; all empty when it is not one."""
    try:
        return urlsplit(text)
    except ValueError:  # the brackets do not match
        return urlsplit("")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ── labels ────────────────────────────────────────────────────────────


MAX_LABELS: Final = 32  # a node sends its labels in each of its reports, one every 2 s
LABEL_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")  # as in Kubernetes, prefix included
NAMED: Final = "needs a name of 1 to 63 letters, digits, '.', '_', '/' or '-', beginning with no sign"
LABEL_VALUE_PATTERN: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,256}")  # a model's name must fit too


def label_faults(labels: Mapping[str, str], path: str) -> Iterator[tuple[str, str]]:
    """What is wrong with labels: the place of each fault below `path`, and a predicate for it."""
    if len(labels) > MAX_LABELS:
        yield path, f"must be at most {MAX_LABELS} labels, not {len(labels)}"
    for name, value in labels.items():
        if LABEL_PATTERN.fullmatch(name) is None:
            yield child(path, name), NAMED
        if LABEL_VALUE_PATTERN.fullmatch(value) is None:
            yield child(path, name), "must be 1 to 256 printable characters"
