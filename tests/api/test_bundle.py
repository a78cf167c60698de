"""The page over a file: its answers are those that a node gives."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from control_plane_parts import Caller, open_plane
from journal_samples import make_spec, make_trajectory
from journal_writes import publish_end, submit_task

from polarnode.api.bundle import Bundle
from polarnode.api.page import read_page_files
from polarnode.core.codec import trajectory_json
from polarnode.core.errors import Refused


def letters(token: int) -> bytes:
    return chr(token + 97).encode()


def row(session_id: str, **more: Any) -> dict[str, Any]:
    return dict(trajectory_json(make_trajectory(session_id, **more), turns="full"))


async def test_bundle_answers_like_node(tmp_path: Path) -> None:
    """All but times, which a file lacks."""
    names = ("a-0", "a-1")
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        spec = make_spec(num_samples=2)
        submit_task(plane.journal, spec, task_id="a", session_ids=names, idempotency_key=None)
        for index, name in enumerate(names):
            whole = make_trajectory(name, task_id="a", sample_index=index, reward=float(index), turns=2)
            for turn in whole.turns:
                plane.journal.writer.record_turn(turn)
            publish_end(plane.journal, evolve(whole, staleness=0, harness="pi"))
        await plane.journal.writer.flush()
        caller = Caller(url=plane.url)
        lines = (await caller.get("/v1/export", turns="full")).text.splitlines()
        bundle = Bundle.of("a.jsonl", map(json.loads, lines), letters)
        wanted = {
            "groups": (await caller.get("/v1/groups")).json()["groups"][0],
            "session": (await caller.get("/v1/sessions/a-1")).json(),
            "trajectory": (await caller.get("/v1/trajectories/a-1", arrays="base64", pieces="true")).json(),
            "task": (await caller.get("/v1/tasks/a")).json(),
        }
    found = {
        name: json.loads(bundle[f"data/{name}.json"].body) for name in ("groups", "sessions/a-1", "tasks/a")
    }
    group, session = found["groups"]["groups"][0], found["sessions/a-1"]
    lost = {"ended", "submitted", "group_id"}
    assert {**group, **dict.fromkeys(lost)} == {**wanted["groups"], **dict.fromkeys(lost)}
    assert session["turns"] == wanted["session"]["turns"]
    timeless = {"finished": None, "sampled_tokens": None}
    assert {**session["session"], **timeless} == {**wanted["session"]["session"], **timeless}
    assert [each["session_id"] for each in found["tasks/a"]["sessions"]] == [
        each["session_id"] for each in wanted["task"]["sessions"]
    ]
    trajectory = json.loads(bundle["data/trajectories/a-1.json"].body)
    assert trajectory["traces"] == wanted["trajectory"]["traces"]
    assert trajectory["pieces"] == wanted["trajectory"]["pieces"]


def test_bundle_contains_pages_and_policy() -> None:
    bundle = Bundle.of("x", [row("a"), row("b", task_id="u")], letters)
    assert read_page_files().keys() <= set(bundle)
    assert len(bundle) == len(list(bundle)) == len(set(bundle))
    assert all(bundle[name].body for name in bundle)
    index = bundle["index.html"].body.decode()
    assert "data-bundle" in index
    assert "require-trusted-types-for 'script'" in index
    assert "frame-ancestors" not in index, "a document cannot say this of itself"
    assert bundle.get("data/sessions/c.json") is None
    assert bundle.get("../secret") is None


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "no trajectory to show"),
        ([row("a"), row("a")], "session a is there twice"),
        ([row("../a")], "trajectory 1 has no session_id that can name a file"),
        ([row("a"), {"session_id": "b"}], "trajectory 2 has no task_id"),
        ([{}], "trajectory 1 has no session_id"),
    ],
)
def test_empty_or_invalid_bundle_is_refused(rows: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        Bundle.of("x", rows, letters)
