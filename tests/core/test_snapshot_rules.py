"""Snapshots as values, and the rules that ask for them."""

import merge_toys as toys
import pytest

from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.conversation import Conversation, Message, ToolCall
from polarnode.core.snapshots import (
    LivingProcess,
    ReferenceKey,
    Snapshot,
    asked_for,
    has_pending_rules,
    passes,
    status_of,
)
from polarnode.core.task import SnapshotSpec
from polarnode.core.trajectory import Turn


def session() -> tuple[Turn, ...]:
    """Turns 0 to 3 of the main agent, of one, two, no and one tool calls; entropies grow with each."""
    toy, history = toys.Session(), [toys.user()]
    for count in (1, 2, 0, 1):
        _, message = toy.say(toys.ask(*history), "well", [("bash", "{}")] * count)
        history += [message, *(toys.told(call, "ok") for call in message.calls), toys.user("on")]
    return toy.turns


def test_turns_chosen_beforehand() -> None:
    named = SnapshotSpec(turns=(0, 3))
    assert [turn for turn in range(5) if asked_for(named, turn, last=0)] == [0, 3]
    every = SnapshotSpec(every=2)
    assert [asked_for(every, turn, last=last) for turn, last in ((1, 0), (2, 0), (3, 2), (5, 2))] == [
        False,
        True,
        False,
        True,
    ]
    assert not asked_for(SnapshotSpec(entropy=0.1, tool_calls=(1,)), 5, last=0)


@pytest.mark.parametrize(
    ("calls", "expected"), [((1,), [0]), ((2,), [1]), ((3,), [1]), ((4,), [3]), ((5,), []), ((1, 4), [0, 3])]
)
def test_tool_call_turn_passes(calls: tuple[int, ...], expected: list[int]) -> None:
    """The turn that makes a tool call passes."""
    turns, spec = session(), SnapshotSpec(tool_calls=calls)
    assert [turn.index for turn in turns if passes(spec, turns, turn.index)] == expected
    assert has_pending_rules(spec, turns) == (5 in calls)
    assert has_pending_rules(spec, turns[:2]) == (max(calls) > 3)


def test_uncertain_turn_passes() -> None:
    turns = session()
    means = [-sum(turn.logprobs) / len(turn.logprobs) for turn in turns]
    assert means == sorted(means)
    spec = SnapshotSpec(entropy=means[2])
    assert [passes(spec, turns, index) for index in range(5)] == [False, False, True, True, False]
    assert has_pending_rules(spec, turns)


def test_turn_without_sample_never_passes() -> None:
    toy = toys.Session()
    failed = toy.end(toy.begin(toys.ask(toys.user())), None, state="failed", sampled=[])
    assert not passes(SnapshotSpec(entropy=0.0, tool_calls=(1,)), [failed], 0)


def test_written_snapshot_hides_its_secret() -> None:
    """A written snapshot is read again, and is listed without its secret."""
    call = ToolCall(id="call_1", name="bash", arguments='{"a": 1}')
    snapshot = Snapshot(
        session_id="s",
        turn=3,
        taken=1.5,
        before_key="k",
        conversation=Conversation(
            messages=(toys.user(), Message(role="assistant", calls=(call,)), toys.told(call, "ok")),
            tools=(toys.BASH,),
            thinking=False,
        ),
        references=ReferenceKey(session_id="parent", secret="ab"),
        image="pi",
        image_id="sha256:1",
        places=("/work",),
        files=2,
        bytes=10,
        seconds=0.25,
        processes=(LivingProcess(pid=1, comm="sh", program="/bin/sh"),),
        obstacles=("one", "two"),
    )
    assert structure(read_json(dump_json(plain(snapshot))), Snapshot) == snapshot
    listed = status_of(snapshot)
    assert (listed.resumable, listed.why_not) == (False, "one; two")
    assert b"ab" not in dump_json(plain(listed)).replace(b"resumable", b"")
    assert "secret" not in repr(snapshot)
    assert LivingProcess(pid=1, comm="sh", program="sh").named() == "sh"
    assert snapshot.processes[0].named() == "sh (/bin/sh)"
