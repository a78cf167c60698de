"""Google's contents as messages: order, roles, calls and their results."""

import json
import sys
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.codec import structure
from polarnode.core.conversation import Message, ModelRequest, ToolCall
from polarnode.core.errors import Refused
from polarnode.providers.contract import RequestEnvelope
from polarnode.providers.google import GOOGLE
from polarnode.providers.google.read import messages, read_draft, result_text
from polarnode.providers.google.shapes import Content, FunctionResponse, parts, respelled
from polarnode.providers.read_parts import PartsCache
from polarnode.providers.shapes import paragraphs


def contents(*said: Any) -> tuple[Content, ...]:
    return tuple(structure(respelled(each, Content)[0], Content) for each in said)


def read(*said: Any, system: Content | str | None = None) -> tuple[Message, ...]:
    return messages(system, map(read_draft, contents(*said)))


def user(*said: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": part} if isinstance(part, str) else part for part in said]}


def model(*said: Any) -> dict[str, Any]:
    return user(*said) | {"role": "model"}


def call(name: str, id: str | None = None, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args} | ({"id": id} if id else {})}


def result(name: str, id: str | None = None, **response: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response} | ({"id": id} if id else {})}


# ── who speaks ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("system", ["Be brief.", Content(parts=contents(user("Be ", "brief."))[0].parts)])
def test_system_instruction_comes_first(system: Content | str) -> None:
    first, second = read(user("hi"), system=system)
    assert first.role == "system"
    assert first.text.replace("\n", "") == "Be brief."
    assert second == Message(role="user", text="hi")


@pytest.mark.parametrize("system", [None, "", Content(), Content(parts=())])
def test_absent_system_instruction_is_none(system: Content | str | None) -> None:
    assert [message.role for message in read(user("hi"), system=system)] == ["user"]


@pytest.mark.parametrize("role", [None, "", "user", "function", "tool"])
def test_role_defaults_to_user(role: str | None) -> None:
    assert read({"role": role, "parts": [{"text": "hi"}]}) == (Message(role="user", text="hi"),)


def test_system_content_keeps_place() -> None:
    """A system content in the middle of the list stays in its place."""
    assert [
        message.role for message in read(user("a"), {"role": "system", "parts": [{"text": "s"}]}, user("b"))
    ] == ["user", "system", "user"]


def test_unknown_role_is_refused() -> None:
    with pytest.raises(Refused, match="must be 'user' or 'model'") as caught:
        read(user("a"), {"role": "robot", "parts": []})
    assert caught.value.path == "$.contents[1].role"


def test_adjacent_model_contents_are_one() -> None:
    """User contents stay one to one, and model contents in a row are one turn."""
    found = read(
        user("a", "b"),
        user("c"),
        {"role": "user"},
        model("d"),
        model(),
        model("e", call("f", "1")),
        user("g"),
    )
    assert [(message.role, message.text) for message in found] == [
        ("user", "a\nb"),
        ("user", "c"),
        ("user", ""),
        ("assistant", "de"),
        ("user", "g"),
    ]
    assert [made.id for made in found[3].calls] == ["1"]


def test_single_part_without_list() -> None:
    assert read({"parts": {"text": "hi"}}) == (Message(role="user", text="hi"),)
    assert parts(None) == ()


# ── calls and results ─────────────────────────────────────────────────────────


def test_turn_with_thoughts_text_calls() -> None:
    thought = {"text": "hm", "thought": True, "thoughtSignature": "c2ln"}
    (_, found) = read(
        user("a"), model(thought, "I go", call("go", "call_1", b=1, a=2) | {"thoughtSignature": "c2ln"})
    )
    assert found == Message(
        role="assistant",
        text="I go",
        thinking="hm",
        calls=(ToolCall(id="call_1", name="go", arguments='{"b":1,"a":2}'),),
        refs=("c2ln", "call_1"),
    )


def test_results_keep_their_place() -> None:
    found = read(
        user("a"),
        model(call("f", "1"), call("g", "2")),
        user("x", result("g", "2", output="G"), "y", "z", result("f", "1", output="F")),
    )
    assert [(message.role, message.text, message.call_id) for message in found[2:]] == [
        ("user", "x", None),
        ("tool", "G", "2"),
        ("user", "y\nz", None),
        ("tool", "F", "1"),
    ]


def test_calls_without_ids() -> None:
    """Without ids, names and order say which call is answered."""
    found = read(
        user("a"),
        model(call("f", n=1), call("g"), call("f", n=2)),
        {
            "role": "function",
            "parts": [result("g", output="g"), result("f", output="f1"), result("f", output="f2")],
        },
        model(call("f", n=3)),
        user(result("f", output="f3")),
    )
    ids = [made.id for message in found for made in message.calls]
    assert len(set(ids)) == 4
    answered = {message.text: message.call_id for message in found if message.role == "tool"}
    assert answered == {"f1": ids[0], "g": ids[1], "f2": ids[2], "f3": ids[3]}
    assert all(made.isalnum() or "_" in made for made in ids)


def test_client_ids_pass_unchanged() -> None:
    made_up = "run_shell_command_1795231589034_0"
    (_, assistant, tool) = read(
        user("a"),
        model(call("run_shell_command", made_up)),
        user(result("run_shell_command", made_up, output="x")),
    )
    assert assistant.calls[0].id == tool.call_id == made_up


def test_own_ids_lose_prefix() -> None:
    """Our ids come back without the name of the function."""
    ours = "call_000000abcdef012345600"
    (_, assistant, tool) = read(
        user("a"), model(call("f", f"f__{ours}")), user(result("f", f"f__{ours}", output="x"))
    )
    assert (assistant.calls[0].id, assistant.refs, tool.call_id) == (ours, (ours,), ours)


def test_signature_restores_dropped_ids() -> None:
    """A signature says the id that a client dropped."""
    signed = {"thoughtSignature": "MDAwMDAzYWJjZGVmMDEyMw=="}
    (_, assistant, *tools) = read(
        user("a"),
        model(call("f") | signed, call("f") | signed),
        model(call("g") | signed),
        user(result("g"), result("f"), result("f")),
    )
    ids = [made.id for made in assistant.calls]
    assert ids == ["call_000003abcdef012300", "call_000003abcdef012301", "call_000003abcdef012302"]
    assert [tool.call_id for tool in tools] == [ids[2], ids[0], ids[1]]
    assert set(assistant.refs) == {*ids, signed["thoughtSignature"]}


def test_foreign_result_id_matches_by_name() -> None:
    """A result with an id of its own answers the call of its name."""
    (_, assistant, tool) = read(user("a"), model(call("f")), user(result("f", "own", output="x")))
    assert tool.call_id == assistant.calls[0].id


def test_older_calls_are_not_answered() -> None:
    found = read(user("a"), model(call("f")), user("no"), model(call("f")), user(result("f", output="x")))
    assert found[-1].call_id == found[3].calls[0].id


@pytest.mark.parametrize(("given", "meant"), [("lost", "lost"), (None, "f")])
def test_result_without_call_is_shown(given: str | None, meant: str) -> None:
    (tool,) = read(user(result("f", given, output="x")))
    assert (tool.role, tool.text, tool.call_id) == ("tool", "x", meant)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "two\nlines"}, "two\nlines"),
        ({"result": "x"}, "x"),
        ({"result": [1, {"b": 2, "a": None}]}, '[1,{"b":2,"a":null}]'),
        ({"output": None}, ""),
        ({"error": "no such file"}, '{"error":"no such file"}'),
        ({"output": "x", "exitCode": 1}, '{"output":"x","exitCode":1}'),
        ({"name": "f", "content": "of the AI SDK"}, "of the AI SDK"),
        ({"name": "g", "content": "x"}, '{"name":"g","content":"x"}'),
        ({"b": 1, "a": "ü"}, '{"b":1,"a":"ü"}'),
        ({}, "{}"),
        (None, ""),
        ("plain", "plain"),
        ([1], "[1]"),
    ],
)
def test_result_is_output_or_compact_json(response: Any, text: str) -> None:
    """A result is shown as its output, or as compact JSON."""
    assert result_text(FunctionResponse(name="f", response=response)) == text


def test_parts_beside_result_are_appended() -> None:
    """Parts beside a result's JSON are shown below it."""
    beside = [
        {"inlineData": {"mimeType": "text/plain", "data": b64encode(b"file").decode()}},
        {"text": "more"},
    ]
    (tool,) = read(user({"functionResponse": {"name": "f", "response": {"output": "x"}, "parts": beside}}))
    assert tool.text == "x\nfile\nmore"


# ── odd parts ─────────────────────────────────────────────────────────────────


def test_code_run_elsewhere_is_text() -> None:
    said = model(
        "a",
        {"executableCode": {"language": "PYTHON", "code": "1+1"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "2"}},
    )
    (_, found) = read(user("x"), said)
    assert found.text == "a```python\n1+1\n```\n```\n2\n```\n"
    assert [read_draft(each).ran_code for each in contents(said, user("x"))] == [True, False]


@pytest.mark.parametrize("wrapped", [True, False])
def test_image_in_result_is_described(wrapped: bool) -> None:
    """An image that a function found is described and ends nothing."""
    image = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
    result = {
        "functionResponse": {"name": "see", "response": {"output": "a cat"}}
        | ({"parts": [image]} if wrapped else {})
    }
    found = read(user(result) if wrapped else user(result, image, {"fileData": {"fileUri": "gs://a"}}))
    texts = [message.text for message in found]
    told = "[image/png data: not shown, because this model reads text only]"
    beside = "" if wrapped else "\n[fileData: not shown, because this model reads text only]"
    assert texts == [f"a cat\n{told}{beside}"]


def test_image_between_parallel_results() -> None:
    """Results of parallel calls stay together; a text stands where it was given."""
    image = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
    found = read(
        user("a"),
        model(call("f", "1"), call("g", "2")),
        user(result("f", "1", output="F"), image, result("g", "2", output="G"), image, "so"),
    )
    told = "[image/png data: not shown, because this model reads text only]"
    assert [(message.role, message.text) for message in found[2:]] == [
        ("tool", f"F\n{told}"),
        ("tool", f"G\n{told}"),
        ("user", "so"),
    ]


def test_media_beside_result_join_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many media beside one result: its text is joined once, and not again for each of them."""
    joined: list[int] = []

    def counted(texts: Iterable[str]) -> str:
        text = paragraphs(texts)
        joined.append(len(text))
        return text

    monkeypatch.setitem(messages.__globals__, "paragraphs", counted)
    media = [{"inlineData": {"mimeType": "image/png", "data": "AA=="}}] * 100
    found = read(user("a"), model(call("f", "1")), user(result("f", "1", output="F"), *media))
    assert sum(joined) < 2 * len(found[-1].text)


def test_many_results_are_matched_once() -> None:
    """Results in another order than their calls: each finds its call without a look at all of them."""

    def made(count: int) -> int:
        names = [f"f{number}" for number in range(count)]
        drafts = [
            read_draft(each)
            for each in contents(user("a"), model(*map(call, names)), user(*map(result, reversed(names))))
        ]
        calls = 0

        def counted(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(counted)
        try:
            found = messages(None, drafts)
        finally:
            sys.setprofile(None)
        assert [each.call_id for each in found[2:]] == [each.id for each in reversed(found[1].calls)]
        return calls

    assert made(200) < 6 * made(50)


def test_inline_text_is_read() -> None:
    (found,) = read(
        user("see", {"inlineData": {"mimeType": "text/plain", "data": b64encode("Käse".encode()).decode()}})
    )
    assert found.text == "see\nKäse"


@pytest.mark.parametrize("said", [user(call("f")), model(result("f", output="x"))])
def test_calls_in_wrong_role_are_refused(said: Any) -> None:
    """A call of the user is refused, and so is a result of the model."""
    with pytest.raises(Refused, match="remove the function"):
        read(said)


# ── the property lineage stands on ────────────────────────────────────────────

texts = st.text(max_size=3).map(lambda text: {"text": text})
calls_ = st.builds(call, st.sampled_from("fg"), st.none() | st.sampled_from(["1", "2"]))
results = st.builds(result, st.sampled_from("fg"), st.none() | st.sampled_from(["1", "2"]))
users = st.lists(texts | results, max_size=3).map(lambda said: {"role": "user", "parts": said})
models = st.lists(texts | calls_, max_size=3).map(lambda said: {"role": "model", "parts": said})


@given(st.lists(st.tuples(users, models), min_size=1, max_size=4))
def test_appended_history_reads_as_appended(
    turns: list[tuple[Any, Any]],
) -> None:
    """A history that is appended to reads as one that is appended to."""
    flat = [content for turn in turns for content in turn]
    before: tuple[Message, ...] = ()
    for end in range(2, len(flat) + 1, 2):
        found = read(*flat[:end])
        assert found[: len(before)] == before
        before = found


# ── what a session's requests repeat ──────────────────────────────────────────


def asked(said: list[Any], tools: list[Any], known: PartsCache) -> ModelRequest | tuple[str, str | None]:
    body = {"contents": said, "tools": tools}
    try:
        return GOOGLE.read(json.dumps(body).encode(), RequestEnvelope(model="m", parts=known))
    except Refused as error:
        return str(error), error.path


SIGNATURES = [b64encode(f"{turn:06x}0123456789".encode()).decode() for turn in (1, 2)]
names, own_ids = st.sampled_from(["f", "g"]), st.sampled_from([None, None, "c1", "c2"])
part = st.one_of(
    st.sampled_from([{"text": "hi"}, {"text": "hm", "thought": True}, {"new_field": 1, "text": "x"}, {}]),
    st.builds(call, names, own_ids),
    st.builds(
        lambda made, place: made | {"thoughtSignature": place},
        st.builds(call, names),
        st.sampled_from(SIGNATURES),
    ),
    st.builds(result, names, own_ids),
    st.sampled_from([{"executableCode": {"code": "1"}}, {"inlineData": {"mimeType": "image/png"}}, 3]),
)
content = st.fixed_dictionaries(
    {"parts": st.lists(part, max_size=3)},
    optional={"role": st.sampled_from(["user", "model", "model", "system", "nobody"]), "odd": st.just(1)},
)
tool = st.sampled_from(
    [
        {"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]},
        {"function_declarations": [{"name": "g", "odd": 1}]},
        {"googleSearch": {}},
        {"functionDeclarations": 3},
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(content, min_size=1, max_size=4), st.lists(tool, max_size=2), st.booleans()),
        min_size=2,
        max_size=4,
    )
)
def test_bodies_read_alike_with_cache(
    requests: list[tuple[list[Any], list[Any], bool]],
) -> None:
    """A session s bodies are read as if each were its first."""
    known, said = PartsCache(), list[Any]()
    for added, tools, grows in requests:
        said = [*said, *added] if grows else [*added, *said[1:]]
        assert asked(said, tools, known) == asked(said, tools, PartsCache())


def test_read_content_is_same_message() -> None:
    """A content that was read before is the same message again."""
    known, told = PartsCache(), [user("hi"), model(call("f", "c1", a=1))]
    first = asked(told, [], known)
    second = asked([*told, user(result("f", "c1", output="r"))], [], known)
    assert isinstance(first, ModelRequest)
    assert isinstance(second, ModelRequest)
    one, other = first.conversation.messages, second.conversation.messages
    assert all(before is after for before, after in zip(one, other, strict=False))
