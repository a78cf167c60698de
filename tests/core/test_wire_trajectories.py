"""Trajectories and turns, as JSON and as the journal's bytes: what is written is read back with the same
bits.
"""

import hashlib
import struct
from base64 import b64encode
from math import inf, isnan, nan
from typing import Any, Literal

import attrs
import merge_toys as toys
import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_strategies import merged, sliced, trajectories, turns

from polarnode.core.arrays import RoutedExperts, TopLogprobs, floats, ids
from polarnode.core.codec import dump_json, read_json
from polarnode.core.codec.arrays import encoder, read_floats, read_ids
from polarnode.core.codec.packing import pack_trajectory, pack_turn, unpack_trajectory, unpack_turn
from polarnode.core.codec.trajectories import read_trajectory, trajectory_json, turns_json
from polarnode.core.conversation import Answer, Json, Message, Sampling, TextPart, Usage
from polarnode.core.errors import JournalError, Refused
from polarnode.core.trajectory import (
    ContinuedFrom,
    Damaged,
    ForkedFrom,
    LeftOut,
    NewMessages,
    Outcome,
    Timing,
    Trajectory,
    Turn,
    VersionSpan,
    prompt_digests,
    sequence,
)
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import row_extras

# a whole trajectory an example, on a machine with other work
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def turn(index: int, parent: int | None, delta: list[int], sampled: list[int], **more: Any) -> Turn:
    logprobs = floats([-0.125 * (i + 1) for i in range(len(sampled))])
    spans = (VersionSpan(version=more.pop("version", "v1"), start=0, end=len(sampled)),)
    given = {
        "kind": "root" if parent is None else "extend",
        "reason": "",
        "lineage": 0,
        "provider": "anthropic",
    } | more
    return Turn(
        session_id="s",
        index=index,
        parent=parent,
        prompt_delta=ids(delta),
        prompt_length=more.get("prompt_length", len(delta)),
        sampled=ids(sampled),
        logprobs=logprobs,
        version_spans=spans,
        **given,
    )


def trajectory(*session: Turn, **more: Any) -> Trajectory:
    base: dict[str, Any] = {
        "traces": (merged(session, session[-1].index),),
        "outcome": Outcome(status="completed", exit_code=0),
        "reward": 1.0,
    }
    return Trajectory(
        session_id="s", task_id="t", group_id="g", sample_index=0, turns=session, **(base | more)
    )


SESSION = (turn(0, None, [1, 2, 3], [4, 5]), turn(1, 0, [6], [7, 8, 9], version="v2"))


def test_json_shape_is_as_promised() -> None:
    value: Any = trajectory_json(
        trajectory(*SESSION, left_out=(LeftOut(turn=0, reason="retried"),), harness="pi", model="tiny")
    )
    assert value["traces"] == [
        {
            "token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9],
            "loss_mask": [0, 0, 0, 1, 1, 0, 1, 1, 1],
            "logprobs": [0, 0, 0, -0.125, -0.25, 0, -0.125, -0.25, -0.375],
            "version_spans": [],
            "prompt_length": 3,
            "turn_spans": [
                {"turn": 0, "start": 3, "end": 5, "reward": None},
                {"turn": 1, "start": 6, "end": 9, "reward": None},
            ],
            "lineage": 0,
            "role": "main",
            "finish_reason": "stop",
            "reward": None,
            "offset": 0,
            "part": 0,
            "parts": 1,
            "over_long": False,
            "top_logprobs": None,
            "routed_experts": None,
            "teacher_logprobs": None,
            "lacks": [],
        }
    ]
    first, second = value["turns"]
    assert first["left_out"] == "retried"
    assert second["left_out"] is None
    assert second["sampled_length"] == 3
    assert second["weight_versions"] == ["v2"]
    assert "sampled" not in second
    assert (value["harness"], value["model"]) == (
        {"name": "pi", "version": None},
        {"name": "tiny", "weight_versions": ["v1", "v2"]},
    )
    assert value["outcome"] == {
        "status": "completed",
        "clock": None,
        "exit_code": 0,
        "boundary": None,
        "reason": None,
        "log_tail": None,
    }


def test_prompt_digest_can_be_recomputed() -> None:
    """The digest is of the whole prompt as little-endian int32, made here without our code."""
    digests = prompt_digests(SESSION)
    assert digests[0] == hashlib.sha256(struct.pack("<3i", 1, 2, 3)).hexdigest()
    assert digests[1] == hashlib.sha256(struct.pack("<6i", 1, 2, 3, 4, 5, 6)).hexdigest()
    orphan = turn(5, 4, [1], [2])
    assert prompt_digests((*SESSION, orphan)) == digests


def test_branch_excludes_other_lines() -> None:
    """A branch is conditioned on its own line only."""
    branch = turn(2, 0, [60, 61], [62])
    session = {t.index: t for t in (*SESSION, branch)}
    assert sequence(session, 2) == ids([1, 2, 3, 4, 5, 60, 61, 62])
    assert sequence(session, 1) == ids([1, 2, 3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize("arrays", ["json", "base64"])
@BUSY
@given(trajectories())
def test_a_trajectory_goes_round_as_json(arrays: Literal["json", "base64"], found: Trajectory) -> None:
    written = read_json(dump_json(trajectory_json(found, arrays=arrays, turns="full")))
    assert read_trajectory(written) == found
    table = read_json(dump_json(trajectory_json(found, arrays=arrays)))
    assert read_trajectory(table) == attrs.evolve(found, turns=())


@pytest.mark.parametrize("arrays", ["json", "base64"])
@pytest.mark.parametrize("odd", [-inf, inf, nan, -0.0, -1e-45, 3.4028234663852886e38])
def test_non_finite_numbers_are_read_back(arrays: Literal["json", "base64"], odd: float) -> None:
    """Numbers that JSON has no form for are read back too."""
    found = trajectory(attrs.evolve(SESSION[0], logprobs=floats([odd, -0.1])))
    body = dump_json(trajectory_json(found, arrays=arrays, turns="full"))
    back = read_trajectory(read_json(body))
    for one, other in (
        (back.turns[0].logprobs, found.turns[0].logprobs),
        (back.traces[0].logprobs, found.traces[0].logprobs),
    ):
        assert one.tobytes() == other.tobytes()
    assert b"null" not in dump_json(trajectory_json(found, arrays=arrays)["traces"][0]["logprobs"])  # type: ignore[index,call-overload]


def test_null_is_read_for_non_finite() -> None:
    """Older nodes wrote null for such a number, and other words are refused."""
    assert isnan(read_floats([None], "$")[0])
    with pytest.raises(Refused, match="must be a list of numbers"):
        read_floats(["1.5"], "$")


@BUSY
@given(trajectories())
def test_a_trajectory_goes_round_as_bytes(found: Trajectory) -> None:
    packed = [pack_turn(turn) for turn in found.turns]
    session = tuple(unpack_turn(turn) for turn in packed)
    assert session == found.turns
    assert unpack_trajectory(pack_trajectory(found), session) == found


@given(turns(logprob=st.floats(width=32)))
def test_a_turn_goes_round_bit_for_bit(found: Turn) -> None:
    again = unpack_turn(pack_turn(found))
    assert again.logprobs.tobytes() == found.logprobs.tobytes()
    assert attrs.evolve(again, logprobs=floats()) == attrs.evolve(found, logprobs=floats())


def test_left_out_auxiliary_sets_role() -> None:
    """Earlier nodes left out as auxiliary what they had recorded as main."""
    session = (turn(0, None, [1], [2]), turn(1, 0, [3], [4]))
    packed = pack_trajectory(trajectory(*session, left_out=(LeftOut(turn=0, reason="auxiliary"),)))
    found = unpack_trajectory(packed, session)
    assert [each.role for each in found.turns] == ["auxiliary", "main"]
    listed = turns_json(session, left_out=found.left_out)
    assert [(row["role"], row["left_out"]) for row in listed] == [("auxiliary", "auxiliary"), ("main", None)]


def test_derivable_trace_costs_no_tokens() -> None:
    """A trace that its turns tell costs no tokens."""
    session = (turn(0, None, list(range(5000)), list(range(1000))), turn(1, 0, [1] * 500, list(range(1000))))
    assert len(pack_trajectory(trajectory(*session))) < 400
    foreign = attrs.evolve(merged(session, 1), token_ids=ids([7]), loss_mask=b"\1", logprobs=floats([-1.0]))
    found = trajectory(*session, traces=(foreign,))
    assert unpack_trajectory(pack_trajectory(found), session) == found


@pytest.mark.parametrize("mask", [[1 << 40], [1, 0, 1 << 40], [2, 0, 1]])
def test_mask_memory_is_bounded_by_ids(mask: list[int]) -> None:
    """A damaged row of a journal without checksums may claim any length."""
    session = (turn(0, None, [1], [2]),)
    foreign = attrs.evolve(merged(session, 0), token_ids=ids([7]), loss_mask=b"\1", logprobs=floats([-1.0]))
    packed = pack_trajectory(trajectory(*session, traces=(foreign,)))
    values = msgpack.unpackb(packed[1:], raw=False, strict_map_key=False)
    assert [trace["loss_mask"] for trace in values["traces"]] == [[1, 0, 1]]
    values["traces"][0]["loss_mask"] = mask
    with pytest.raises((ValueError, JournalError)):
        unpack_trajectory(packed[:1] + msgpack.packb(values), session)


def carrying() -> tuple[Turn, ...]:
    """Two turns of 1 000 sampled tokens that carry three alternatives of each, and the experts of every
    position.
    """
    session = (turn(0, None, list(range(5000)), list(range(1000))), turn(1, 0, [1] * 500, list(range(1000))))
    starts = ((0, 5999), (5999, 7499))
    return tuple(
        attrs.evolve(
            one,
            prompt_length=end + 1 - 1000,
            top=TopLogprobs(k=3, ids=ids([one.index] * 3000), logprobs=floats([-1.0] * 3000)),
            routed=RoutedExperts(
                start=start, layers=4, top_k=2, dtype="uint8", data=bytes([one.index + 1]) * 8 * (end - start)
            ),
        )
        for one, (start, end) in zip(session, starts, strict=True)
    )


@pytest.mark.parametrize("offset", [0, 6000])
def test_derivable_trace_costs_no_extras(offset: int) -> None:
    """A trace that follows from its turns takes no room for its extras."""
    session = carrying()
    line, trained = list(session), {0, 1} if offset == 0 else {1}
    rows = row_extras(line, trained, offset=offset)
    assert rows.top is not None
    assert rows.routed is not None
    assert (rows.top.rows, rows.routed.start, rows.routed.end) == (1000 * len(trained), offset, 7499)
    whole = merged(session, 1) if offset == 0 else sliced(merged(session, 1), 0)
    found = trajectory(
        *session, traces=(attrs.evolve(whole, top=rows.top, routed=rows.routed, missing_extras=("x",)),)
    )
    packed = pack_trajectory(found)
    assert len(packed) < 450
    scored = attrs.evolve(
        found.traces[0], teacher_logprobs=floats(-0.5 * each or 0.0 for each in whole.loss_mask)
    )
    taught = attrs.evolve(found, traces=(scored,))
    assert len(pack_trajectory(taught)) < len(packed) + 4 * whole.loss_mask.count(1) + 50
    assert unpack_trajectory(pack_trajectory(taught), session) == taught
    assert unpack_trajectory(packed, session) == found
    # 8 bytes a position here, and 24 a sampled token
    assert 5999 * 8 + 24_000 < len(pack_turn(session[0])) < 5999 * 8 + 24_000 + 4 * 7000 + 500
    foreign = attrs.evolve(whole, top=rows.top.narrowed(1), routed=rows.routed.between(6100, 7000))
    other = trajectory(*session, traces=(foreign,))
    assert unpack_trajectory(pack_trajectory(other), session) == other


def test_extras_name_their_shape_in_json() -> None:
    first, one = carrying()
    value: Any = trajectory_json(trajectory(first, one), turns="full")["turns"]
    assert value[1]["top_logprobs"] == {"k": 3, "ids": [1] * 3000, "logprobs": [-1.0] * 3000}
    routed = value[1]["routed_experts"]
    assert {key: routed[key] for key in routed if key != "data"} == {
        "start": 5999,
        "layers": 4,
        "top_k": 2,
        "dtype": "uint8",
    }
    assert routed["data"] == [2] * 12_000
    wide = attrs.evolve(
        first,
        routed=RoutedExperts(
            start=0, layers=1, top_k=2, dtype="int16", data=struct.pack("<4h", 300, 1, 2, 299)
        ),
    )
    rows: Any = trajectory_json(trajectory(wide), turns="full")["turns"]
    assert rows[0]["routed_experts"]["data"] == [300, 1, 2, 299]


@pytest.mark.parametrize(
    ("field", "changed", "words"),
    [
        ("top_logprobs", {"ids": [1]}, "3 of each a row"),
        ("top_logprobs", {"k": 0}, "0 of each a row"),
        ("top_logprobs", {"logprobs": [-1.0] * 3}, "3 of each a row"),
        ("routed_experts", {"data": [0] * 7}, "8 a position"),
        ("routed_experts", {"layers": 0}, "0 a position"),
        ("routed_experts", {"start": -1}, "from -1 on"),
        ("routed_experts", {"dtype": "int16", "data": [40_000]}, "list of int16"),
        ("routed_experts", {"dtype": "int32"}, "one of"),
    ],
)
def test_misshapen_extras_are_refused(field: str, changed: dict[str, Json], words: str) -> None:
    written: Any = trajectory_json(trajectory(carrying()[0]), turns="full")
    written["turns"][0][field] |= changed
    with pytest.raises(Refused, match=words) as caught:
        read_trajectory(written)
    assert str(caught.value.path).startswith(f"$.turns[0].{field}")


def test_turn_takes_few_bytes() -> None:
    """Under 64 bytes a sampled token, the goal for a session of ordinary shape: a 2 000-token prompt, then 30
    turns of 60 in, 80 out.
    """
    text = Answer(parts=(TextPart("x" * 320),), finish_reason="stop")
    session = [
        turn(i, i - 1 if i else None, list(range(60 if i else 2000)), list(range(80)), answer=text)
        for i in range(30)
    ]
    assert sum(len(pack_turn(one)) for one in session) / (30 * 80) < 64


def test_invalid_utf8_text_keeps_trajectory() -> None:
    """Text that is no UTF-8 does not cost the trajectory."""
    found = trajectory(*SESSION, outcome=Outcome(status="failed", log_tail="half of a face: \ud83d"))
    assert unpack_trajectory(pack_trajectory(found), SESSION) == found
    read = read_trajectory(read_json(dump_json(trajectory_json(found))))
    assert read.outcome.log_tail == "half of a face: \ufffd"


def test_turn_rewards_and_lost_session_kept() -> None:
    """Rewards of turns and a lost session are written and read back."""
    trace = merged(SESSION, 1)
    spans = (attrs.evolve(trace.turn_spans[0], reward=0.1), trace.turn_spans[1])
    found = trajectory(
        *SESSION, traces=(attrs.evolve(trace, turn_spans=spans, reward=-0.25),), attempt=1, retried_as="s-2"
    )
    value: Any = trajectory_json(found)
    assert (value["attempt"], value["retried_as"], value["reward"], value["traces"][0]["reward"]) == (
        1,
        "s-2",
        1.0,
        -0.25,
    )
    assert [span["reward"] for span in value["traces"][0]["turn_spans"]] == [0.1, None]
    assert read_trajectory(read_json(dump_json(value))) == attrs.evolve(found, turns=())
    assert unpack_trajectory(pack_trajectory(found), SESSION) == found


def test_older_journal_without_turn_rewards() -> None:
    """What the node before wrote has none of these names, and neither has what this one writes where there is
    nothing to say.
    """
    found = trajectory(*SESSION)
    packed = pack_trajectory(found)
    old = msgpack.unpackb(packed[1:], raw=False)
    assert not {"attempt", "retried_as"} & set(old)
    assert [set(span) for span in old["traces"][0]["turn_spans"]] == [{"turn", "start", "end"}] * 2
    assert unpack_trajectory(packed, SESSION) == found
    value: Any = trajectory_json(found)
    older = {name: part for name, part in value.items() if name not in ("attempt", "retried_as")}
    for span in older["traces"][0]["turn_spans"]:
        del span["reward"]
    assert read_trajectory(older) == attrs.evolve(found, turns=())


def test_unknown_byte_format_is_named() -> None:
    with pytest.raises(JournalError, match="format 02"):
        unpack_turn(b"\x02" + msgpack.packb({}))
    with pytest.raises(JournalError, match="format none"):
        unpack_turn(b"")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("token_ids", [1, 2.5], "must be a list of int32"),
        ("token_ids", [2**31], "must be a list of int32"),
        ("token_ids", "???", "base64"),
        ("token_ids", "AAA=", "base64"),
        ("loss_mask", [256], "0 and 1"),
        ("logprobs", {"a": 1}, "list of numbers"),
        ("logprobs", ["x"], "list of numbers"),
    ],
)
def test_malformed_array_is_refused(field: str, value: Json, words: str) -> None:
    written: Any = trajectory_json(trajectory(*SESSION))
    written["traces"][0][field] = value
    with pytest.raises(Refused, match=words) as caught:
        read_trajectory(written)
    assert caught.value.path == f"$.traces[0].{field}"


def test_arrays_are_little_endian() -> None:
    """Whatever reads them need not be Python."""
    assert read_ids(b64encode(struct.pack("<2i", 1, -2)).decode(), "$") == ids([1, -2])
    assert encoder("base64")(floats([0.5])) == b64encode(struct.pack("<f", 0.5)).decode()


def test_client_may_be_older_than_node() -> None:
    written = trajectory_json(trajectory(*SESSION)) | {"new": 1}
    assert read_trajectory(written).session_id == "s"
    with pytest.raises(Refused) as caught:
        read_trajectory({key: value for key, value in written.items() if key != "outcome"})
    assert caught.value.path == "$.outcome"


# ── a session again from what was written ─────────────────────────────────────


def toy_session() -> toys.Session:
    """A turn that was cut, its continuation behind a close, and a branch: what restoring has to find
    again.
    """
    session = toys.Session("s")
    _, cut = session.say(toys.ask(toys.user()), "half a thou", state="partial")
    session.say(toys.ask(toys.user(), cut, toys.user("go on")), "the rest")
    session.say(toys.ask(toys.user(), cut, toys.user("or not")), "another way")
    return session


@pytest.mark.parametrize("way", ["json", "packed"])
def test_session_resumes_from_read_turns(way: str) -> None:
    """A session resumes from turns that were read back."""
    session = toy_session()
    written = trajectory(*session.turns)
    if way == "json":
        again = read_trajectory(read_json(dump_json(trajectory_json(written, turns="full")))).turns
    else:
        again = tuple(unpack_turn(pack_turn(one)) for one in session.turns)
    restored = Lineages.restore(session_id="s", secret=toys.SECRET, turns=again)
    asked = toys.ask(
        toys.user(), toys.said("half a thou"), toys.user("go on"), toys.said("the rest"), toys.user("more")
    )
    plan, same = restored.plan(asked), session.lineages.plan(asked)
    assert (plan.parent, plan.index) == (1, 3)
    assert (plan.parent, plan.before_key, plan.matched) == (same.parent, same.before_key, same.matched)


def test_every_turn_field_is_kept() -> None:
    """A new field of `Turn` must be in this turn, and then it must come back in both ways."""
    full = attrs.evolve(
        turn(1, 0, [1, 2], [3], version="v3"), role="subagent", state="partial", close_length=1, finish_reason="length", refused=True, prefill="1, ", request_key="r",
        before_key="b", message_key="m", answer=Answer(parts=(TextPart("x"),), finish_reason="length"), asked=Sampling(top_k=3),
        matched=1, messages=2, used=Sampling(top_k=4), usage=Usage(prompt_tokens=5), started=1.5, first_token_s=0.5, ended_s=2.5, notes=("n",), reason="why",
        top=TopLogprobs(k=2, ids=ids([3, 4]), logprobs=floats([-0.5, -2])),
        routed=RoutedExperts(start=4, layers=2, top_k=1, dtype="int16", data=bytes(8)),
        new_messages=NewMessages(messages=(Message(role="tool", text="ok", call_id="c1"),), tools='[{"name":"bash"}]', thinking=False),
    )  # fmt: skip
    plain_ones = [
        field.name
        for field in attrs.fields(Turn)
        if field.default is not attrs.NOTHING and getattr(full, field.name) == _default(field)
    ]
    assert plain_ones == [], "give this test's turn a value of its own for each field"
    assert unpack_turn(pack_turn(full)) == full
    assert read_trajectory(
        read_json(dump_json(trajectory_json(trajectory(SESSION[0], full), turns="full")))
    ).turns == (SESSION[0], full)


def test_every_trace_and_trajectory_field_kept() -> None:
    """As above: JSON and the journal's bytes follow from the classes, whatever fields they have."""
    session = carrying()
    trace = attrs.evolve(
        merged(session, 1), role="subagent", finish_reason="length", reward=0.5, offset=7, part=1, parts=2, over_long=True,
        top=session[0].top, routed=session[0].routed, missing_extras=("x",),
        teacher_logprobs=floats([-0.5]),
    )  # fmt: skip
    full = trajectory(
        *session, traces=(trace,), left_out=(LeftOut(turn=0, reason="r"),), metrics={"m": [1]}, timing=Timing(run_s=2.0), harness="h",
        harness_version="1", model="m", node="n", metadata={"a": None}, attempt=1, retried_as="s2", staleness=3,
        damaged=(Damaged(part="turns[7]", reason="r"),),
        forked_from=ForkedFrom(session_id="s0", turn=2, got=1, by="replay", differs="d"),
        continued_from=ContinuedFrom(session_id="s1", turn=1, run_s=2.0),
    )  # fmt: skip
    for value in (trace, full):
        plain_ones = [
            field.name
            for field in attrs.fields(type(value))
            if field.default is not attrs.NOTHING and getattr(value, field.name) == _default(field)
        ]
        assert plain_ones == [], "give this test's values a value of their own for each field"
    assert unpack_trajectory(pack_trajectory(full), session) == full
    assert read_trajectory(read_json(dump_json(trajectory_json(full, turns="full")))) == full


def _default(field: Any) -> Any:
    return field.default.factory() if hasattr(field.default, "factory") else field.default
