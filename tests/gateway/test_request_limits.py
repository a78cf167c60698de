"""What fits a context is never refused for its size; what cannot fit is refused before work is done on it."""

import json
from typing import Any

import pytest

from polarnode.core.conversation import Constraint, Conversation, Message, Tool, ToolCall
from polarnode.core.errors import ContextTooLong, Refused
from polarnode.gateway.model_requests import (
    BODY_BYTES,
    CHARS_PER_TOKEN,
    MARKS,
    MAX_CONSTRAINT_CHARS,
    MAX_CONSTRAINT_MEMBERS,
    MAX_IMAGES_BYTES,
    RequestLimits,
    check_constraint,
)
from polarnode.gateway.recordings import recorded

LIMITS = RequestLimits(1000)
LONG = "a" * (CHARS_PER_TOKEN * 1000 + 1)
EMPTY: dict[str, Any] = {}


def said(*messages: Message, tools: tuple[Tool, ...] = ()) -> Conversation:
    return Conversation(messages=messages, tools=tools)


def test_body_fits_context_and_images() -> None:
    """A body has room for its context and for images."""
    assert LIMITS.body_bytes == 16_000 + MAX_IMAGES_BYTES
    assert RequestLimits(10_000_000).body_bytes == BODY_BYTES


@pytest.mark.parametrize(
    "long",
    [
        said(Message(role="user", text=LONG)),
        said(Message(role="user", text=LONG[:9000]), Message(role="tool", text=LONG[:9000], call_id="1")),
        said(Message(role="assistant", text="", thinking=LONG)),
        said(Message(role="assistant", text="", calls=(ToolCall(id="1", name="f", arguments=LONG),))),
        said(*[Message(role="user", text="a")] * 1001),
        said(
            Message(role="user", text="a"),
            tools=(Tool(name="f", description="", parameters={"properties": {LONG: EMPTY}}),),
        ),
    ],
)
def test_over_context_is_too_long(long: Conversation) -> None:
    """A request longer than any prompt of the context is too long."""
    with pytest.raises(ContextTooLong) as refused:
        LIMITS.check_conversation(long, body_bytes=10 * len(LONG))
    assert refused.value.prompt_tokens > refused.value.limit == 1000


def test_usual_size_is_not_inspected() -> None:
    """A request of the usual size is not looked at."""
    LIMITS.check_conversation(None, body_bytes=CHARS_PER_TOKEN * 1000)  # type: ignore[arg-type]
    LIMITS.check_conversation(said(Message(role="user", text=LONG[1:])), body_bytes=10 * len(LONG))
    LIMITS.check_body(b'{"messages":[]}')
    LIMITS.check_body(b"a" * 2 * MARKS)  # an image


@pytest.mark.parametrize("part", [b'"a",', b"{},", b"1,", b"[", b'"":"",'])
def test_million_part_body_is_not_parsed(part: bytes) -> None:
    """A body of a million parts is not parsed."""
    with pytest.raises(ContextTooLong):
        LIMITS.check_body(part * (MARKS + 1))


def test_longer_context_allows_more_parts() -> None:
    RequestLimits(MARKS).check_body(b"[" * (MARKS + 1))


def test_unparsed_body_is_recorded_as_text() -> None:
    body = b"[" + b"1," * MARKS + b"1,1]"
    assert json.loads(recorded("POST", "/v1/chat/completions", [], body))["body"] == body.decode()


def test_endlessly_compiling_constraint_is_refused() -> None:
    """A constraint that compiles for ever is refused."""
    members = {f"p{number}": {"type": "string"} for number in range(MAX_CONSTRAINT_MEMBERS + 1)}
    for kind, text in (
        ("regex", "a" * (MAX_CONSTRAINT_CHARS + 1)),
        ("json_schema", json.dumps({"properties": members})),
        ("json_schema", json.dumps({"anyOf": [{"items": {"properties": members}}]})),
    ):
        with pytest.raises(Refused, match="answer"):
            check_constraint(Constraint(kind=kind, text=text))  # type: ignore[arg-type]
    members.popitem()
    check_constraint(Constraint(kind="json_schema", text=json.dumps({"properties": members})))
    check_constraint(Constraint(kind="ebnf", text='root ::= "a"'))


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("regex", "a*" * 1000, "1000 repetitions"),
        ("regex", "a?" * 201, "201 repetitions"),
        ("regex", "a{2}" * 201, "201 repetitions"),
        ("regex", "(" * 201 + "a" + ")" * 201, "201 deep"),
        ("ebnf", 'root ::= "b"\nx ::= ' + '"a"* ' * 201, "201 repetitions"),
        ("json_schema", json.dumps({"items": {"pattern": "a+" * 300}}), "300 repetitions"),
        ("json_schema", json.dumps({"patternProperties": {"a?" * 300: {}}}), "300 repetitions"),
        ("json_schema", json.dumps({"propertyNames": {"pattern": "(" * 201}}), "201 deep"),
    ],
)
def test_repetitions_are_bounded(kind: str, text: str, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence) as caught:
        check_constraint(Constraint(kind=kind, text=text, path="$.format"))  # type: ignore[arg-type]
    assert caught.value.path == "$.format"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", r"[\w.+*?-]+@" + r"\*\+\?" * 500 + "[*+?{1]" * 500),
        ("ebnf", "\n".join(f'r{n} ::= "***" [+?*]* # a* b* c*' for n in range(500))),
        ("regex", "(?:a|b)" * 500 + r"(\(|a)" * 500),
        ("regex", "[" * 60_000),
        ("ebnf", "a" * 60_000),
        ("ebnf", '"\\' * 20_000),
        ("json_schema", json.dumps({"properties": {"pattern": {"pattern": "^[a-z]{1,20}$"}}})),
    ],
)
def test_literals_are_not_repetitions(kind: str, text: str) -> None:
    check_constraint(Constraint(kind=kind, text=text))  # type: ignore[arg-type]
