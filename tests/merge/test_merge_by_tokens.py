"""Calls merged by tokens alone: what goes on in a row, what begins one, and the laws on whatever comes."""

import json
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from by_tokens_laws import Json, broken_law, fewest_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_toys import Session, ask, system, user

from polarnode.core.errors import Refused
from polarnode.core.task import BuilderSpec
from polarnode.merge.builders import build
from polarnode.merge.invariants import check_turns
from polarnode.merge.token_forest import Counts, PrefixHasher, Sessions, TurnForest, read_call


def call(turn: Any, prompt: Sequence[int], sampled: Sequence[int], session: Any = "s", **more: Any) -> Json:
    logprobs = [-0.1 * (place + 1) for place in range(len(sampled))]
    return {
        "session_id": session,
        "turn_id": turn,
        "prompt_ids": list(prompt),
        "sampled_ids": list(sampled),
        "logprobs": logprobs,
    } | more


def merged(*calls: Json) -> tuple[list[Json], Counts]:
    """The rows of whole calls, with the laws held on them."""
    sessions = Sessions()
    wrong = [sessions.take(json.dumps(each).encode(), line) for line, each in enumerate(calls, 1)]
    assert wrong == [None] * len(calls)
    rows = [json.loads(row) for row in sessions.rows()]
    assert broken_law(calls, rows) is None
    counts = sessions.counts
    assert counts.rows == len(rows) == counts.first + counts.retries + counts.broken
    assert counts.trainable == counts.sampled == sum(sum(row["loss_mask"]) for row in rows)
    return rows, counts


def ends(rows: Sequence[Json]) -> list[list[Any]]:
    return [[span["turn"] for span in row["turn_spans"]] for row in rows]


# ── rows ──────────────────────────────────────────────────────────────────────


def test_appended_session_is_one_row() -> None:
    one = call("a", [1, 2], [3, 4], weight_version="w1")
    two = call("b", [1, 2, 3, 4, 5], [6], weight_version=2)
    three = call(3, [1, 2, 3, 4, 5, 6], [7])
    (row,), counts = merged(one, two, three)
    assert row == {
        "session_id": "s",
        "token_ids": [1, 2, 3, 4, 5, 6, 7],
        "loss_mask": [0, 0, 1, 1, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.1, -0.2, 0.0, -0.1, -0.1],
        "turn_spans": [
            {"turn": "a", "start": 2, "end": 4},
            {"turn": "b", "start": 5, "end": 6},
            {"turn": 3, "start": 6, "end": 7},
        ],
        "version_spans": [{"version": "w1", "start": 2, "end": 4}, {"version": "2", "start": 5, "end": 6}],
    }
    assert counts == Counts(records=3, sessions=1, rows=1, sampled=4, trainable=4, first=1)


def test_adjacent_version_spans_are_merged() -> None:
    """Adjacent samples of one version share a span."""
    calls = [
        call(1, [1], [2, 3], weight_version="w"),
        call(2, [1, 2, 3], [4], weight_version="w"),
        call(3, [1, 2, 3, 4], [5], weight_version="x"),
    ]
    (row,), _ = merged(*calls, call(4, [1, 2, 3, 4, 5, 6], [7], weight_version="x"))
    assert row["version_spans"] == [
        {"version": "w", "start": 1, "end": 4},
        {"version": "x", "start": 4, "end": 5},
        {"version": "x", "start": 6, "end": 7},
    ]


def test_retokenized_reply_starts_counted_row() -> None:
    """A reply that came back in other tokens begins a row and is counted."""
    rows, counts = merged(
        call(1, [1, 2], [3, 4]), call(2, [1, 2, 34, 5], [6]), call(3, [1, 2, 34, 5, 6, 7], [8])
    )
    assert ends(rows) == [[1], [2, 3]]
    assert (counts.broken, counts.retries) == (1, 0)


def test_reply_shortened_in_prompt_is_broken() -> None:
    """A reply cut short in the prompt is not held."""
    rows, counts = merged(call(1, [1, 2], [3, 4]), call(2, [1, 2, 3], [9]))
    assert ends(rows) == [[1], [2]]
    assert counts.broken == 1


def test_retry_has_its_own_row() -> None:
    """A retry is a sibling with a row of its own."""
    rows, counts = merged(
        call(1, [1], [2]), call(2, [1, 2, 3], [4]), call(3, [1, 2, 3], [5]), call(4, [1, 2, 3, 5, 6], [7])
    )
    assert ends(rows) == [[1, 2], [1, 3, 4]]
    assert [row["loss_mask"] for row in rows] == [[0, 1, 0, 1], [0, 0, 0, 1, 0, 1]]
    assert (counts.broken, counts.retries) == (0, 1)


def test_each_twin_is_extended_once() -> None:
    rows, counts = merged(
        call(1, [1], [2]),
        call(2, [1], [2]),
        call(3, [1, 2, 3], [4]),
        call(4, [1, 2, 3], [5]),
        call(5, [1, 2, 3], [6]),
    )
    assert ends(rows) == [[2, 3], [1, 4], [1, 5]]
    assert (counts.broken, counts.retries) == (0, 2)


def test_interleaved_agents_have_own_rows() -> None:
    calls, texts = [], {agent: [agent] for agent in (100, 200, 300, 400)}
    for number in range(40):
        agent = (100, 200, 300, 400)[number * 7 % 4]
        prompt = [*texts[agent], number]
        calls.append(call(number, prompt, [agent + number, 1]))
        texts[agent] = [*prompt, agent + number, 1]
    rows, counts = merged(*calls)
    assert len(rows) == 4
    assert (counts.first, counts.broken) == (1, 3)


def test_longest_prefix_is_extended() -> None:
    """The longest prefix is extended, though a shorter one came later."""
    rows, _ = merged(call("long", [1, 2, 3], [4]), call("short", [1], [2]), call("on", [1, 2, 3, 4, 5], [6]))
    assert ends(rows) == [["short"], ["long", "on"]]


def test_interleaved_sessions_keep_their_order() -> None:
    rows, counts = merged(
        call(1, [1], [2], "b"),
        call(1, [1], [2], "a"),
        call(1, [1], [2], 7),
        call(2, [1, 2], [3], "a"),
        call(2, [1, 2], [4], "b"),
    )
    assert [row["session_id"] for row in rows] == ["b", "a", 7]
    assert ends(rows) == [[1, 2], [1, 2], [1]]
    assert counts.sessions == 3


def test_call_without_sample_is_only_counted() -> None:
    rows, counts = merged(
        call(1, [1], [2]), call(2, [1, 2, 3], []), call(3, [1, 2, 3, 9], [4]), call(1, [5], [], "other")
    )
    assert ends(rows) == [[1, 3]]
    assert (counts.empty, counts.sessions, counts.rows) == (2, 2, 1)


def test_prompt_may_be_empty() -> None:
    rows, counts = merged(call(1, [], [2]), call(2, [2], [3]), call(3, [], [4]))
    assert ends(rows) == [[1, 2], [3]]
    assert counts.retries == 1


def test_thousands_of_turns_without_recursion() -> None:
    turns = 3000
    text = list(range(2 * turns))
    rows, _ = merged(
        *(call(turn, text[: 2 * turn + 1], text[2 * turn + 1 : 2 * turn + 2]) for turn in range(turns))
    )
    assert [row["token_ids"] for row in rows] == [text]


def test_branch_off_every_branch_without_recursion() -> None:
    calls, text = [], [0]
    for turn in range(600):
        calls += [
            call(2 * turn, text, [turn + 1]),
            call(2 * turn + 1, [*text, turn + 1, 7], [8]),
            call(-turn - 1, [*text, turn + 1], [9]),
        ]
        text = [*text, turn + 1, 9]
    sessions = Sessions()
    assert [sessions.take(json.dumps(each).encode(), line) for line, each in enumerate(calls)] == [
        None
    ] * len(calls)
    rows = [json.loads(row) for row in sessions.rows()]
    assert len(rows) == 601
    assert sum(sum(row["loss_mask"]) for row in rows) == 1800


def test_turns_pass_the_turn_checks() -> None:
    forest = TurnForest(PrefixHasher())
    for line, each in enumerate(
        [call("a", [1], [2]), call("b", [1, 2, 3], [4]), call("c", [1, 2, 5], [6])], 1
    ):
        forest.add(read_call(json.dumps(each).encode(), line))
    turns = list(forest.turns("s"))
    check_turns(turns)
    assert [(turn.parent, list(turn.prompt_delta), list(turn.sampled), turn.lineage) for turn in turns] == [
        (None, [1], [2], 0),
        (0, [3], [4], 0),
        (0, [5], [6], 1),
    ]


def test_own_session_rows_match_prefix_merging() -> None:
    session = Session()
    messages = [system(), user()]
    for number in range(8):
        _, echo = session.say(ask(*messages), f"answer {number}")
        if number == 2:
            session.say(ask(*messages), "another answer to the same")
        if number == 4:
            session.say(ask(system("you are a helper"), user("look")), "found")
        messages = (
            [system(), user("in short: half is done")]
            if number == 5
            else [*messages, echo, user(f"more {number}")]
        )
    built = build(BuilderSpec(), session.turns)
    high = 10**6  # the toys' ids of samples are below zero
    calls = [
        call(
            turn.index,
            [high + one for one in session.prompts[turn.index]],
            [high + one for one in turn.sampled],
            logprobs=list(turn.logprobs),
        )
        for turn in session.turns
    ]
    rows, counts = merged(*calls)
    assert [[one - high for one in row["token_ids"]] for row in rows] == [
        list(trace.token_ids) for trace in built.traces
    ]
    assert [bytes(row["loss_mask"]) for row in rows] == [trace.loss_mask for trace in built.traces]
    assert [row["logprobs"] for row in rows] == [list(trace.logprobs) for trace in built.traces]
    assert ends(rows) == [[span.turn for span in trace.turn_spans] for trace in built.traces]
    assert (counts.rows, counts.retries, counts.broken) == (4, 1, 2)


# ── properties ────────────────────────────────────────────────────────────────


@st.composite
def recordings(draw: st.DrawFn) -> list[Json]:
    """Calls that go on, retry, fork, rewrite, cut and repeat in a few sessions, over few ids so that texts
    collide.
    """
    token = st.integers(1, 3)
    some = st.lists(token, max_size=3)
    calls: list[Json] = []
    for turn in range(draw(st.integers(1, 14))):
        session = draw(st.sampled_from(["s", "t"]))
        past = [each for each in calls if each["session_id"] == session]
        anew = draw(st.booleans()) and draw(st.booleans())
        before = draw(st.sampled_from(past)) if past and not anew else None
        prompt: list[int] = []
        if before is not None:
            whole = before["prompt_ids"] + before["sampled_ids"]
            prompt = draw(
                st.sampled_from([whole, before["prompt_ids"], whole[: draw(st.integers(0, len(whole)))]])
            )
        sampled = draw(some)
        logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(sampled), max_size=len(sampled)))
        version = {"weight_version": draw(st.sampled_from(["1", "2", None]))}
        calls.append(call(turn, prompt + draw(some), sampled, session, logprobs=logprobs) | version)
    return calls


@settings(max_examples=300, deadline=None)
@given(recordings())
def test_invariants_hold_with_fewest_rows(calls: list[Json]) -> None:
    """The laws hold on whatever comes in as few rows as can be."""
    _, counts = merged(*calls)
    assert counts.rows == fewest_rows(calls)


def blind() -> Sessions:
    """Sessions whose hash tells no two texts of one length apart."""
    return Sessions(hasher=PrefixHasher(weights=numpy.zeros(1024, dtype=numpy.uint64)))


@settings(max_examples=200, deadline=None)
@given(recordings())
def test_invariants_independent_of_hash(calls: list[Json]) -> None:
    """The laws do not rest on the hash."""
    sessions = blind()
    assert [sessions.take(json.dumps(each).encode(), line) for line, each in enumerate(calls)] == [
        None
    ] * len(calls)
    assert broken_law(calls, [json.loads(row) for row in sessions.rows()]) is None


def test_hash_collisions_are_no_retries() -> None:
    sessions = blind()
    for line, each in enumerate([call(1, [1, 2], [3]), call(2, [5, 2], [3]), call(3, [1, 2], [4])]):
        sessions.take(json.dumps(each).encode(), line)
    assert len(list(sessions.rows())) == 3
    assert (sessions.counts.broken, sessions.counts.retries) == (1, 1)


@settings(max_examples=100, deadline=None)
@given(recordings(), st.data())
def test_a_bad_line_costs_itself_only(calls: list[Json], data: st.DataObject) -> None:
    texts = [json.dumps(each).encode() for each in calls]
    place = data.draw(st.integers(0, len(texts)))
    bad = data.draw(
        st.sampled_from(
            [
                b"nonsense",
                b"{}",
                b"[]",
                texts[place - 1] if place else b"1",
                json.dumps(call("x", [1], [-2])).encode(),
            ]
        )
    )
    clean, dirty = Sessions(), Sessions()
    for line, text in enumerate(texts):
        assert clean.take(text, line) is None
    told = [dirty.take(text, line) for line, text in enumerate([*texts[:place], bad, b" \n", *texts[place:]])]
    assert [line for line, sentence in enumerate(told) if sentence is not None] == [place]
    assert list(dirty.rows()) == list(clean.rows())
    assert dirty.counts.bad == 1


# ── bad lines ─────────────────────────────────────────────────────────────────

GOOD = call("t", [1, 2], [3, 4])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"logprobs": [0.0]},
            "logprobs has 1 numbers for 2 sampled_ids: give the engine's logprob of each sampled id",
        ),
        ({"logprobs": [0.0, None]}, "logprobs[1] is null: a logprob is a finite float32"),
        ({"logprobs": [0.0, True]}, "logprobs[1] is true: a logprob"),
        ({"logprobs": [0.0, -1e39]}, "logprobs[1] is -1e+39: a logprob"),
        ({"logprobs": None}, "logprobs is null: give a list of numbers"),
        ({"prompt_ids": [1, -1]}, "prompt_ids[1] is -1: a token id is a whole number from 0 to 2147483647"),
        ({"prompt_ids": [2**31]}, "prompt_ids[0] is 2147483648: a token id"),
        ({"prompt_ids": [1.0]}, "prompt_ids[0] is 1.0: a token id"),
        ({"prompt_ids": [1, False]}, "prompt_ids[1] is false: a token id"),
        ({"prompt_ids": "AQID"}, 'prompt_ids is "AQID": give a list of token ids'),
        ({"sampled_ids": [1, [2]]}, "sampled_ids[1] is a list: a token id"),
        ({"sampled_ids": {}}, "sampled_ids is an object: give a list"),
        ({"session_id": ""}, 'session_id is "": give a string or a whole number'),
        ({"session_id": 1.5}, "session_id is 1.5: give a string or a whole number"),
        ({"turn_id": True}, "turn_id is true: give a string or a number"),
        ({"weight_version": 1.5}, "weight_version is 1.5: give a string or a whole number, or leave it out"),
    ],
)
def test_invalid_field_reported_with_line(change: Json, sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        read_call(json.dumps(GOOD | change).encode(), 7)
    assert str(refused.value).startswith(f"line 7: {sentence}")


@pytest.mark.parametrize("field", list(GOOD))
def test_missing_field_is_named(field: str) -> None:
    text = json.dumps({name: value for name, value in GOOD.items() if name != field}).encode()
    with pytest.raises(Refused, match=f"line 3: {field} is missing: a call has session_id"):
        read_call(text, 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(b"{", r"line 1: it is not JSON: .* \(column"), (b"[1]", "it is no JSON object"), (b"\xff", "not JSON")],
)
def test_non_call_line_is_reported(text: bytes, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        read_call(text, 1)


def test_repeated_turn_is_reported_with_line() -> None:
    sessions = Sessions()
    told = [sessions.take(json.dumps(call("t", [1, 2], [line])).encode(), line) for line in (4, 9)]
    assert told == [
        None,
        'line 9: turn_id "t" of session_id "s" is on line 4 already: give every call of a session its own',
    ]
    assert len(list(sessions.rows())) == 1
    assert (sessions.counts.bad, sessions.counts.sampled) == (1, 1)


def test_unknown_fields_may_be_true() -> None:
    assert list(read_call(json.dumps(GOOD | {"done": True, "text": "false"}).encode(), 1).prompt) == [1, 2]


# ── the checker ───────────────────────────────────────────────────────────────


def test_law_checker_rejects_mutants() -> None:
    calls = [call(1, [1], [2], weight_version="w"), call(2, [1, 2, 3], [4]), call(3, [1, 2, 3], [5])]
    rows, _ = merged(*calls)
    mutants: list[list[Json]] = [rows[:1], rows[::-1], [*rows, rows[1]]]
    for name, value in (
        ("token_ids", [1, 2, 9, 4]),
        ("loss_mask", [1, 1, 0, 1]),
        ("loss_mask", [0, 0, 0, 1]),
        ("logprobs", [0.0, -0.1, -0.1, -0.1]),
        ("logprobs", [0.0, -0.2, 0.0, -0.1]),
        ("version_spans", []),
        ("turn_spans", rows[0]["turn_spans"][:1]),
    ):
        mutants.append([rows[0] | {name: value}, rows[1]])
    mutants.append([rows[0], rows[1] | {"loss_mask": [0, 1, 0, 1], "logprobs": rows[0]["logprobs"]}])
    assert [broken_law(calls, mutant) is None for mutant in mutants] == [False] * len(mutants)
