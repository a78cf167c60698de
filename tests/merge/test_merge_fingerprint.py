"""Fingerprints: exact for what a client wrote, tolerant for what we wrote."""

import json
from collections.abc import Mapping

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.conversation import Conversation, Json, Message, Tool, ToolCall
from polarnode.core.errors import Refused
from polarnode.merge.fingerprint import (
    NO_KEY,
    FingerprintCache,
    Path,
    advance,
    canonical_arguments,
    label,
    root_key,
    same_text,
    thinking_letter,
    tools_key,
)

ROOT = root_key(NO_KEY, "d")
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
VALUES: st.SearchStrategy[Json] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)


def meaning(value: Json) -> object:
    """A value with booleans told from numbers, for comparing as JSON does."""
    if isinstance(value, bool) or value is None:
        return ("word", str(value))
    if isinstance(value, (int, float)):
        return ("number", value)
    if isinstance(value, list):
        return ["list", *map(meaning, value)]
    if isinstance(value, Mapping):
        return {key: meaning(inner) for key, inner in value.items()}
    return value


def shuffled(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(inner) for inner in value] if isinstance(value, list) else value


def said(text: str = "", *calls: tuple[str, str]) -> Message:
    return Message(
        role="assistant",
        text=text,
        calls=tuple(ToolCall(id=f"c{k}", name=name, arguments=args) for k, (name, args) in enumerate(calls)),
    )


# ── JSON by meaning ───────────────────────────────────────────────────────────


@given(value=VALUES)
def test_spelling_does_not_count(value: Json) -> None:
    plain = canonical_arguments(json.dumps(value))
    assert plain.startswith("=")
    for spelling in (
        json.dumps(value, indent=2),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False),
        json.dumps(shuffled(value)),
        json.dumps(value, sort_keys=True),
        f"\n {json.dumps(value)}\t",
    ):
        assert canonical_arguments(spelling) == plain


@given(one=VALUES, other=VALUES)
def test_different_values_stay_different(one: Json, other: Json) -> None:
    same = canonical_arguments(json.dumps(one)) == canonical_arguments(json.dumps(other))
    assert same == (meaning(one) == meaning(other))


@pytest.mark.parametrize(
    "spellings",
    [
        ("1", "1.0", "1e0", "10e-1", "0.1E1", "100E-2", "1.000"),
        ("0", "-0", "0.0", "0e9", "-0.0e-5"),
        ("-12.50", "-1.25e1", "-125e-1"),
        ("100000000000000000000000000000000000001", "100000000000000000000000000000000000001.0"),
        ("1e400", "10e399"),
        ("{}", "", "  ", "\n"),
        ('{"a": "\\u00e9"}', '{"a": "é"}'),
    ],
)
def test_equal_numbers_and_nulls_compare_equal(spellings: tuple[str, ...]) -> None:
    assert len({canonical_arguments(spelling) for spelling in spellings}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("true", "1"),
        ("false", "0"),
        ("null", "false"),
        ('"1"', "1"),
        ("[]", "{}"),
        ("null", "{}"),
        ('{"a": null}', "{}"),
        ("100000000000000000000000000000000000001", "100000000000000000000000000000000000002"),
        ("0.1", "0.10000000000000000000000000000000001"),
        ("1", "-1"),
        ("12", "1.2"),
        ('{"a": "b\\",\\"c"}', '{"a": "b", "c": ""}'),
        ('["a", "b"]', '["a1:b"]'),
        ('["1", "2"]', '["12"]'),
        ("[1, 2]", "[12]"),
        ("[[1], 2]", "[[1, 2]]"),
    ],
)
def test_lookalike_values_are_told_apart(one: str, other: str) -> None:
    assert canonical_arguments(one) != canonical_arguments(other)


@pytest.mark.parametrize(
    "broken",
    [
        '{"a": 1',
        '{"a": 1, "a": 1}',
        "NaN",
        "-Infinity",
        "ls -la",
        "[" * 50_000,
        "[" * 200 + "]" * 200,
        "1e" + "9" * 5000,
    ],
)
def test_invalid_json_stands_for_itself(broken: str) -> None:
    assert canonical_arguments(broken) == "!" + broken
    assert canonical_arguments(broken + " ") != canonical_arguments(broken)


def test_raw_text_differs_from_canonical_json() -> None:
    read = canonical_arguments('{"a": 1}')
    assert canonical_arguments(read) != read


def test_half_surrogate_pair_is_a_message() -> None:
    assert advance(ROOT, said("", ("bash", '{"a": "\\ud800"}'))) != advance(
        ROOT, said("", ("bash", '{"a": "\\ud801"}'))
    )
    assert advance(ROOT, Message(role="user", text="\ud800")) != advance(
        ROOT, Message(role="user", text="\ud801")
    )


# ── messages ──────────────────────────────────────────────────────────────────


@given(one=st.text(max_size=8), other=st.text(max_size=8), role=st.sampled_from(["system", "user", "tool"]))
def test_a_clients_message_counts_letter_by_letter(one: str, other: str, role) -> None:  # type: ignore[no-untyped-def]
    assert (advance(ROOT, Message(role=role, text=one)) == advance(ROOT, Message(role=role, text=other))) == (
        one == other
    )


@pytest.mark.parametrize("text", ["x ", " x", "x\n", "x\u00a0", "x\ufeff"])
def test_outer_blanks_count_only_for_clients(text: str) -> None:
    """Outer blanks count in a client's text, and not in our answers."""
    assert advance(ROOT, Message(role="user", text=text)) != advance(ROOT, Message(role="user", text="x"))
    assert advance(ROOT, said(text)) == advance(ROOT, said("x"))
    assert same_text(text, "x")


def test_inner_blanks_of_answers_count() -> None:
    assert advance(ROOT, said("a b")) != advance(ROOT, said("a  b"))
    assert not same_text("a b", "a  b")


def test_roles_are_told_apart() -> None:
    keys = {advance(ROOT, Message(role=role, text="x")) for role in ("system", "user", "assistant", "tool")}
    assert len(keys) == 4


def test_ids_thinking_refs_do_not_count() -> None:
    ours = said("x", ("bash", "{}"))
    echoed = evolve(ours, thinking="hm", refs=("abc",), calls=(evolve(ours.calls[0], id="other"),))
    assert advance(ROOT, echoed) == advance(ROOT, ours)
    result = Message(role="tool", text="ok", call_id="c0")
    assert advance(ROOT, evolve(result, call_id="other")) == advance(ROOT, result)


@pytest.mark.parametrize(
    "other",
    [
        said("y", ("bash", '{"a": 1}')),
        said("x"),
        said("x", ("sh", '{"a": 1}')),
        said("x", ("bash", '{"a": 2}')),
        said("x", ("bash", '{"a": 1}'), ("bash", '{"a": 1}')),
        said("", ("x", ""), ("bash", '{"a": 1}')),
        said("x4:bash", ("", '{"a": 1}')),
        said("xba", ("sh", '{"a": 1}')),
    ],
)
def test_answer_content_counts(other: Message) -> None:
    assert advance(ROOT, other) != advance(ROOT, said("x", ("bash", '{"a": 1}')))


def test_order_of_calls_counts() -> None:
    one, other = ("bash", "1"), ("bash", "2")
    assert advance(ROOT, said("", one, other)) != advance(ROOT, said("", other, one))


@given(
    one=st.lists(
        st.tuples(st.sampled_from(["user", "assistant"]), st.text(st.characters(codec="ascii"), max_size=4)),
        max_size=4,
    ),
    other=st.lists(
        st.tuples(st.sampled_from(["user", "assistant"]), st.text(st.characters(codec="ascii"), max_size=4)),
        max_size=4,
    ),
)
def test_a_key_names_one_path_only(one: list, other: list) -> None:  # type: ignore[type-arg]
    def key(path: list) -> str:  # type: ignore[type-arg]
        reached = ROOT
        for role, text in path:
            reached = advance(reached, Message(role=role, text=text))
        return reached

    def seen(path: list) -> list:  # type: ignore[type-arg]
        return [
            (
                role,
                text.strip("\ufeff \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0") if role == "assistant" else text,
            )
            for role, text in path
        ]

    assert (key(one) == key(other)) == (seen(one) == seen(other))


# ── roots ─────────────────────────────────────────────────────────────────────


def tool(**changes: object) -> Tool:
    return evolve(
        Tool(name="bash", description="run", parameters={"type": "object", "n": 1, "strict": True}), **changes
    )


def test_no_tools_give_no_key() -> None:
    assert tools_key(()) == NO_KEY


@pytest.mark.parametrize(
    "same", [{"strict": True, "n": 1, "type": "object"}, {"type": "object", "n": 1.0, "strict": True}]
)
def test_schema_spelling_does_not_count(same: dict[str, Json]) -> None:
    assert tools_key([tool(parameters=same)]) == tools_key([tool()])


@pytest.mark.parametrize(
    "other",
    [
        [tool(name="sh")],
        [tool(description="Run")],
        [tool(parameters={"type": "object", "n": True, "strict": True})],
        [tool(parameters={"type": "object", "n": 1, "strict": 1})],
        [tool(), tool(name="b")],
        [tool(parameters={"type": "object", "n": 1, "strict": [True]})],
        [tool(parameters={"type": "object", "n": 1, "strict": None})],
    ],
)
def test_changed_tools_are_another_root(other: list[Tool]) -> None:
    assert tools_key(other) != tools_key([tool()])


def test_order_of_tools_counts() -> None:
    one, other = tool(), tool(name="b")
    assert tools_key([one, other]) != tools_key([other, one])


def test_endless_schema_refused_with_path() -> None:
    deep: Json = {}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(Refused, match="nest them less deeply") as caught:
        tools_key([tool(parameters=deep)])
    assert caught.value.path == "$.tools"
    with pytest.raises(Refused):
        FingerprintCache().tools_key([tool(parameters=deep)])


def test_thinking_flag_is_in_root() -> None:
    letters = {thinking_letter(Conversation(messages=(), thinking=flag)) for flag in (None, True, False)}
    assert letters == {"d", "y", "n"}
    assert len({root_key(NO_KEY, letter) for letter in letters}) == 3


# ── memo, path, label ─────────────────────────────────────────────────────────


@given(arguments=st.lists(st.one_of(VALUES.map(json.dumps), st.text()), max_size=6))
def test_a_memo_says_what_the_function_says(arguments: list[str]) -> None:
    memo = FingerprintCache()
    for _ in range(2):
        assert [memo.canonical(text) for text in arguments] == [
            canonical_arguments(text) for text in arguments
        ]


def test_memo_separates_true_from_one() -> None:
    """A memo tells true from one and takes numbers of any size."""
    memo = FingerprintCache()
    lists = [[tool(parameters={"n": value})] for value in (1, True, 1.0, 2**70, "1")]
    assert [memo.tools_key(tools) for tools in lists] == [tools_key(tools) for tools in lists]
    assert memo.tools_key(lists[0]) == memo.tools_key(lists[2]) != memo.tools_key(lists[1])


def test_memo_size_is_bounded() -> None:
    memo = FingerprintCache()
    for number in range(20_000):
        memo.canonical(str(number))
    assert len(memo._arguments) <= 8192
    memo.canonical("x" * 5000)
    assert "x" * 5000 not in memo._arguments
    for number in range(200):
        memo.tools_key([tool(name=str(number))])
    assert len(memo._tools) <= 64


def test_path_text_reads_back() -> None:
    path = Path(agent=label("a.b"), tools=NO_KEY, thinking="d", system="1" * 8, opening="2" * 8, key="3" * 32)
    assert Path.read(path.text) == path


def test_labels_are_short_or_none() -> None:
    assert label("") == NO_KEY
    assert len(label("agent-7")) == 8
    assert label("agent-7") != label("agent-8")
