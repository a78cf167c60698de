"""Finished groups, newest first, for whoever looks: GET /v1/groups."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from control_plane_parts import Caller, Plane, open_plane
from journal_samples import make_spec, make_trajectory
from journal_writes import publish_end, submit_task

from polarnode.journal.finished_groups import finished_groups


def group(plane: Plane, task_id: str, rewards: tuple[float | None, ...], **metadata: Any) -> None:
    names = tuple(f"{task_id}-{index}" for index in range(len(rewards)))
    spec = make_spec(num_samples=len(rewards), metadata=metadata)
    submit_task(plane.journal, spec, task_id=task_id, session_ids=names, idempotency_key=None)
    for index, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        whole = make_trajectory(name, task_id=task_id, group_id=task_id, sample_index=index, reward=reward)
        for turn in whole.turns:
            plane.journal.writer.record_turn(turn)
        publish_end(plane.journal, evolve(whole, staleness=0))


async def listed(plane: Plane, **params: Any) -> list[dict[str, Any]]:
    await plane.journal.writer.flush()
    found: list[dict[str, Any]] = (await Caller(url=plane.url).get("/v1/groups", **params)).json()["groups"]
    return found


async def test_groups_are_listed_newest_first(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        group(plane, "a", (1.0, 0.0, None), level=3)
        group(plane, "b", (1.0,))
        newest, oldest = await listed(plane)
    assert (newest["task_id"], oldest["task_id"]) == ("b", "a")
    assert (oldest["state"], oldest["usable"], oldest["harness"]) == ("partial", 2, "pi")
    assert oldest["metadata"] == {"level": 3}
    assert oldest["rewards"] == [1.0, 0.0, None]
    assert oldest["advantages"] == pytest.approx([0.7071, -0.7071, None], abs=1e-4)
    assert newest["advantages"] == [0.0]


async def test_groups_filter_by_state_and_task(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        for name, rewards in (("a", (1.0, None)), ("b", (1.0, 0.0)), ("c", (0.5, 0.0))):
            group(plane, name, rewards)
        assert [each["task_id"] for each in await listed(plane, limit=2)] == ["c", "b"]
        assert [each["task_id"] for each in await listed(plane, state="partial")] == ["a"]
        assert [each["task_id"] for each in await listed(plane, state="complete", limit=1)] == ["c"]
        assert [each["task_id"] for each in await listed(plane, task_id="b")] == ["b"]
        assert await listed(plane, task_id="unknown") == []
        assert len(await listed(plane, until=1.0)) == 3
        assert await listed(plane, until=0.5) == []
        refused = await Caller(url=plane.url).get("/v1/groups", state="good")
        assert (refused.status, refused.json()["error"]["path"]) == (400, "?state")


async def test_damaged_group_is_skipped_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    async with open_plane(path) as plane:
        group(plane, "a", (1.0,))
        group(plane, "b", (0.0,))
        await plane.journal.writer.flush()
        with sqlite3.connect(path) as db:
            db.execute("UPDATE events SET body = '{' WHERE kind = 'group' AND task_id = 'a'")
        found = await plane.journal.reader.query(finished_groups, 10, None, None, None)
        assert [each["task_id"] for each in found] == ["b"]
        assert plane.journal.health.statistics().damaged_rows == 1


async def test_listing_creates_no_consumer(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        group(plane, "a", (1.0,))
        await listed(plane)
        assert plane.journal.consumers.describe() == ()


async def test_pieces_are_text_of_tokens(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        group(plane, "a", (1.0,))
        await plane.journal.writer.flush()
        caller = Caller(url=plane.url)
        plain = (await caller.get("/v1/trajectories/a-0")).json()
        found = (await caller.get("/v1/trajectories/a-0", pieces="true")).json()
        refused = await caller.get("/v1/trajectories/a-0", pieces="yes")
    assert "pieces" not in plain
    pieces = found.pop("pieces")
    assert found == plain
    assert pieces["tokens"].keys() == {str(token) for token in plain["traces"][0]["token_ids"]}
    assert (pieces["tokens"]["0"], pieces["clusters"]) == ("a", [])
    assert (refused.status, refused.json()["error"]["path"]) == (400, "?pieces")
