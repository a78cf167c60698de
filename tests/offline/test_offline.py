"""Offline data, the pure parts: which sessions are still to run, splits, manifests, conversations in words,
rows of tokens.
"""

import io
import json
from array import array
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_samples import make_spec, make_trajectory
from merge_toys import BASH, Session, ask, said, system, told, user
from wire_strategies import trajectories

from polarnode.core.arrays import floats, ids
from polarnode.core.codec import dump_json, read_json, read_task, task_json
from polarnode.core.conversation import Message
from polarnode.core.errors import Refused
from polarnode.core.task import BuilderSpec, GroupSpec
from polarnode.core.trajectory import Built, Trace, Trajectory
from polarnode.merge.builders import build
from polarnode.merge.invariants import check
from polarnode.offline import sft_lines
from polarnode.offline.acceptance import COLUMNS, REASONS
from polarnode.offline.generation import (
    Attempt,
    Slot,
    finished,
    list_slots,
    make_manifest,
    make_split,
    next_attempt,
    read_manifest,
)
from polarnode.offline.rows import compared, messages_json, rows_of, schema, table

# ── slots ─────────────────────────────────────────────────────────────────────


def slot(task: str = "a", place: int = 0, sample: int = 0) -> Slot:
    return Slot(
        place=place,
        sample=sample,
        task=task,
        spec=make_spec(num_samples=4, group=GroupSpec(early_stop_min=3, min_usable=2)),
    )


def test_every_sample_is_grouped_task() -> None:
    """Every sample of a task is a task of its own, and all are one group."""
    slots = list(list_slots([("x", make_spec(num_samples=2)), ("y", make_spec(task_id="own", group_id="g"))]))
    orders = [each.order(0) for each in slots]
    assert [order.task_id for order in orders] == ["000000-x.0", "000000-x.1", "000001-own.0"]
    assert [order.group_id for order in orders] == ["000000-x", "000000-x", "g"]
    assert {order.num_samples for order in orders} == {1}
    assert slots[0].order(2).task_id == "000000-x.0.r2"


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(0, 99), st.integers(0, 9))
def test_source_name_becomes_task_name(name: str, sample: int, attempt: int) -> None:
    """Any name of a source becomes a name a task may have."""
    read_task(read_json(dump_json(task_json(slot(name, sample=sample).order(attempt)))))


def test_similar_names_stay_distinct() -> None:
    assert slot("a/b").named(0) != slot("a:b").named(0)


def ended(status: Any = "completed", *, empty: bool = False) -> Attempt:
    return Attempt(session_id="s", status=status, empty=empty)


@pytest.mark.parametrize(
    ("attempts", "retries", "done"),
    [
        ([], 1, False),
        ([ended()], 1, True),
        ([ended("timeout")], 1, True),
        ([ended("error")], 1, True),
        ([ended("interrupted")], 1, False),
        ([ended("cancelled"), ended()], 1, True),
        ([ended(empty=True)], 1, False),
        ([ended(empty=True)], 0, True),
        ([ended(empty=True), ended(empty=True)], 1, True),
        ([ended(empty=True), ended("interrupted", empty=True)], 1, False),
        ([ended("interrupted", empty=True), ended(empty=True)], 1, False),
        ([ended(empty=True), ended()], 1, True),
    ],
)
def test_attempts_decide_what_remains(attempts: list[Attempt], retries: int, done: bool) -> None:
    assert finished(attempts, retry_empty=retries) is done
    assert next_attempt(attempts) == len(attempts)


# ── the folder ────────────────────────────────────────────────────────────────


def test_resumed_folder_needs_same_manifest() -> None:
    """A folder resumes only with the manifest that it began with."""
    tasks = [("x", make_spec()), ("y", make_spec(num_samples=3))]
    begun = make_manifest(tasks, source="tasks", model="tiny", engine="sglang")
    assert (begun.tasks, begun.slots, begun.harness) == (2, 4, "pi")
    again = read_manifest(json.loads(dump_json(begun.json())), folder="out")
    again.check(begun, folder="out")
    other = make_manifest(
        [tasks[0], ("y", make_spec(num_samples=3, instruction="else"))],
        source="tasks",
        model="tiny",
        engine="sglang",
    )
    with pytest.raises(Refused, match="the tasks of the source are not the same any more"):
        again.check(other, folder="out")
    with pytest.raises(Refused, match="its model was 'tiny', not 'large'"):
        again.check(evolve(begun, model="large"), folder="out")
    with pytest.raises(Refused, match=r"generate\.json cannot be read"):
        read_manifest({"version": "no"}, folder="out")


# ── splits ────────────────────────────────────────────────────────────────────


def test_held_out_repositories_stay_whole() -> None:
    """A share of the repositories is held out whole."""
    repos = [{"repo": f"r{number}"} for number in range(7)] * 3
    split = make_split(repos, by="repo", share=0.1)
    assert len(split.values) == 1
    assert split == make_split(list(reversed(repos)), by="repo", share=0.1)
    assert sum(split.held_out(each) for each in repos) == 3
    assert not make_split(repos, by=None, share=0.1).held_out({"repo": "r0"})
    assert len(make_split([{"repo": "a"}, {"repo": "b"}], by="repo", share=0.99).values) == 1
    with pytest.raises(Refused, match="all tasks have the same value there"):
        make_split([{"repo": "a"}], by="repo", share=0.1)
    with pytest.raises(Refused, match="more than 0 and less than 1"):
        make_split(repos, by="repo", share=1.0)


# ── conversations ─────────────────────────────────────────────────────────────


def trajectory_of(session: Session) -> Trajectory:
    built = build(BuilderSpec(), session.turns)
    check(session.turns, built)
    return evolve(
        make_trajectory("s-1"),
        turns=session.turns,
        traces=built.traces,
        left_out=built.left_out,
        metadata={"repo": "a"},
    )


def test_line_holds_the_conversation() -> None:
    session = Session()
    head = (system(), user())
    _, one = session.say(ask(*head), "looking", calls=[("bash", '{"command": "ls"}')], thinking="hm")
    session.say(ask(*head, one, told(one.calls[0], "a.txt")), "done")
    (line,), missing = sft_lines(trajectory_of(session))
    assert missing == []
    body: Any = line.body
    call_id = one.calls[0].id
    assert body["messages"] == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "do it"},
        {
            "role": "assistant",
            "content": "looking",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "type": "function",
                    "id": call_id,
                    "function": {"name": "bash", "arguments": {"command": "ls"}},
                }
            ],
        },
        {"role": "tool", "content": "a.txt", "tool_call_id": call_id, "name": "bash"},
        {"role": "assistant", "content": "done"},
    ]
    assert body["tools"] == [
        {
            "type": "function",
            "function": {"name": "bash", "description": "run", "parameters": dict(BASH.parameters)},
        }
    ]
    assert body["sampled"] == [2, 4]
    assert (body["reward"], body["metadata"], body["lineage"]) == (1.0, {"repo": "a"}, 0)
    assert list(line.token_ids) == list(trajectory_of(session).traces[-1].token_ids)
    json.dumps(body)


def test_rendered_history_is_not_sampled() -> None:
    """History that was rendered is not said to be sampled."""
    session = Session()
    session.say(ask(user("one"), said("not ours"), user("two")), "ours")
    (line,), _ = sft_lines(trajectory_of(session))
    assert line.body["sampled"] == [3]


def test_only_main_lineage_has_line() -> None:
    """A main lineage has one line, and a sub-agent none."""
    session = Session()
    _, one = session.say(ask(user("one")), "1")
    session.say(ask(user("other"), tools=()), "sub", hints={"kind": "subagent", "agent": "x"})
    session.say(ask(user("one"), one, user("two")), "2")
    lines, _ = sft_lines(trajectory_of(session))
    assert [len(line.body["messages"]) for line in lines] == [4]  # type: ignore[arg-type]


def test_non_object_arguments_stay_text() -> None:
    shown: Any = list(
        messages_json(
            [
                Message(
                    role="assistant",
                    calls=tuple(evolve(call("bash", text)) for text in ("{", "[1]", "", "{}")),
                )
            ]
        )
    )
    assert [each["function"]["arguments"] for each in shown[0]["tool_calls"]] == ["{", "[1]", {}, {}]


def call(name: str, arguments: str) -> Any:
    from polarnode.core.conversation import ToolCall

    return ToolCall(id="c", name=name, arguments=arguments)


def test_wordless_session_has_reason_only() -> None:
    """A session without words has a reason and no line."""
    session = Session()
    session.say(ask(user()), "1")
    old = evolve(
        trajectory_of(session), turns=tuple(evolve(turn, new_messages=None) for turn in session.turns)
    )
    lines, missing = sft_lines(old)
    assert lines == []
    assert "has no words" in missing[0]


# ── rows ──────────────────────────────────────────────────────────────────────


def read_back(trajectory: Trajectory) -> list[dict[str, Any]]:
    rows = rows_of(trajectory, accepted=True, held_out=False)
    file = io.BytesIO()
    with pq.ParquetWriter(file, schema()) as writer:
        for row in rows:
            writer.write_table(table([row]))
    file.seek(0)
    found: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return found


@settings(max_examples=30, deadline=None)
@given(trajectories())
def test_read_back_equals_training_rows(trajectory: Trajectory) -> None:
    """What is read back is what was trained on."""
    found = read_back(trajectory)
    assert len(found) == len(trajectory.traces)
    for row, trace in zip(found, trajectory.traces, strict=True):
        assert array("i", row["token_ids"]) == trace.token_ids
        assert bytes(row["loss_mask"]) == trace.loss_mask
        assert array("f", row["logprobs"]).tobytes() == trace.logprobs.tobytes()
        said = row["teacher_logprobs"]
        assert (None if said is None else floats(said)) == trace.teacher_logprobs
        assert [(span["turn"], span["start"], span["end"]) for span in row["turn_spans"]] == [
            (s.turn, s.start, s.end) for s in trace.turn_spans
        ]
        assert (row["lineage"], row["part"], row["parts"], row["offset"]) == (
            trace.lineage,
            trace.part,
            trace.parts,
            trace.offset,
        )
        assert (row["session_id"], row["outcome"]) == (trajectory.session_id, trajectory.outcome.status)
        assert json.loads(row["metadata"]) == dict(trajectory.metadata)


def test_read_rows_keep_the_invariants() -> None:
    session = Session()
    _, one = session.say(ask(user("one")), "a b c", calls=[("bash", "{}")])
    session.say(ask(user("one"), one, told(one.calls[0], "r")), "d")
    trajectory = trajectory_of(session)
    traces = [
        Trace(
            lineage=row["lineage"],
            token_ids=ids(row["token_ids"]),
            loss_mask=bytes(row["loss_mask"]),
            logprobs=floats(row["logprobs"]),
            prompt_length=row["prompt_length"],
            turn_spans=tuple(
                evolve(trajectory.traces[0].turn_spans[0], **span) for span in row["turn_spans"]
            ),
            version_spans=tuple(
                evolve(trajectory.traces[0].version_spans[0], **span) for span in row["version_spans"]
            ),
            role=row["role"],
        )
        for row in read_back(trajectory)
    ]
    counted = check(session.turns, Built(traces=tuple(traces)))
    assert counted.trainable == sum(len(turn.sampled) for turn in session.turns)


def test_empty_rows_make_a_table() -> None:
    assert table([]).num_rows == 0


# ── words against tokens ──────────────────────────────────────────────────────


def test_words_compare_with_trained_tokens() -> None:
    assert compared([1, 2, 3], [1, 2, 3]).found == "equal"
    assert compared([1, 2, 3], [1, 2, 3, 4]).found == "equal"  # a line feed behind the turn's end
    assert compared([1, 2, 3], [1, 9, 3]) == evolve(
        compared([1, 2, 3], [1, 9, 3]), found="differs", at=1, length=3
    )
    assert compared([1, 2, 3], [1, 2]).found == "differs"
    assert compared([1, 2, 3], [1, 2, 3, *range(9)]).found == "differs"


# ── the page ──────────────────────────────────────────────────────────────────


def test_page_documents_every_column() -> None:
    """The page names every column, reason and field."""
    page = (Path(__file__).parents[2] / "docs" / "offline-data.md").read_text()
    session = Session()
    session.say(ask(user()), "1")
    (line,), _ = sft_lines(trajectory_of(session))
    named = [*COLUMNS, *REASONS, *schema().names, *line.body]
    assert [name for name in named if f"`{name}`" not in page and name != "accepted"] == []
