"""The parts of Polar's face that need no socket: names, refusals, what of the node's machine a request may
read.
"""

import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from journal_samples import make_spec, make_trajectory, make_turn
from journal_writes import publish_end, submit_task

from polarnode.api.service import NotFound
from polarnode.core.codec.tasks import NAME
from polarnode.core.errors import Busy, Conflict, DiskFull, JournalError, PolarnodeError, Refused
from polarnode.core.status import LiveSessionStatus
from polarnode.integrations.polar import answers, completions, gateway, tasks
from polarnode.integrations.polar.answers import (
    dispatch_name,
    live_sessions,
    result_head,
    run_name,
    session_body,
    status_head,
    task_body,
    task_name,
)
from polarnode.journal import queries
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.sources.polar import convert_request
from polarnode.sources.source import spec_of

REQUEST: dict[str, Any] = {"task_id": "t", "instruction": "Do it.", "agent": {"harness": "codex"}}

# ── names ─────────────────────────────────────────────────────────────────────


@given(st.text(max_size=300))
def test_every_id_has_own_valid_name(polar_id: str) -> None:
    """Every id has a name of its own that is one of ours."""
    for name in (task_name(polar_id), dispatch_name(polar_id), run_name(task_name(polar_id), 999_999)):
        assert NAME.fullmatch(name), name
    assert task_name(polar_id) == task_name(polar_id)


@given(
    st.sampled_from(["a", "a:run-2", "a:run-", "session:a", "polar-a", "a b", "a/b", "ä"]),
    st.sampled_from(["a", "a:run-2", "a b", "a_b", "ä"]),
)
def test_two_ids_are_two_names(one: str, other: str) -> None:
    assert (task_name(one) == task_name(other)) == (one == other)


def test_valid_name_is_kept() -> None:
    assert [task_name(each) for each in ("django__django-11099", "12-3", "a.b:c")] == [
        "django__django-11099",
        "12-3",
        "a.b:c",
    ]
    assert (run_name("a", 1), run_name("a", 2)) == ("a", "a:run-2")


# ── refusals ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("x"), 404),
        (Conflict("x"), 409),
        (Busy("x", retry_after=2.5), 429),
        (DiskFull("x"), 507),
        (JournalError("x"), 500),
    ],
)
async def test_refusal_keeps_its_status(error: PolarnodeError, status: int) -> None:
    said = answers.refusal(error)
    assert (said.status_code, json.loads(await said.get_data())) == (status, {"detail": "x"})
    assert said.headers.get("Retry-After") == ("3" if isinstance(error, Busy) else None)


@pytest.mark.parametrize(
    ("path", "loc"),
    [
        (None, ["body"]),
        ("$", ["body"]),
        ("$.agent.env['A B']", ["body", "agent", "env", "A B"]),
        ("$.runtime.prepare[0].source", ["body", "runtime", "prepare", 0, "source"]),
        ("?limit", ["query", "limit"]),
    ],
)
async def test_field_is_named_like_fastapi(path: str | None, loc: list[Any]) -> None:
    said = answers.refusal(Refused("x", path=path))
    assert (said.status_code, json.loads(await said.get_data())["detail"]) == (
        422,
        [{"loc": loc, "msg": "x", "type": "value_error"}],
    )


def test_moment_has_polar_format() -> None:
    assert answers.moment(0.5) == "1970-01-01T00:00:00.500000+00:00"


# ── what a request may read of the node's machine ─────────────────────────────


def test_request_without_files_needs_no_folder() -> None:
    found = convert_request(
        {**REQUEST, "callback_url": "http://127.0.0.1:9/x", "early_stop_min_usable_sessions": 1}, volumes=()
    )
    spec = spec_of(found)
    assert (spec.task_id, spec.callback_url, spec.callback_format, spec.group.early_stop_min) == (
        "t",
        "http://127.0.0.1:9/x",
        "polar_task",
        1,
    )
    assert not any("callback_url" in note for note in found.notes)


@pytest.mark.parametrize(
    "more",
    [
        {
            "runtime": {
                "image": "x:1",
                "prepare": [{"type": "upload_file", "source": "FOLDER/secret", "target": "/x"}],
            }
        },
        {
            "runtime": {
                "image": "x:1",
                "prepare": [{"type": "upload_dir", "source": "FOLDER", "target": "/x"}],
            }
        },
        {"agent": {"harness": "codex", "skills_path": "FOLDER"}},
        {"evaluator": {"strategy": "harbor", "config": {"tests_dir": "FOLDER"}}},
    ],
)
def test_path_outside_volumes_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "closed" / "skill").mkdir(parents=True)
    (tmp_path / "closed" / "secret").write_text("secret")
    (tmp_path / "closed" / "skill" / "SKILL.md").write_text("secret")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed")
    for folder in (tmp_path / "closed", tmp_path / "open" / "link", tmp_path / "open" / ".." / "closed"):
        said = json.loads(json.dumps({**REQUEST, **more}).replace("FOLDER", str(folder)))
        with pytest.raises(Refused, match="below no folder"):
            convert_request(said, volumes=(str(tmp_path / "open"),))
        assert convert_request(said, volumes=(str(tmp_path / "closed"),))


def test_skill_leading_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open" / "skill").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "open" / "skill" / "SKILL.md").symlink_to(tmp_path / "secret")
    with pytest.raises(Refused, match="below no folder"):
        convert_request(
            {**REQUEST, "agent": {"harness": "codex", "skills_path": str(tmp_path / "open")}},
            volumes=(str(tmp_path / "open"),),
        )


# ── results, piece by piece ───────────────────────────────────────────────────


async def whole(journal: Journal, task_id: str, **more: Any) -> Any:
    task = await journal.reader.query(queries.task, task_id)
    assert task is not None
    return json.loads(
        b"".join(
            [
                piece
                async for piece in task_body(SqliteLog(journal), task, status_head(task), node="n0", **more)
            ]
        )
    )


async def test_results_are_json_for_any_count(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal", now=lambda: 1.0) as journal:
        submit_task(
            journal, make_spec(num_samples=2), task_id="t", session_ids=("a", "b"), idempotency_key=None
        )
        await journal.writer.flush()
        assert (await whole(journal, "t"))["results"] == []
        for index, session_id in enumerate(("a", "b")):
            journal.writer.record_turn(make_turn(session_id))
            publish_end(journal, make_trajectory(session_id, sample_index=index))
            await journal.writer.flush()
            said = await whole(journal, "t")
            assert (said["completed_sessions"], [each["session_id"] for each in said["results"]]) == (
                index + 1,
                ["a", "b"][: index + 1],
            )
        assert (await whole(journal, "t", results=False))["results"] == []
        task = await journal.reader.query(queries.task, "t")
        assert task is not None
        assert result_head(task) == {"task_id": "t", "status": "completed"}


async def test_pruned_session_is_reported(tmp_path: Path) -> None:
    async with open_journal(tmp_path / "journal", now=lambda: 1.0) as journal:
        submit_task(journal, make_spec(), task_id="t", session_ids=("a",), idempotency_key=None)
        await journal.writer.flush()
        task = await journal.reader.query(queries.task, "t")
        assert task is not None
        assert await session_body(SqliteLog(journal), task, task.sessions[0], node="n0") == b"null"
        journal.writer.record_turn(make_turn("a"))
        publish_end(journal, make_trajectory("a"))
        await journal.writer.flush()
        assert (await whole(journal, "t"))["results"][0]["error"] is None
        with sqlite3.connect(tmp_path / "journal") as db:  # as the retention does
            db.execute("DELETE FROM trajectories")
        db.close()
        (gone,) = (await whole(journal, "t"))["results"]
        assert (gone["session_id"], gone["status"], gone["trajectory"]["traces"]) == ("a", "COMPLETED", [])
        assert "retention" in gone["error"]


async def test_unencodable_session_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise RecursionError("maximum recursion depth exceeded")

    async with open_journal(tmp_path / "journal", now=lambda: 1.0) as journal:
        submit_task(journal, make_spec(), task_id="t", session_ids=("a",), idempotency_key=None)
        journal.writer.record_turn(make_turn("a"))
        publish_end(journal, make_trajectory("a"))
        await journal.writer.flush()
        monkeypatch.setattr(answers, "session_result", fail)
        (lost,) = (await whole(journal, "t"))["results"]
        assert (lost["session_id"], lost["status"], lost["trajectory"]["traces"]) == ("a", "COMPLETED", [])
        assert "cannot be written (RecursionError" in lost["error"]


# ── the rest ──────────────────────────────────────────────────────────────────


def test_constants_match_polar() -> None:
    assert (tasks.MOST_TASKS, gateway.SHOWN, gateway.HEARTBEAT_INTERVAL_S, completions.PING_INTERVAL_S) == (
        1000,
        200,
        30,
        15.0,
    )


def test_call_without_predecessor_lacks_prompt_ids() -> None:
    first, second = (evolve(make_turn("a", index), prompt_length=4 + 7 * index) for index in range(2))
    there = completions.completion_json(second, {0: first, 1: second}, model="tiny", requested=None)
    gone = completions.completion_json(second, {1: second}, model="tiny", requested=None)
    assert prompt_of(there) == [0, 1, 2, 3, 1000, 1001, 1002, 10, 11, 12, 13]
    assert prompt_of(gone) is None


def prompt_of(said: Any) -> Any:
    return said["response"]["choices"][0]["input_token_ids"]


def test_only_unfinished_sessions_are_live() -> None:
    every = [
        LiveSessionStatus(
            session_id=name,
            task_id="t",
            harness="pi",
            phase="run",
            turns=0,
            sampled_tokens=0,
            outcome=outcome,
        )
        for name, outcome in (("a", None), ("b", "completed"))
    ]
    service: Any = SimpleNamespace(sessions=lambda: every)
    assert list(live_sessions(service)) == ["a"]
