"""What enters is bounded: depth and size of free JSON, numbers, addresses, and the text of refusals."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.codec.json import TOO_DEEP, dump_json, plain, read_json, structure
from polarnode.core.codec.limits import (
    DEPTH,
    REWARD,
    ValueLimits,
    exceeds_depth,
    exceeds_values,
    url_fault,
    value_fault,
)
from polarnode.core.codec.task_toml import read_toml_value
from polarnode.core.codec.tasks import read_capture, read_capture_end, read_task, task_json
from polarnode.core.conversation import Json
from polarnode.core.errors import MAX_MESSAGE_CHARS, Refused
from polarnode.core.task import TaskSpec

LEAST: dict[str, Json] = {"instruction": "fix the bug", "harness": {"name": "pi"}}


def nested(levels: int, inside: Json = 1) -> Json:
    """`inside`, in so many lists and objects."""
    value = inside
    for level in range(levels):
        value = [value] if level % 2 else {"n": value}
    return value


def with_value(field: str, value: Json) -> dict[str, Json]:
    """A task with a free value in one of its fields."""
    first, _, second = field.partition(".")
    inside: dict[str, Json] = {"v": value}
    if first == "metadata":
        return {**LEAST, "metadata": inside}
    if field == "evaluator.parts":
        return {**LEAST, "evaluator": {"parts": [{"config": inside}]}}
    begun = LEAST.get(first, {})
    assert isinstance(begun, dict)
    return {**LEAST, first: {**begun, second: inside}}


FIELDS = ("metadata", "harness.settings", "builder.config", "evaluator.config", "evaluator.parts")


# ── count ─────────────────────────────────────────────────────────────────────

TEXTS = st.text(st.sampled_from('",[{}]:\\a é'))
BODIES: st.SearchStrategy[Json] = st.recursive(
    TEXTS | st.booleans() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)
)


def marks(value: Json) -> int:
    """Lists, objects, and commas between values."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inner) - 1) + sum(map(marks, inner))


@given(value=BODIES, off=st.integers(-2, 2))
def test_json_values_counted_before_parsing(value: Json, off: int) -> None:
    """Values are counted before they are parsed and texts are not."""
    found = marks(value)
    assert exceeds_values(orjson.dumps(value), found + off) == (off < 0)


@pytest.mark.parametrize("body", [b'"' * 99, b"\\" * 99, b'"\\', b'["' + b'\\"' * 50 + b",,"])
def test_non_json_is_counted_too(body: bytes) -> None:
    assert not exceeds_values(body, 1)


# ── depth ─────────────────────────────────────────────────────────────────────


@given(levels=st.integers(0, 1000), limit=st.integers(1, 300))
def test_depth_is_counted_whatever_it_is(levels: int, limit: int) -> None:
    value = nested(levels)
    assert exceeds_depth(value, limit) == (levels > limit)
    assert exceeds_depth([1, value, "x"], limit) == (levels + 1 > limit)


def test_depth_counts_without_recursion() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    assert exceeds_depth(value)
    fault = value_fault(value, "$.metadata")
    assert fault is not None
    assert "is nested more than 100 levels deep" in str(fault)
    while value:  # taken apart by hand: freeing it at once would itself recurse
        value = value[0]


@pytest.mark.parametrize("field", FIELDS)
def test_task_values_have_bounded_depth(field: str) -> None:
    """Each free value of a task has a depth."""
    read_task(with_value(field, nested(DEPTH - 1)))
    for levels in (DEPTH, 252, 400, 1000):
        with pytest.raises(Refused, match="is nested more than 100 levels deep: flatten it") as refused:
            read_task(with_value(field, nested(levels)))
        assert str(refused.value.path).startswith(f"$.{field.removesuffix('.parts')}")
        assert len(str(refused.value)) < 300


def test_deepest_value_is_written_everywhere() -> None:
    """The deepest value that is taken is written everywhere."""
    spec = read_task(with_value("evaluator.parts", nested(DEPTH - 1)))
    value: Json = {"event": {"task": {"spec": task_json(spec)}}}
    for _ in range(100):
        value = [value]
    assert orjson.dumps(value)
    assert plain(spec)


@pytest.mark.parametrize(
    "read", [read_capture, lambda value: read_capture_end({"metrics": value["metadata"]})]
)
def test_capture_values_are_bounded(read: Any) -> None:
    """A capture's values have a depth and a size."""
    read({"metadata": {"v": nested(DEPTH - 1)}})
    with pytest.raises(Refused, match=r"is nested more than 100 levels deep"):
        read({"metadata": {"v": nested(252)}})
    with pytest.raises(Refused, match=r"is larger than 1 MiB as JSON: put large data into a file"):
        read({"metadata": {"v": "x" * (1 << 20)}})


def test_fault_path_is_short() -> None:
    fault = value_fault({"a": {"b": [1, {"c": nested(200)}]}}, "$.metadata")
    assert fault is not None
    assert fault.path == "$.metadata.a.b[1].c"


# ── size and kinds ────────────────────────────────────────────────────────────


def test_repeated_values_count_each_time() -> None:
    """Size and count are bounded, and equal parts count each time."""
    small = ValueLimits(size=1000, count=50)
    assert value_fault({"a": ["x"] * 40}, "$", small) is None
    many, large = value_fault([0] * 60, "$.m", small), value_fault(["x" * 999], "$.m", small)
    assert "m has more than 50 values" in str(many)
    assert "m is larger than 0 MiB" in str(large)
    laughs: Json = "ha"
    for _ in range(60):  # 2**60 strings when it is written
        laughs = [laughs, laughs]
    assert "has more than 100,000 values" in str(value_fault(laughs, "$.m"))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (float("nan"), "m.v is nan, which JSON has no form for"),
        (float("-inf"), "m.v is -inf, which JSON has no form for"),
        (2**64, "m.v is a whole number beyond 64 bits: write it as a string"),
        ("\ud800", r"m.v is no valid Unicode (half of a surrogate pair)"),
        ({"\udfff": 1}, "m.v has a key that is no valid Unicode"),
        ({1: 2}, "m.v has the key 1, which is no string: quote it"),
        (b"bytes", "m.v is a value of type bytes"),
        ({1, 2}, "m.v is a value of type set"),
    ],
)
def test_value_without_json_form_is_refused(value: Any, sentence: str) -> None:
    fault = value_fault({"v": value}, "$.m")
    assert fault is not None
    assert sentence in str(fault)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_value_passes_or_is_named(value: Any) -> None:
    """What a json reader returns passes or is named."""
    fault = value_fault(value, "$.m")
    if fault is None:
        assert read_json(dump_json(value)) == value
    else:
        assert "inf" in str(fault) or "surrogate" in str(fault)


# ── writing ───────────────────────────────────────────────────────────────────


def test_any_old_value_is_written() -> None:
    """A journal of before may hold values that are refused today, and one must not silence a stream."""
    deep = dump_json({"kept": 1, "deep": nested(500)})
    assert deep.startswith(b'{"kept":1,')
    assert TOO_DEEP.encode() in deep
    assert dump_json([2**70, -(2**64)]) == b'["1180591620717411303424","-18446744073709551616"]'
    assert dump_json(2**20_000).startswith(b'"0x1000')
    assert dump_json({"\ud83d": "a\udc00b"}) == '{"�":"a�b"}'.encode()


# ── numbers ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("runtime.pids", 10**9),
        ("runtime.memory_mb", 2**60),
        ("runtime.disk_mb", 2**60),
        ("runtime.cpus", 1e9),
        ("runtime.cpus", 1e-9),
        ("budgets.init_s", 1e308),
        ("budgets.run_s", 1e308),
        ("budgets.post_s", 1e10),
        ("budgets.max_turns", 2**40),
        ("budgets.max_tokens", 2**62),
        ("budgets.max_repeats", 2**40),
        ("budgets.retries", 2**31),
        ("group.max_staleness", 2**40),
        ("sampling.max_tokens", 2**40),
        ("sampling.top_k", 2**40),
        ("sampling.seed", 2**63 - 1),
        ("sampling.stop", ["x"] * 65),
        ("sampling.stop", ["x" * 1001]),
        ("evaluator.parts", [{"weight": 1e300}]),
        ("evaluator.parts", [{}] * 33),
    ],
)
def test_impossible_machine_number_is_refused(path: str, value: Json) -> None:
    """A number that no machine has is refused."""
    group, _, name = path.partition(".")
    with pytest.raises(Refused, match="must be") as refused:
        read_task({**LEAST, group: {name: value}})
    assert str(refused.value.path).startswith(f"$.{path}")


@pytest.mark.parametrize("value", [1e300, 2**63, -(2**64) * 1.0])
def test_integer_over_64_bits_is_refused(value: Json) -> None:
    with pytest.raises(Refused, match=r"exit_code must be a whole number of at most 64 bits"):
        read_capture_end({"exit_code": value})
    with pytest.raises(Refused, match=r"num_samples must be a whole number of at most 64 bits"):
        read_task({**LEAST, "num_samples": value})


def test_reward_must_have_finite_square() -> None:
    """A reward stays finite where it is squared."""
    read_capture_end({"reward": REWARD, "turn_rewards": {"0": -REWARD}})
    for end in ({"reward": 1e19}, {"reward": 0, "turn_rewards": {"0": -1e300}}):
        with pytest.raises(Refused, match=r"must be a number from -1e\+18 to 1e\+18"):
            read_capture_end(end)
    with pytest.raises(Refused, match="reason must be at most 8000 characters"):
        read_capture_end({"reason": "x" * 8001})


# ── addresses and other text ──────────────────────────────────────────────────


# what one program decodes, or takes a part of, and another does not
HOSTS = (
    "127.0.0.1%2f",
    "127.0.0.1%2f.h",
    "%31.0.0.1",
    "h;x",
    "h,x",
    "-h",
    "(h)",
    "h'",
    "[fe80::1%25eth0]",
)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/",
        "http://my_trainer.Example.:1/",
        "https://trainer.example",
        "http://[::1]:8080/a?b=c%0d%0a#d",
        "http://h:65535",
    ],
)
def test_valid_address_is_accepted(url: str) -> None:
    assert url_fault(url) is None
    assert read_task({**LEAST, "callback_url": url}).callback_url == url


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://host/\r\nX-Injected: 1", "a space, a control character"),
        ("http://ho\tst/", "a space, a control character"),
        ("\nhttp://host/", "a space, a control character"),
        ("http://host/a b", "a space, a control character"),
        ("http://host/\x7f", "a space, a control character"),
        ("http://h\u00f6st/", "a letter outside ASCII"),
        ("http://host\\@evil/", "a backslash"),
        ("http://host:0/", "port from 1 to 65535"),
        ("http://host:65536/", "port from 1 to 65535"),
        ("http://host:port/", "port from 1 to 65535"),
        ("http://user@host/", "without a name or password"),
        ("http://@host/", "without a name or password"),
        ("http://user:word@host/", "without a name or password"),
        *((f"http://{host}/", "no name and no address") for host in HOSTS),
        ("http:///path", "an http or https address with a host"),
        ("http://[::1/", "an http or https address with a host"),
        ("ftp://host/", "an http or https address with a host"),
        ("javascript:alert(1)", "an http or https address with a host"),
        ("http://host/" + "a" * 2048, "at most 2048 characters"),
    ],
)
def test_invalid_address_refused_at_submission(url: str, sentence: str) -> None:
    server: Json = {**LEAST, "harness": {"name": "pi", "mcp_servers": {"s": {"url": url}}}}
    for task, path in (
        ({**LEAST, "callback_url": url}, "$.callback_url"),
        (server, "$.harness.mcp_servers.s.url"),
    ):
        with pytest.raises(Refused) as refused:
            read_task(task)
        assert sentence in str(refused.value)
        assert refused.value.path == path


@pytest.mark.parametrize("header", [{"X-A": "b\r\nX-C: d"}, {"X A": "b"}, {"": "b"}, {"X-A": "\x00"}])
def test_invalid_header_is_refused(header: Json) -> None:
    server: Json = {"url": "http://127.0.0.1:9/mcp", "headers": header}
    with pytest.raises(Refused, match="is no HTTP header"):
        read_task({**LEAST, "harness": {"name": "pi", "mcp_servers": {"s": server}}})


@pytest.mark.parametrize("name", ["version", "model_name"])
def test_argument_name_must_be_printable(name: str) -> None:
    """A name that becomes an argument is printable."""
    for text in ("a\x00b", "a\nb", "", "x" * 257):
        with pytest.raises(Refused, match="must be 1 to 256 printable characters"):
            read_task({**LEAST, "harness": {"name": "pi", name: text}})


@pytest.mark.parametrize(
    "task",
    [
        {**LEAST, "x" * 10_000_000: 1},
        {**LEAST, "runtime": {"workdir": "x" * 10_000_000}},
        {**LEAST, "thinking": "x" * 10_000_000},
        {**LEAST, "harness": {"name": "pi", "env": {"x-" * 5_000_000: "y"}}},
    ],
)
def test_refusal_shortens_long_values(task: Json) -> None:
    with pytest.raises(Refused) as refused:
        read_task(task)
    assert len(str(refused.value)) <= MAX_MESSAGE_CHARS + 1
    assert len(str(refused.value.path)) < 200


@pytest.mark.parametrize("text", ["a = " + "[" * 3000 + "]" * 3000, "a" + ".a" * 3000 + " = 1"])
def test_deep_toml_is_read_or_refused(text: str) -> None:
    with pytest.raises(Refused, match="nested too deeply to be read: flatten it"):
        read_toml_value(text)


def test_number_of_hundreds_digits_refused() -> None:
    with pytest.raises(Refused, match="must be a number of at most 64 bits"):
        structure({**LEAST, "budgets": {"run_s": 10**400}}, TaskSpec)
