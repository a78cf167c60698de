"""Polar's routes over a real journal and a stand-in that takes tasks: every field as Polar's own models have
it, every refusal as FastAPI's.
"""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import polar_client as polar
import pytest
import trio
from attrs import define, evolve, field
from control_plane_parts import Plane, TaskTaker, open_exchange
from journal_samples import make_trajectory
from journal_writes import cancel_task, publish_end, submit_task
from polar_client import PolarClient, Refused

from polarnode.api.app import control_plane
from polarnode.api.metrics import Figures
from polarnode.api.routes import ControlRoutes
from polarnode.api.timeseries import History
from polarnode.core.conversation import Message, Sampling
from polarnode.core.errors import Busy, DiskFull
from polarnode.core.status import CaptureStatus, LiveSessionStatus, OpenedCapture
from polarnode.core.task import CaptureEnd, CaptureSpec, HarnessSpec, TaskSpec
from polarnode.core.trajectory import NewMessages, Outcome, Trajectory
from polarnode.engine.routing import EngineStatistics, HostStatistics
from polarnode.engine.weight_values import PauseOrder
from polarnode.http.server import Address, open_server
from polarnode.integrations.polar.extension import polar_extension
from polarnode.integrations.trainer_sampling import UNCUT
from polarnode.journal import entries, queries
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.log.port import LogUnavailable
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.support.concurrency import SemaphoreStatistics

REQUEST: dict[str, Any] = {
    "task_id": "calc-7",
    "instruction": "Add a power operator.",
    "num_samples": 2,
    "timeout_seconds": 1200,
    "agent": {"harness": "codex", "model_name": "policy"},
    "builder": {"strategy": "prefix_merging", "config": {}},
    "evaluator": {"strategy": "session_completed"},
    "metadata": {"group_id": 3, "policy_version": 12, "rollout_step": 12, "instance": "abc"},
}


@define(eq=False)
class Held:
    """Generation as the node holds it."""

    mode: str | None = None

    async def pause(self, order: PauseOrder) -> None:
        await trio.lowlevel.checkpoint()
        self.mode = order.mode

    async def resume(self) -> None:
        await trio.lowlevel.checkpoint()
        self.mode = None


@define(eq=False)
class OpenCaptures:
    """Captures into the journal, as the node has them."""

    journal: Journal
    ended: dict[str, CaptureEnd] = field(factory=dict)

    async def begin(self, spec: CaptureSpec) -> OpenedCapture:
        task = TaskSpec(instruction="(capture)", harness=HarnessSpec(name="capture"), metadata=spec.metadata)
        submit_task(self.journal, task, task_id="task-c", session_ids=("c0",), idempotency_key=None)
        await self.journal.writer.flush()
        urls = {"openai": "http://127.0.0.1:9/v1"}
        return OpenedCapture(
            session_id="c0",
            task_id="task-c",
            group_id="task-c",
            sample_index=0,
            key="sk-c",
            base_urls=urls,
            env={},
            expires_s=1.0,
        )

    async def end(self, session_id: str, said: CaptureEnd) -> Trajectory | None:
        await trio.lowlevel.checkpoint()
        self.ended[session_id] = said
        return None

    def list(self) -> tuple[CaptureStatus, ...]:
        return ()


@define(eq=False)
class BusyTaker(TaskTaker):
    """The stand-in with an engine and stages to look at."""

    held: Held = field(factory=Held)
    listed: list[LiveSessionStatus] = field(factory=list)
    ended: list[str] = field(factory=list)
    version: str = "v3"
    hosts: tuple[HostStatistics, ...] = ()

    def sessions(self) -> tuple[LiveSessionStatus, ...]:
        return tuple(self.listed)

    def end_session(self, session_id: str) -> bool:
        self.ended.append(session_id)
        return True

    def figures(self) -> Figures:
        engine = EngineStatistics(
            hosts=self.hosts,
            vocab_size=1,
            context_length=1,
            weight_version=self.version,
            paused=self.held.mode,
        )
        stages = {
            name: SemaphoreStatistics(limit=4, inside=1, waiting=2)
            for name in ("live", "init", "run", "post")
        }
        return Figures(
            tally=self.tally.copied(),
            engine=engine,
            stages=stages,
            live=len(self.live),
            journal_bytes=1,
            journal_backlog=0,
        )


@define(eq=False)
class Parts:
    """What a test looks at."""

    plane: Plane
    client: PolarClient
    sessions: list[LiveSessionStatus] = field(factory=list)
    ended: list[str] = field(factory=list)
    captures: OpenCaptures | None = None

    @property
    def journal(self) -> Journal:
        return self.plane.journal

    async def task(self, polar_id: str) -> TaskSpec:
        found = await self.journal.reader.query(entries.latest_run, polar_id)
        assert found is not None
        return found.spec

    async def over(self, polar_id: str, *, status: Any = "completed", **more: Any) -> None:
        """End all sessions of a task."""
        found = await self.journal.reader.query(entries.latest_run, polar_id)
        assert found is not None
        for place in found.sessions:
            self.end(place.session_id, found.task_id, place.sample_index, found.spec, status=status, **more)
        await self.journal.writer.flush()

    def end(
        self,
        session_id: str,
        task_id: str,
        sample_index: int,
        spec: TaskSpec,
        *,
        status: Any = "completed",
        **more: Any,
    ) -> None:
        made = worded(
            make_trajectory(session_id, task_id=task_id, sample_index=sample_index, turns=2, status=status)
        )
        for turn in made.turns:
            self.journal.writer.record_turn(turn)
        publish_end(
            self.journal, evolve(made, metadata=spec.metadata, **({"node": "n0", "model": "tiny"} | more))
        )


def worded(trajectory: Trajectory) -> Trajectory:
    """With what each turn heard."""
    said = [
        (Message(role="system", text="Be brief."), Message(role="user", text="Hello?")),
        (Message(role="user", text="And then?"),),
    ]
    return evolve(
        trajectory,
        turns=tuple(
            evolve(turn, new_messages=NewMessages(messages=said[turn.index])) for turn in trajectory.turns
        ),
    )


@asynccontextmanager
async def open_parts(
    path: Path,
    *,
    token: str | None = None,
    headers: dict[str, str] | None = None,
    volumes: tuple[str, ...] = (),
) -> AsyncIterator[Parts]:
    async with open_journal(path / "journal.sqlite", now=lambda: 1000.0) as journal:
        service, captures = BusyTaker(journal=journal), OpenCaptures(journal)
        service.generation, service.captures = service.held, captures
        service.volumes = volumes
        app = control_plane(
            ControlRoutes(service=service).rows(), token=token, extensions=[polar_extension(service)]
        )
        async with open_server(app, Address(host="127.0.0.1", port=0)) as address:
            url = f"http://127.0.0.1:{address.port}"
            history = History(figures=service.figures, now=lambda: 1000.0)
            plane = Plane(url=url, journal=journal, service=service, history=history)
            yield Parts(
                plane=plane,
                client=PolarClient(url=url, headers=headers or {}),
                sessions=service.listed,
                ended=service.ended,
                captures=captures,
            )


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    async with open_parts(tmp_path) as opened:
        yield opened


# ── submit and poll ───────────────────────────────────────────────────────────


async def test_request_becomes_task_and_finishes(parts: Parts) -> None:
    assert await parts.client.submit(REQUEST) == "calc-7"
    assert (await parts.task("calc-7")).sampling == Sampling(**UNCUT)  # what its bridge computes logprobs for
    running = await parts.client.status("calc-7")
    assert (running.status, running.total_sessions, running.completed_sessions, running.results) == (
        "running",
        2,
        0,
        (),
    )
    await parts.over("calc-7")
    done = await parts.client.finished("calc-7")
    assert (done.status, done.completed_sessions, len(done.results), done.result_paths) == (
        "completed",
        2,
        2,
        (),
    )
    spec = await parts.task("calc-7")
    assert (spec.harness.name, spec.num_samples, spec.budgets.run_s, spec.builder.name) == (
        "codex",
        2,
        1200,
        "prefix_merging",
    )


async def test_status_has_partial_results(parts: Parts) -> None:
    await parts.client.submit(REQUEST)
    spec = await parts.task("calc-7")
    parts.end("calc-7-1", "calc-7", 1, spec)
    await parts.journal.writer.flush()
    found = await parts.client.status("calc-7")
    assert (found.status, found.completed_sessions, [each.session_id for each in found.results]) == (
        "running",
        1,
        ["calc-7-1"],
    )
    assert (await parts.client.status("calc-7", results="false")).results == ()


async def test_result_fields_match_polar(parts: Parts) -> None:
    await parts.client.submit(REQUEST)
    await parts.over("calc-7")
    result = (await parts.client.status("calc-7")).results[0]
    assert (result.session_id, result.task_id, result.status, result.node_id, result.error) == (
        "calc-7-0",
        "calc-7",
        "COMPLETED",
        "n0",
        None,
    )
    assert {name: result.metadata[name] for name in ("group_id", "policy_version", "instance")} == {
        "group_id": 3,
        "policy_version": 12,
        "instance": "abc",
    }
    said = result.trajectory.metadata
    assert (said.builder, said.api_type, said.model_requested, said.model_used) == (
        "prefix_merging",
        "anthropic",
        "policy",
        "tiny",
    )
    assert (said.record_count, said.trace_count, said.group_id, said.policy_version, said.rollout_step) == (
        2,
        1,
        3,
        12,
        12,
    )
    assert said.task_metadata == REQUEST["metadata"]
    trace = result.trajectory.traces[0]
    assert (trace.prompt_ids, trace.response_ids, trace.loss_mask, trace.reward) == (
        (0, 1, 2, 3),
        (1000, 1001, 1002),
        (1, 1, 1),
        None,
    )
    assert trace.response_logprobs == (-0.5, -0.5, -0.5)
    assert [message["content"] for message in trace.prompt_messages] == ["Be brief.", "Hello?"]
    assert [(message["role"], message["content"]) for message in trace.response_messages] == [
        ("assistant", "hello")
    ]
    assert trace.metadata["polarnode"]["weight_versions"] == ["v1"]


@pytest.mark.parametrize(
    ("status", "word", "task_word"),
    [
        ("completed", "COMPLETED", "completed"),
        ("timeout", "TIMEOUT", "completed"),
        ("failed", "ERROR", "completed"),
        ("cancelled", "ERROR", "completed"),
    ],
)
async def test_statuses_have_polar_words(parts: Parts, status: Any, word: str, task_word: str) -> None:
    await parts.client.submit(REQUEST)
    await parts.over(
        "calc-7",
        status=status,
        outcome=Outcome(status=status, reason=None if status == "completed" else "because"),
    )
    found = await parts.client.status("calc-7")
    assert found.status == task_word
    assert {(each.status, each.trajectory.status, len(each.trajectory.traces)) for each in found.results} == {
        (word, word, 1)
    }
    assert {each.error for each in found.results} == {None if status == "completed" else "because"}


@pytest.mark.parametrize("clock", ["turns", "repeats"])
async def test_call_budget_uses_polar_words(parts: Parts, clock: Any) -> None:
    await parts.client.submit({**REQUEST, "max_steps": 5})
    assert (await parts.task("calc-7")).budgets.max_turns == 5
    await parts.over("calc-7", outcome=Outcome(status="timeout", clock=clock, reason="its budget is spent"))
    result = (await parts.client.status("calc-7")).results[0]
    assert (result.status, result.metadata["termination_reason"]) == ("TIMEOUT", "max_steps")


async def test_early_stop_priority_and_callback_apply(parts: Parts) -> None:
    more = {
        "early_stop_min_usable_sessions": 1,
        "dispatch_priority": 70,
        "callback_url": "http://127.0.0.1:9/done",
    }
    await parts.client.submit({**REQUEST, **more})
    spec = await parts.task("calc-7")
    assert (spec.group.early_stop_min, spec.priority, spec.callback_url, spec.callback_format) == (
        1,
        70,
        more["callback_url"],
        "polar_task",
    )
    await parts.client.submit({**REQUEST, "task_id": "calc-8"})
    assert (await parts.task("calc-8")).priority == 0  # Polar's own, where none is said


async def test_differences_are_noted_in_results(parts: Parts) -> None:
    """What is done otherwise is said in the answer and in each result."""
    said = await parts.client.ask(
        "POST",
        "/rollout/task/submit",
        body={**REQUEST, "surprise": 1, "agent": {"harness": "codex", "settings": {"odd": 1}}},
    )
    notes = " | ".join(said["metadata"]["notes"])
    assert "surprise is not used" in notes
    assert "agent.settings.odd is not used" in notes
    await parts.over("calc-7")
    assert (await parts.client.status("calc-7")).results[0].metadata["polarnode"]["notes"] == said[
        "metadata"
    ]["notes"]


# ── ids ───────────────────────────────────────────────────────────────────────


async def test_repeated_request_is_same_task(parts: Parts) -> None:
    """The same request again is the same task, and another body is a conflict."""
    await parts.client.submit(REQUEST)
    await parts.client.submit(REQUEST)
    assert len(await parts.journal.reader.query(queries.tasks)) == 1
    with pytest.raises(Refused) as refused:
        await parts.client.submit({**REQUEST, "instruction": "Something else."})
    assert (refused.value.status, type(refused.value.detail)) == (409, str)


async def test_id_is_reusable_after_task(parts: Parts) -> None:
    for run in (1, 2, 3):
        await parts.client.submit(REQUEST)
        assert (await parts.client.status("calc-7")).status == "running"
        await parts.over("calc-7")
        found = await parts.client.status("calc-7")
        assert {(each.task_id, each.metadata["polarnode"]["run"]) for each in found.results} == {
            ("calc-7", run)
        }
    listed = (await parts.client.ask("GET", "/tasks"))["tasks"]
    assert [(each["task_id"], each["status"]) for each in listed] == [("calc-7", "completed")]


async def test_foreign_id_is_answered_unchanged(parts: Parts) -> None:
    """An id that is no name of ours is answered as its trainer wrote it."""
    odd = "task 7 äöü (copy)"
    await parts.client.submit({**REQUEST, "task_id": odd})
    assert (await parts.client.status(odd)).task_id == odd
    assert (await parts.client.ask("GET", "/rollout/status"))["tasks"] == {odd: "running"}


# ── refusals ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("request_", "loc"),
    [
        ({}, ["body", "task_id"]),
        ({**REQUEST, "agent": {"harness": "no such"}, "num_samples": 0}, ["body", "num_samples"]),
        ({**REQUEST, "agent": {"import_path": "a:B"}}, ["body", "agent", "import_path"]),
        ({**REQUEST, "metadata": {"polarnode": {"task_id": "forged"}}}, ["body", "metadata", "polarnode"]),
        ({**REQUEST, "timeout_seconds": 0}, ["body", "timeout_seconds"]),
        (
            {
                **REQUEST,
                "agent": {
                    "harness": "shell",
                    "custom_shell": {"command": "x", "env": {}},
                    "env": {"A B": "1"},
                },
            },
            ["body", "agent", "env", "A B"],
        ),
        ({**REQUEST, "early_stop_min_usable_sessions": 9}, ["body", "early_stop_min_usable_sessions"]),
        (
            {
                **REQUEST,
                "runtime": {
                    "image": "x",
                    "prepare": [{"type": "upload_file", "source": "/etc/passwd", "target": "/p"}],
                },
            },
            ["body", "runtime", "prepare", 0, "source"],
        ),
        (
            {**REQUEST, "evaluator": {"strategy": "harbor", "config": {"tests_dir": "/etc"}}},
            ["body", "evaluator", "config", "tests_dir"],
        ),
    ],
)
async def test_invalid_request_is_refused_like_fastapi(parts: Parts, request_: Any, loc: list[Any]) -> None:
    with pytest.raises(Refused) as refused:
        await parts.client.submit(request_)
    assert refused.value.status == 422
    assert refused.value.detail[0]["loc"] == loc
    assert set(refused.value.detail[0]) == {"loc", "msg", "type"}
    assert await parts.journal.reader.query(queries.tasks) == ()


async def test_only_allowed_node_files_are_read(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "notes.txt").write_text("take notes")
    (shared / "out").symlink_to("/etc/hostname")
    async with open_parts(tmp_path, volumes=(str(shared),)) as parts:
        upload = {"type": "upload_file", "source": f"{shared}/notes.txt", "target": "/srv/notes.txt"}
        await parts.client.submit({**REQUEST, "runtime": {"image": "x:1", "prepare": [upload]}})
        assert [file.path for file in (await parts.task("calc-7")).runtime.files] == ["/srv/notes.txt"]
        for source in (f"{shared}/out", f"{shared}/../secret", "notes.txt"):
            with pytest.raises(Refused, match="422"):
                await parts.client.submit(
                    {
                        **REQUEST,
                        "task_id": "other",
                        "runtime": {"image": "x:1", "prepare": [{**upload, "source": source}]},
                    }
                )


async def test_full_node_and_disk_have_statuses(parts: Parts) -> None:
    for error, status in ((Busy("no room", retry_after=3), 429), (DiskFull("full"), 507)):
        parts.plane.service.refuses = error
        with pytest.raises(Refused) as refused:
            await parts.client.submit(REQUEST)
        assert (refused.value.status, refused.value.detail) == (status, str(error))


async def test_missing_things_give_404_detail(parts: Parts) -> None:
    for method, path in (
        ("GET", "/rollout/task/none"),
        ("DELETE", "/rollout/task/none"),
        ("GET", "/tasks/none/sessions"),
        ("GET", "/sessions/none"),
        ("DELETE", "/sessions/none"),
        ("GET", "/nodes/none"),
    ):
        with pytest.raises(Refused) as refused:
            await parts.client.ask(method, path)
        assert (refused.value.status, type(refused.value.detail)) == (404, str), path


async def test_token_is_accepted_in_three_headers(tmp_path: Path) -> None:
    async with open_parts(tmp_path, token="secret") as parts:
        password = "Basic " + b64encode(b"polar:secret").decode()  # of http://polar:secret@node:8080
        for headers in (
            {"Authorization": "Bearer secret"},
            {"X-Polar-Control-Token": "secret"},
            {"Authorization": password},
        ):
            client = PolarClient(url=parts.plane.url, headers=headers)
            assert await client.ask("GET", "/nodes")
            with pytest.raises(Refused, match="404"):
                await client.ask("GET", "/rollout/task/none")
        for headers in (
            {},
            {"Authorization": "Bearer other"},
            {"X-Polar-Control-Token": "other"},
            {"X-Polar-Control-Token": ""},
        ):
            with pytest.raises(Refused, match="401"):
                await PolarClient(url=parts.plane.url, headers=headers).ask("GET", "/nodes")


# ── cancel ────────────────────────────────────────────────────────────────────


async def test_cancelled_task_keeps_its_results(parts: Parts) -> None:
    await parts.client.submit(REQUEST)
    said = await parts.client.ask("DELETE", "/rollout/task/calc-7")
    assert (said["task_id"], said["cancelled"]) == ("calc-7", True)
    cancel_task(parts.journal, "calc-7")
    await parts.over("calc-7", status="cancelled")
    found = await parts.client.status("calc-7")
    assert (found.status, {each.status for each in found.results}) == ("failed", {"ERROR"})
    assert all(each.trajectory.traces for each in found.results)


async def test_early_cancel_refuses_later_task(parts: Parts) -> None:
    """A task that is called off before it comes is refused when it comes."""
    said = await parts.client.ask("DELETE", "/rollout/task/calc-7", register_if_missing="true")
    assert (said["status"], said["cancelled"]) == ("failed", True)
    with pytest.raises(Refused, match="409"):
        await parts.client.submit(REQUEST)


# ── the gateway ───────────────────────────────────────────────────────────────

DISPATCH: dict[str, Any] = {
    "session_id": "sk-polar-1",
    "task_id": "theirs",
    "instruction": "Do it.",
    "remaining_timeout_seconds": 60,
    "agent": {"harness": "codex"},
    "callback_url": "http://127.0.0.1:9/callbacks/session_result",
}


async def test_session_is_found_by_given_id(parts: Parts) -> None:
    said = polar.read(await parts.client.ask("POST", "/sessions", body=DISPATCH), polar.Dispatched)
    assert (said.session_id, said.task_id, said.status) == ("sk-polar-1", "theirs", "REGISTERED")
    (task,) = await parts.journal.reader.query(queries.tasks)
    assert (task.spec.num_samples, task.spec.budgets.run_s, task.spec.callback_format) == (
        1,
        60,
        "polar_session",
    )
    found = polar.read(await parts.client.ask("GET", "/sessions/sk-polar-1"), polar.SessionStatus)
    assert (found.status, found.result, found.completion_count) == ("REGISTERED", None, 0)
    parts.end(task.sessions[0].session_id, task.task_id, 0, task.spec)
    await parts.journal.writer.flush()
    found = polar.read(await parts.client.ask("GET", "/sessions/sk-polar-1"), polar.SessionStatus)
    assert found.result is not None
    assert (found.status, found.completion_count, found.result.session_id, found.result.task_id) == (
        "COMPLETED",
        2,
        "sk-polar-1",
        "theirs",
    )
    with pytest.raises(Refused, match="409"):
        await parts.client.ask("POST", "/sessions", body=DISPATCH)


async def test_bare_session_is_keyed_capture(parts: Parts) -> None:
    said = await parts.client.ask("POST", "/sessions", body={"task_id": "mine"})
    assert (said["session_id"], said["task_id"], said["status"], said["completion_count"]) == (
        "c0",
        "mine",
        "REGISTERED",
        0,
    )
    assert (said["api_key"], said["base_urls"]) == ("sk-c", {"openai": "http://127.0.0.1:9/v1"})
    assert parts.captures is not None
    gone = polar.read(await parts.client.ask("DELETE", "/sessions/c0"), polar.Deleted)
    assert (gone.deleted, gone.task_id) == (True, "mine")
    assert list(parts.captures.ended) == ["c0"]
    with pytest.raises(Refused) as refused:
        await parts.client.ask("POST", "/sessions", body={"session_id": "chosen"})
    assert (refused.value.status, refused.value.detail[0]["loc"]) == (422, ["body", "session_id"])


async def test_one_session_is_ended_alone(parts: Parts) -> None:
    await parts.client.submit(REQUEST)
    await parts.client.ask("DELETE", "/sessions/calc-7-1")
    assert parts.ended == ["calc-7-1"]
    assert "calc-7" in parts.plane.service.live
    await parts.client.submit({**REQUEST, "task_id": "alone", "num_samples": 1})
    await parts.client.ask("DELETE", "/sessions/alone-0")
    assert "alone" not in parts.plane.service.live


async def test_running_sessions_are_listed_with_status(parts: Parts) -> None:
    await parts.client.submit(REQUEST)
    for index, phase in enumerate(("run", "init")):
        parts.sessions.append(glance(f"calc-7-{index}", phase))
    listed = (await parts.client.ask("GET", "/sessions"))["sessions"]
    assert [(each["session_id"], each["status"], each["model_requested"]) for each in listed] == [
        ("calc-7-0", "RUNNING", "policy"),
        ("calc-7-1", "INITIALIZING", "policy"),
    ]
    assert [
        each["session_id"]
        for each in (await parts.client.ask("GET", "/sessions", status="RUNNING"))["sessions"]
    ] == ["calc-7-0"]
    assert len((await parts.client.ask("GET", "/sessions", limit=1))["sessions"]) == 1
    rows = (await parts.client.ask("GET", "/tasks/calc-7/sessions"))["sessions"]
    assert [each["status"] for each in rows] == ["RUNNING", "INITIALIZING"]


def glance(session_id: str, phase: Any) -> LiveSessionStatus:
    return LiveSessionStatus(
        session_id=session_id, task_id="calc-7", harness="codex", phase=phase, turns=0, sampled_tokens=0
    )


async def test_completions_have_conversation_and_ids(parts: Parts) -> None:
    await parts.client.submit(REQUEST)
    await parts.over("calc-7")
    said = await parts.client.ask("GET", "/sessions/calc-7-0/completions")
    assert [each["completion_id"] for each in said["completions"]] == ["msg_calc-7-0_0", "msg_calc-7-0_1"]
    first, second = said["completions"]
    record = polar.read(first, polar.CompletionRecord)
    assert record.original_request == {}
    assert [each["content"] for each in second["request"]["messages"]] == [
        "Be brief.",
        "Hello?",
        "hello",
        "And then?",
    ]
    choice = second["response"]["choices"][0]
    assert (choice["message"]["content"], choice["token_ids"]) == ("hello", [1000, 1001, 1002])
    assert choice["input_token_ids"] == [0, 1, 2, 3]  # as the sample says its prompt's length
    assert first["metadata"]["api_type"] == "anthropic"


# ── the node ──────────────────────────────────────────────────────────────────


async def test_node_is_listed_like_polars(parts: Parts) -> None:
    (info,) = [polar.read(each, polar.NodeInfo) for each in await parts.client.ask("GET", "/nodes")]
    assert (info.node_id, info.max_run_workers, info.healthy, info.gateway_url) == (
        "n0",
        4,
        True,
        parts.plane.url,
    )
    assert info.metrics == polar.StageMetrics(
        init_queue_depth=4,
        init_inflight=1,
        ready_depth=2,
        run_inflight=1,
        postrun_queue_depth=2,
        postrun_inflight=1,
    )
    assert polar.read(await parts.client.ask("GET", "/nodes/n0"), polar.NodeInfo).node_id == "n0"
    health = await parts.client.ask("GET", "/health")
    assert (health["status"], health["nodes"], health["node_id"], health["available_run"]) == (
        "ok",
        1,
        "n0",
        3,
    )


async def test_generation_pauses_and_resumes(parts: Parts) -> None:
    for method, path, paused in (
        ("GET", "status", False),
        ("POST", "pause", True),
        ("GET", "status", True),
        ("POST", "resume", False),
    ):
        found = polar.read(await parts.client.ask(method, f"/admin/inference/{path}"), polar.InferenceStatus)
        assert (found.paused, found.drained, found.policy_version) == (paused, True, "v3")


async def test_calls_awaiting_resume_are_not_inflight(parts: Parts) -> None:
    """Polar's bridge stops its trainer at a pause that leaves calls in flight."""
    parts.plane.service.hosts = (
        HostStatistics(
            index=0, state="up", pid=1, gpus=(0,), in_flight=3, running=3, waiting=0, token_usage=0.1,
            restarts=0, weight_version="v3", last_error=None,
        ),
    )  # fmt: skip
    expected = {"status": (False, 3, 0), "pause": (True, 0, 3), "resume": (False, 3, 0)}
    for action, (paused, inflight, held) in expected.items():
        method = "GET" if action == "status" else "POST"
        found = polar.read(
            await parts.client.ask(method, f"/admin/inference/{action}"), polar.InferenceStatus
        )
        assert (found.paused, found.drained, found.inflight, found.held) == (paused, paused, inflight, held)


async def test_all_gateways_pause_and_resume(parts: Parts) -> None:
    paused = polar.read(
        await parts.client.ask("POST", "/rollout/admin/inference/pause", timeout_seconds=300.0),
        polar.AllPaused,
    )
    assert (paused.all_paused, paused.all_drained, paused.inflight) == (True, True, 0)
    assert [(each.node_id, each.response["paused"]) for each in paused.nodes] == [("n0", True)]
    resumed = polar.read(await parts.client.ask("POST", "/rollout/admin/inference/resume"), polar.AllResumed)
    assert resumed.all_resumed
    assert [each.response["paused"] for each in resumed.nodes] == [False]


async def test_unsampled_policy_version_is_not_acknowledged(parts: Parts) -> None:
    for served, acknowledged in (("v3", False), ("7", False), ("12", True)):
        parts.plane.service.version = served
        found = polar.read(
            await parts.client.ask("POST", "/rollout/admin/policy_version", version=12), polar.AllUpdated
        )
        assert (found.all_updated, found.policy_version) == (acknowledged, 12)
        (node,) = found.nodes
        assert (node.response["policy_version"] == 12) is acknowledged
        assert await parts.client.ask("POST", "/admin/policy_version", version=12) == node.response
    with pytest.raises(Refused) as refused:
        await parts.client.ask("POST", "/rollout/admin/policy_version", version="latest")
    assert (refused.value.status, refused.value.detail[0]["loc"]) == (422, ["query", "version"])


async def test_tasks_filter_by_status_harness_time(parts: Parts) -> None:
    await parts.client.submit(REQUEST)
    await parts.client.submit({**REQUEST, "task_id": "b", "agent": {"harness": "claude_code"}})
    await parts.over("b")

    async def ids(**params: Any) -> list[str]:
        return [each["task_id"] for each in (await parts.client.ask("GET", "/tasks", **params))["tasks"]]

    assert await ids() == ["b", "calc-7"]
    assert await ids(limit=1) == ["b"]
    assert await ids(status="running") == ["calc-7"]
    assert await ids(harness="claude_code") == ["b"]
    assert await ids(since=2000) == []
    with pytest.raises(Refused, match="422"):
        await ids(since="yesterday")
    with pytest.raises(Refused, match="422"):
        await ids(limit=0)


async def test_events_follow_sessions(parts: Parts) -> None:
    await parts.client.submit(REQUEST)
    spec = await parts.task("calc-7")
    async with open_exchange(parts.plane.url, "GET", "/events", {}, {}) as exchange:
        await exchange.head()
        reader = Reader(exchange)
        assert (await reader.next())[0] == "hello"
        parts.sessions.append(glance("calc-7-0", "run"))
        assert (await reader.next())[1] == {
            "type": "session.state_changed",
            "session_id": "calc-7-0",
            "task_id": "calc-7",
            "status": "RUNNING",
            "node_id": "n0",
        }
        parts.end("calc-7-0", "calc-7", 0, spec)
        await parts.journal.writer.flush()
        parts.sessions.clear()
        assert (await reader.next())[1]["status"] == "COMPLETED"


async def test_events_survive_missing_log(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    await parts.client.submit(REQUEST)
    parts.sessions.append(glance("calc-7-0", "run"))
    session, asked = SqliteLog.session, trio.Event()

    async def away_once(log: SqliteLog, session_id: str) -> Any:
        if asked.is_set():
            return await session(log, session_id)
        asked.set()
        raise LogUnavailable("the log is away")

    async with open_exchange(parts.plane.url, "GET", "/events", {}, {}) as exchange:
        await exchange.head()
        reader = Reader(exchange)
        assert (await reader.next())[1]["sessions"] == 1
        monkeypatch.setattr(SqliteLog, "session", away_once)
        parts.sessions.clear()
        await asked.wait()
        assert (await reader.next())[1]["session_id"] == "calc-7-0"


@define(eq=False)
class Reader:
    """Server-sent events, one at a time."""

    exchange: Any
    text: str = ""

    async def next(self) -> tuple[str, Any]:
        while "\n\n" not in self.text:
            self.text += (await self.exchange.part()).data.decode()
        head, _, self.text = self.text.partition("\n\n")
        fields = dict(line.split(": ", 1) for line in head.splitlines())
        return fields["event"], json.loads(fields["data"])
