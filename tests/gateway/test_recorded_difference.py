"""Two recorded sessions side by side: what is equal, and the words that are not."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_kit import DIALECTS, Client, Dialect, linear

from polarnode.gateway.recorded_difference import CONTEXT, WINDOW, compare_sessions
from polarnode.gateway.recorded_request import RecordedRequest, read_recorded
from polarnode.providers.contract import NoMemory

HARNESSES = Path(__file__).parents[1] / "data" / "providers"
LISTING = (
    "total 4\ndrwxr-xr-x 1 agent agent 4096 Nov 24 18:{} .\n-rw-r--r-- 1 agent agent 1 Nov 24 18:{} a.txt\n"
)


def session(*histories: list[dict[str, Any]], name: str = "", **more: Any) -> list[RecordedRequest]:
    return [
        recorded(f"{name}{number:02}", {"model": "m", "messages": messages, **more})
        for number, messages in enumerate(histories, 1)
    ]


def recorded(file: str, body: Any, target: str = "/v1/chat/completions") -> RecordedRequest:
    entry = {"method": "POST", "target": target, "headers": [], "body": body}
    return read_recorded(file, json.dumps(entry).encode(), NoMemory())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(call_id: str, arguments: str = '{"command": "ls -la"}') -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def agent(minute: str, call_id: str = "c1", name: str = "") -> list[RecordedRequest]:
    history = [user("list"), called(call_id), result(call_id, LISTING.format(minute, minute)), user("more")]
    return session(history[:1], history[:3], history, name=name)


def test_first_differing_request_is_named() -> None:
    """The first request whose prompt differs is named with its words."""
    found = compare_sessions(agent("03"), agent("04", name="b"))
    assert (found.requests, found.against_requests, found.equal, found.same) == (3, 3, 1, False)
    first = found.first
    assert first is not None
    assert (first.file, first.against_file, first.part) == ("02", "b02", "message 3 (tool)")
    assert (first.words, first.against_words) == ("03", "04")
    assert first.before.endswith("drwxr-xr-x 1 agent agent 4096 Nov 24 18:")
    assert first.after.startswith(" .\n-rw-r--r-- 1 agent")


def test_ids_and_spacing_are_ignored() -> None:
    """Ids, blanks and the spelling of JSON are no difference."""
    other = agent("03", "another")
    assert compare_sessions(agent("03"), other).same
    spelled = [user("list"), called("x", '{ "command":"ls -la" }'), result("x", LISTING.format("03", "03"))]
    found = compare_sessions(agent("03")[:2], session(spelled[:1], spelled))
    assert (found.equal, found.first) == (2, None)


def test_reordered_calls_each_count_once() -> None:
    """Calls in another order are found, and each counts once."""
    one = session([user("a")], [user("b")], [user("b")])
    assert compare_sessions(one, [one[1], one[0], one[2]]).same
    found = compare_sessions(one, session([user("b")], [user("a")]))
    assert (found.equal, found.same) == (2, False)
    assert found.first is not None
    assert (found.first.file, found.first.against_file, found.first.part) == ("03", None, None)
    found = compare_sessions(one[:1], one)
    assert found.first is not None
    assert (found.equal, found.first.file, found.first.against_file) == (1, None, "02")


def test_nearest_candidate_is_compared() -> None:
    found = compare_sessions(
        session([user("one"), called("c"), result("c", "x 1")]),
        session([user("side call")], [user("one"), called("c"), result("c", "x 2")]),
    )
    assert found.first is not None
    assert (found.first.against_file, found.first.words, found.first.against_words) == ("02", "1", "2")


def tool(description: str) -> list[Any]:
    return [{"type": "function", "function": {"name": "t", "description": description, "parameters": {}}}]


def test_tools_differ_in_the_head() -> None:
    """A difference in the tools is reported as one in the head."""
    one, other = (session([user("a")], tools=tool(day)) for day in ("It is Monday", "It is Tuesday"))
    first = compare_sessions(one, other).first
    assert first is not None
    assert (first.part, first.words, first.against_words) == ("head", "Monday", "Tuesday")
    same = session([user("a")], tools=tool("It is Monday"))
    assert compare_sessions(one, same).same


def test_added_message_and_role_are_shown() -> None:
    """A message more and another role are shown."""
    first = compare_sessions(session([user("a"), user("b")]), session([user("a")])).first
    assert first is not None
    assert (first.part, first.words, first.against_words) == ("message 2 (user)", "user: b", "")
    first = compare_sessions(session([user("a")]), session([{"role": "system", "content": "a"}])).first
    assert first is not None
    assert (first.part, first.words, first.against_words) == ("message 1 (user)", "user", "system")


def test_shown_difference_is_bounded() -> None:
    long = "x" * 5 * WINDOW
    one, other = (session([user(f"{long} {end} {'y ' * WINDOW}")]) for end in ("a" * 9_000, "b"))
    first = compare_sessions(one, other).first
    assert first is not None
    assert len(first.before) == len(first.after) == CONTEXT + 1
    assert len(first.words) <= WINDOW
    assert first.before.startswith("…x")
    assert first.after.endswith("…")


def test_unread_request_is_no_equality() -> None:
    """A request that cannot be read is no equality, and probes are not compared."""
    probe = recorded("00", None, "/api/show")
    assert compare_sessions([probe, *agent("03")], agent("03")).same
    broken = recorded("04", {"model": "m", "messages": [{"role": "nobody", "content": "x"}]})
    found = compare_sessions([*agent("03"), broken], agent("03"))
    assert (found.equal, found.first, found.same) == (3, None, False)
    assert found.errors[0].startswith("04: $.messages[0]")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_changed_result_found_per_dialect(dialect: Dialect) -> None:
    """A changed result is found in every dialect."""
    entries = linear(Client(dialect=dialect), turns=6)

    def read(change: bool) -> list[RecordedRequest]:
        return [
            read_recorded(
                f"{number:02}",
                (
                    json.dumps(each).replace("alpha", "omega") if change and number >= 4 else json.dumps(each)
                ).encode(),
                NoMemory(),
            )
            for number, each in enumerate(entries, 1)
        ]

    assert compare_sessions(read(False), read(False)).same
    found = compare_sessions(read(False), read(True))
    assert found.first is not None
    assert (found.equal, found.first.file, found.first.against_file) == (3, "04", "04")
    assert (found.first.words, found.first.against_words) == ("alpha", "omega")


WORDS = st.lists(st.sampled_from(["a", "b", " ", "\n", "é", "12", "-", "word"]), max_size=30).map("".join)


@given(WORDS, WORDS)
def test_shown_words_rebuild_other_text(one: str, other: str) -> None:
    """The shown words make one text of the other."""
    first = compare_sessions(session([user(one)]), session([user(other)])).first
    if one == other:
        assert first is None
        return
    assert first is not None
    assert first.words != first.against_words
    before, after = first.before.removeprefix("…"), first.after.removesuffix("…")
    assert f"{before}{first.words}{after}" in f"user: {one}"
    assert f"{before}{first.against_words}" in f"user: {other}"


def harness_names() -> list[str]:
    return sorted({file.stem.rpartition("_")[0] for file in HARNESSES.glob("*_1.json")})


@pytest.mark.parametrize("harness", harness_names())
def test_real_session_equals_only_itself(harness: str) -> None:
    """A real session is equal to itself and differs from a shorter one."""
    files = sorted(HARNESSES.glob(f"{harness}_?.json"))
    read = [read_recorded(file.name, file.read_bytes(), NoMemory()) for file in files]
    found = compare_sessions(read, read)
    assert found.same
    assert found.equal == found.requests > 0
    asked = [each for each in read if each.request is not None]
    assert all(one.file < two.file for one, two in pairwise(asked))
    less = compare_sessions(read, [each for each in read if each is not asked[-1]])
    assert less.first is not None
    assert (less.first.file, less.first.against_file) == (asked[-1].file, None)
