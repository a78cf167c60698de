"""Forks over HTTP: the task that a fork of a session means."""

from pathlib import Path
from typing import Any

import pytest
from control_plane_parts import Caller, open_plane

from polarnode.core.codec.forks import ForkOrder, fork_task
from polarnode.core.task import Budgets, ForkSpec, GroupSpec, HarnessSpec, TaskSpec
from polarnode.journal import queries

PARENT: dict[str, Any] = {
    "instruction": "do it",
    "harness": {"name": "pi"},
    "task_id": "parent",
    "group_id": "g",
    "num_samples": 4,
    "group": {"early_stop_min": 3, "max_staleness": 2},
    "budgets": {"max_turns": 9},
    "metadata": {"split": "train"},
}


async def test_fork_repeats_parent_task(tmp_path: Path) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = Caller(url=plane.url)
        await caller.post("/v1/tasks", PARENT)
        body = {"turn": 3, "num_samples": 2, "by": "replay", "budgets": {"max_turns": 12}, "task_id": "forks"}
        taken = await caller.post("/v1/sessions/parent-1/fork", body, **{"Idempotency-Key": "k"})
        again = await caller.post("/v1/sessions/parent-1/fork", body, **{"Idempotency-Key": "k"})
        found = await plane.journal.reader.query(queries.task, "forks")
    assert (taken.status, taken.json()) == (
        202,
        {"task_id": "forks", "session_ids": ["forks-0", "forks-1"], "created": True},
    )
    assert again.json() == {**taken.json(), "created": False}
    assert found is not None
    spec = found.spec
    assert (spec.instruction, spec.harness, spec.metadata) == (
        "do it",
        HarnessSpec(name="pi"),
        {"split": "train"},
    )
    assert (spec.fork, spec.num_samples, spec.group_id) == (
        ForkSpec(session="parent-1", turn=3, by="replay"),
        2,
        None,
    )
    assert (spec.budgets, spec.group) == (Budgets(max_turns=12), GroupSpec(max_staleness=2))


@pytest.mark.parametrize(
    ("session", "body", "status", "path", "words"),
    [
        ("nobody", {"turn": 0}, 404, None, "no session 'nobody' is in the log"),
        ("parent-1", {}, 400, "$.turn", "missing"),
        ("parent-1", {"turn": -1}, 400, "$.fork.turn", "must be 0 to"),
        ("parent-1", {"turn": 0, "num_samples": 0}, 400, "$.num_samples", "must be 1 to"),
        ("parent-1", {"turn": 0, "tern": 1}, 400, "$.tern", "did you mean turn?"),
        ("parent-1", {"turn": 0, "by": "hope"}, 400, "$.by", "replay"),
    ],
)
async def test_invalid_fork_is_one_sentence(
    tmp_path: Path, session: str, body: dict[str, Any], status: int, path: str | None, words: str
) -> None:
    async with open_plane(tmp_path / "journal.sqlite") as plane:
        caller = Caller(url=plane.url)
        await caller.post("/v1/tasks", PARENT)
        answer = await caller.post(f"/v1/sessions/{session}/fork", body)
    error = answer.json()["error"]
    assert (answer.status, error.get("path")) == (status, path), error
    assert words in error["message"]


def test_fork_of_fork_continues_own_parent() -> None:
    parent = TaskSpec(
        instruction="i", harness=HarnessSpec(name="pi"), fork=ForkSpec(session="root", turn=1, by="replay")
    )
    made = fork_task(parent, "child", ForkOrder(turn=2, by="replay"))
    assert made.fork == ForkSpec(session="child", turn=2, by="replay")
