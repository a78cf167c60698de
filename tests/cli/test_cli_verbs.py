"""The commands that look at a running node and steer it, on a node of its own: the real control plane, journal
and scheduler, on containers and engines in memory.
"""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve
from click.testing import CliRunner, Result
from fleet_kit import hollow_task
from hollow_node import open_hollow
from journal_samples import make_trajectory
from rich.console import Console

from polarnode.cli import node_view, output, verbs, watching
from polarnode.cli.main import main as command
from polarnode.client import AsyncPolarnodeClient
from polarnode.client.values import Event
from polarnode.core.trajectory import ForkedFrom, Outcome
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.opening import open_node
from polarnode.node.serving import serve_control_plane


@define(eq=False)
class Running:
    """A node, a client of it, and the command line."""

    node: Any
    client: AsyncPolarnodeClient
    state: Path

    async def invoke(self, *argv: str) -> Result:
        def call() -> Result:
            return CliRunner().invoke(command, [*argv, "--url", self.client.base_url], prog_name="polarnode")

        return await trio.to_thread.run_sync(call)

    async def done(self, *argv: str) -> str:
        result = await self.invoke(*argv)
        assert result.exit_code == 0, result.output
        return result.output

    async def submit(self, **more: Any) -> tuple[str, ...]:
        return (await self.client.submit(hollow_task(**more))).session_ids

    async def running(self, count: int) -> None:
        """Wait until so many sessions run."""
        with trio.fail_after(120):
            while sum(each.phase == "run" for each in self.node.scheduler.sessions()) < count:  # noqa: ASYNC110
                await trio.sleep(0.02)

    async def over(self, task_id: str) -> None:
        async for _ in self.client.trajectories(task_id=task_id):
            pass


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Running]:
    state = folder / "state"
    config = NodeConfig(
        engine="simulated",
        port=0,
        node_id="n0",
        state_dir=str(state),
        podman_dir=str(folder / "podman"),
        import_paths=("session_kit",),
        memory_reserve_mb=1,
        disk_reserve_mb=1,
    )
    async with open_hollow(config) as (node, address):
        async with AsyncPolarnodeClient(f"http://127.0.0.1:{address.port}") as client:
            yield Running(node, client, state)
        node.cancel_all()


# ── status ────────────────────────────────────────────────────────────────────


async def test_status_shows_stages_and_consumers(tmp_path: Path) -> None:
    """The status shows stages, engines, journal and consumers."""
    async with running(tmp_path) as here:
        await here.submit(task_id="t", samples=2, seconds=600)
        await here.running(2)
        await here.client.acknowledge("trainer", 0)
        lines = (await here.done("status")).splitlines()
        raw = json.loads(await here.done("status", "--json"))
    assert lines[0].startswith("node n0 · model simulated:tiny (")
    assert "2 sessions, 0 captures" in lines[0]
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["run"] == ["run", "2", "64", "0"]
    assert rows["0"][1] == "ready"
    assert rows["trainer"][1] == "0"
    assert any(line.startswith("journal: event 0,") for line in lines)
    assert (raw["scheduler"]["live"], raw["node"]) == (2, "n0")


async def test_status_warns_in_sentences(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        found = await here.client.status()
    for stage in found["scheduler"]["stages"].values():
        stage["held_back"] = None  # this machine may be short of something now
    assert list(node_view.warnings(found)) == []
    found["weights"]["paused"] = "in_place"
    found["scheduler"]["stages"]["init"]["held_back"] = "memory is short"
    found["engine"]["hosts"][0]["last_error"] = "CUDA error"
    found["journal"]["warning"] = "the disk is nearly full"
    found["callbacks"]["trouble"] = {"http://t/": "refused"}
    assert list(node_view.warnings(found)) == [
        "generation is held (in_place): polarnode resume",
        "init: memory is short",
        "engine 0: CUDA error",
        "callbacks to http://t/: refused",
        "journal: the disk is nearly full",
    ]


def test_ages_and_sizes_are_short() -> None:
    assert [node_view.age(each) for each in (None, 0.4, 119, 121, 7300, 200_000)] == [
        "–",
        "0 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
    ]


# ── tasks ─────────────────────────────────────────────────────────────────────


async def test_tasks_are_listed_in_pages(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        for number in range(3):
            await here.submit(task_id=f"t{number}", samples=2, seconds=0.05)
            await here.over(f"t{number}")
        await here.submit(task_id="open", samples=1, seconds=600)
        lines = (await here.done("tasks", "--limit", "2")).splitlines()
        older = (await here.done("tasks", "--before", "t2")).splitlines()
        raw = json.loads(await here.done("tasks", "--json", "--limit", "1"))
    assert lines[1].split()[:4] == ["open", "open", "1", "pending"]
    assert lines[2].split()[:6] == ["t2", "done", "2", "completed", "2", "2"]
    assert lines[3] == "… more: polarnode tasks --before t2"
    assert [line.split()[0] for line in older] == ["task", "t1", "t0"]
    assert [each["task_id"] for each in raw["tasks"]] == ["open"]


async def test_session_is_forked(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        [parent] = await here.submit(task_id="parent", samples=1, seconds=0.1)
        await here.over("parent")
        name = (await here.done("fork", parent, "--turn", "0", "-n", "2", "--by", "replay")).split()[0]
        await here.over(name)
        sessions = (await here.client.task(name))["sessions"]
        found = [await here.client.trajectory(each["session_id"]) for each in sessions]
        listed = json.loads(
            (await here.done("fork", parent, "--turn", "0", "--by", "replay", "--json")).splitlines()[0]
        )
        late = await here.invoke("fork", parent, "--turn", "1", "--by", "replay")
        resumed = await here.invoke("fork", parent, "--turn", "0")
        unknown = await here.invoke("fork", "nobody", "--turn", "0")
    asked = ForkedFrom(session_id=parent, turn=0, got=0, by="replay")
    assert [each.forked_from for each in found] == [asked] * 2
    assert listed["created"] is True
    assert (late.exit_code, resumed.exit_code, unknown.exit_code) == (1, 1, 1)
    assert f"fork.turn is 1, and the turns of session '{parent}' are 0 to 0" in late.output
    assert "no session 'nobody' is in the log" in unknown.output


async def test_task_is_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await here.submit(task_id="slow", samples=2, seconds=600)
        await here.running(2)
        first = await here.done("cancel", "slow")
        await here.over("slow")
        again = json.loads(await here.done("cancel", "slow", "--json"))
        unknown = await here.invoke("cancel", "none")
    assert first == "the sessions of task slow end; each keeps the turns it has\n"
    assert again == {"task_id": "slow", "cancelled": False}
    assert (unknown.exit_code, "no task 'none'" in unknown.output) == (1, True)


# ── consumers ────────────────────────────────────────────────────


async def test_consumers_are_listed_and_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        assert await here.done("consumers") == "no consumer has a position on this node\n"
        await here.client.acknowledge("trainer", 0)
        await here.client.acknowledge("viewer", 0)
        await here.submit(task_id="t", samples=1, seconds=0.05)
        await here.over("t")
        lines = (await here.done("consumers")).splitlines()
        raw = json.loads(await here.done("consumers", "--json", "--forget", "viewer"))
        unknown = await here.invoke("consumers", "--forget", "viewer")
    assert [line.split()[:2] for line in lines[1:]] == [["trainer", "3"], ["viewer", "3"]]
    assert [each["consumer"] for each in raw["consumers"]] == ["trainer"]
    assert (unknown.exit_code, "no consumer 'viewer'" in unknown.output) == (1, True)


# ── logs ──────────────────────────────────────────────────────────────────────


async def test_logs_are_listed_printed_and_followed(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        (here.state / "node.log").write_text("first\nsecond\x1b[2J\n")
        assert await here.done("logs") == "node  17 B\n"
        assert await here.done("logs", "node", "--tail", "1") == "second␛[2J\n"
        (session,) = await here.submit(task_id="t", samples=1, seconds=600)
        log = here.state / "sessions" / f"{session}.log"
        await here.running(1)
        log.write_text("one\n")
        followed: list[str] = []
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                followed.append(await here.done("logs", session, "-f"))

            nursery.start_soon(follow)
            await trio.sleep(1)
            log.write_text("one\ntwo\n")
            await trio.sleep(1)
            await here.client.cancel("t")
            await here.over("t")
        raw = json.loads(await here.done("logs", session, "--json"))
        unknown = await here.invoke("logs", "engine-9")
        nothing = await here.invoke("logs", "-f")
    assert followed == ["one\ntwo\n"]
    assert (raw["name"], raw["ended"]) == (session, True)
    assert unknown.exit_code == 1
    assert "no session 'engine-9'" in unknown.output
    assert "the node's own logs are: node" in unknown.output
    assert (nothing.exit_code, "--follow needs one SESSION" in nothing.output) == (2, True)


# ── sessions ──────────────────────────────────────────────────────────────────


async def test_running_session_shows_log_end(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        (session,) = await here.submit(task_id="t", samples=1, seconds=600)
        await here.running(1)
        (here.state / "sessions" / f"{session}.log").write_text("".join(f"line {n}\n" for n in range(30)))
        lines = (await here.done("inspect", session)).splitlines()
        raw = json.loads(await here.done("inspect", session, "--json"))
    assert lines[0] == f"session {session}  shell  run  0 turns, 0 tokens sampled"
    assert lines[2] == "the last 20 lines of its log:"
    assert lines[3:] == [f"line {n}" for n in range(10, 30)]
    assert (raw["live"]["phase"], raw["trajectory"], raw["log"].count("\n")) == ("run", None, 20)


async def test_ended_session_shows_time_and_evaluation(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        (session,) = await here.submit(task_id="t", samples=1, seconds=0.3)
        await here.over("t")
        shown = await here.done("inspect", session)
        raw = json.loads(await here.done("inspect", session, "--json"))
    assert re.search(
        r"^time: init \d+\.\d s, waiting to run \d+\.\d s, run 0\.\d s, post", shown, re.MULTILINE
    )
    assert "trainable tokens are between" in shown
    assert raw["trajectory"]["outcome"]["status"] == "completed"


async def test_watch_line_gives_failure_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await here.submit(task_id="bad", samples=1, seconds=-1)
        lines = (await here.done("watch", "--task", "bad")).splitlines()
        raw = [
            json.loads(line) for line in (await here.done("watch", "--task", "bad", "--json")).splitlines()
        ]
    assert " · " in lines[0]
    assert raw[0]["outcome"]["reason"] in lines[0]
    assert [each["event"] for each in raw] == ["trajectory", "group", "task"]
    assert "traces" not in raw[0] or isinstance(raw[0]["traces"], int)


async def test_watch_may_omit_ended_sessions(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await here.submit(task_id="t", samples=1, seconds=0.05)
        await here.over("t")
        first = await here.done("watch", "--task", "t", "--newest", "--consumer", "late")
        await here.submit(task_id="u", samples=1, seconds=0.05)
        await here.over("u")
        then = (await here.done("watch", "--task", "u", "--newest", "--consumer", "late")).splitlines()
    assert first == ""
    assert [line.split()[0] for line in then[1:]] == ["group", "task"]


def test_failed_line_has_last_log_line() -> None:
    from polarnode.core.codec import trajectory_json

    outcome = Outcome(
        status="failed", exit_code=1, reason="the harness ended with exit code 1", log_tail="a\nNo module x\n"
    )
    value = trajectory_json(evolve(make_trajectory("s"), outcome=outcome, harness="pi"), arrays="base64")
    found = watching.line(Event(seq=1, kind="trajectory", key="trajectory:s", data=value))
    assert found.endswith(" · the harness ended with exit code 1 · last log line: No module x")


async def test_watch_table_is_below_lines(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        await here.submit(task_id="t", samples=3, seconds=600)
        await here.running(3)
        argv = [sys.executable, "-m", "polarnode.cli", "watch", "--task", "t", "--url", here.client.base_url]
        terminal = Terminal()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, terminal.run, argv)
            with trio.fail_after(60):
                while not re.search(r"session +harness +phase +turns", terminal.text):  # noqa: ASYNC110
                    await trio.sleep(0.1)
            await here.client.cancel("t")
    assert terminal.code == 0, terminal.text
    assert terminal.text.count("shell cancelled reward") == 3
    assert "task t is done: 3 cancelled" in terminal.text
    assert "3 sessions seen: 3 cancelled" in terminal.text


@define(eq=False)
class Terminal:
    """A program whose output is a terminal of 100 columns: its exit code and what it wrote, without colours."""

    code: int | None = None
    written: bytes = b""

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", self.written.decode(errors="replace"))

    def run(self, argv: list[str]) -> None:
        outer, inner = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
        with subprocess.Popen(argv, stdout=inner, stderr=inner, stdin=inner, env=environment) as child:
            os.close(inner)
            with suppress(OSError):  # the child closed its end
                while piece := os.read(outer, 65536):
                    self.written += piece
            os.close(outer)
            self.code = child.wait(30)


# ── tables ────────────────────────────────────────────────────────────────────


def test_table_of_4096_samples_is_short() -> None:
    failed = evolve(make_trajectory("bad"), outcome=Outcome(status="failed", exit_code=1))
    many = [*(make_trajectory(f"s{number}") for number in range(4095)), failed]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(output.result_table(many))
    lines = console.export_text().splitlines()
    assert len(lines) == output.MAX_ROWS + 2
    assert lines[1].split()[:1] == ["bad"], "those that did not complete come first"
    assert lines[-1].strip() == f"… {4096 - output.MAX_ROWS} more"


def test_one_row_too_many_is_shown() -> None:
    assert output.bounded(range(51)) == (range(51), ())
    assert output.bounded(range(52)) == (range(50), ("… 2 more",))


def test_serve_shares_bare_command_options() -> None:
    own = {each.name for each in command.params} - {"version"}
    assert {each.name for each in verbs.serve.params} == own
    nothing = CliRunner().invoke(command, ["serve"], prog_name="polarnode")
    assert (nothing.exit_code, "choose where the model runs" in nothing.output) == (2, True)


# ── completion ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed(shell: str) -> None:
    result = CliRunner().invoke(command, ["completion", shell], prog_name="polarnode")
    assert result.exit_code == 0
    assert f"_POLARNODE_COMPLETE={shell}_complete" in result.output


def test_bash_completes_verbs_and_options(tmp_path: Path) -> None:
    installed = tmp_path / "polarnode"
    installed.write_text(f'#!/bin/sh\nexec {sys.executable} -m polarnode.cli "$@"\n')
    installed.chmod(0o755)
    script = CliRunner().invoke(command, ["completion", "bash"], prog_name="polarnode").output
    program = f"""{script}
COMP_WORDS=(polarnode "$1" "$2"); COMP_CWORD="$3"
_polarnode_completion polarnode; printf '%s\\n' "${{COMPREPLY[@]}}"
"""

    def completed(*words: str) -> list[str]:
        return subprocess.run(
            ["bash", "-c", program, "bash", *words],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        ).stdout.split()

    assert completed("st", "", "1") == ["status"]
    assert completed("logs", "--fo", "2") == ["--follow"]


# ── with real containers ──────────────────────────────────────────────────────

SCRIPT = "for i in 1 2 3 4 5 6 7 8; do echo step $i; sleep 0.5; done; echo 'no such file' >&2; exit 3"


@pytest.mark.podman
async def test_explain_and_pause_commands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="polarnode")
    config = NodeConfig(
        engine="simulated", gpus=(0,), port=0, state_dir=str(tmp_path / "state"), warm=0, node_id="n0"
    )
    task = {
        "task_id": "steps",
        "instruction": "x",
        "harness": {"name": "shell", "command": ["bash", "-c", SCRIPT]},
    }
    with trio.fail_after(300):
        async with (
            open_node(config, report=print) as node,
            serve_control_plane(node) as address,
            AsyncPolarnodeClient(f"http://127.0.0.1:{address.port}") as client,
        ):
            here = Running(node, client, tmp_path / "state")
            (session,) = (await client.submit(task)).session_ids
            await here.running(1)
            followed = await here.done("logs", session, "-f")
            await here.over("steps")
            watched = await here.done("watch", "--task", "steps")
            shown = await here.done("inspect", session)
            names = await here.done("logs")
            held = await here.done("pause", "--mode", "retract")
            status = await here.done("status")
            raw = json.loads(await here.done("weights", "--json"))
            resumed = await here.done("resume")
            await client.update_weights("v1", path=str(TINY_MODEL))
            served = (await here.done("weights")).splitlines()
            wrong = await here.invoke("pause", "--mode", "drain")
    assert followed.splitlines() == [*(f"step {number}" for number in range(1, 9)), "no such file"]
    assert "failed" in watched
    assert "exit code 3 · last log line: no such file" in watched
    assert "step 8\nno such file" in shown
    assert "engine-0" in names
    assert held == "weights 0 · generation is held (retract)\n"
    assert "generation is held (retract): polarnode resume" in status
    assert raw["paused"] == "retract"
    assert resumed == "weights 0 · generation goes on\n"
    assert served[0] == "weights v1 · generation goes on"
    assert served[3].split()[:3] == ["v1", "in_place", "disk"]
    for line in (
        "engine host 0 is ready, with weights 0",
        "task steps is taken: 1 sessions of shell",
        "weights v1 are served (in_place,",
    ):
        assert line in caplog.text
    assert (wrong.exit_code, "'drain' is not one of" in wrong.output) == (2, True)
