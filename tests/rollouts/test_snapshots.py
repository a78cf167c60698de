"""Snapshots of sessions: when one is taken, what is kept of them, what is told, and a fresh container from one.

Containers are in memory; `tests/containers/test_podman_snapshots.py` has the files of real ones.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

import merge_toys as toys
import pytest
import trio
from attrs import evolve
from fakes_runtime import Call
from session_kit import agent, ask, order, session_of_call, town
from trio.testing import MockClock as Clock

from polarnode.containers.inside import Process
from polarnode.core.errors import ForkError
from polarnode.core.task import HarnessSpec, McpServerSpec, SnapshotSpec
from polarnode.core.trajectory import Trajectory
from polarnode.harnesses import HARNESSES
from polarnode.rollouts import snapshots
from polarnode.rollouts.evaluations import old_kept_files
from polarnode.rollouts.run_clock import MAX_HELD_S
from polarnode.rollouts.session_containers import Containers
from polarnode.rollouts.snapshots import (
    HELD_S,
    archive_path,
    beside,
    list_snapshots,
    open_restored,
    read_snapshot,
)

SHELL = Process(pid=7, started=1, comm="sh", program="/bin/sh")
SERVER = Process(pid=8, started=2, comm="python3", program="python3")


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time does not wait for threads: while a file is written it would go on to the next deadline."""

    async def run(work: Any, *args: Any, **_: object) -> Any:
        await trio.lowlevel.checkpoint()
        return work(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run)


def told(found: Trajectory) -> dict[str, Any]:
    metrics = found.metrics["snapshots"]
    assert isinstance(metrics, dict)
    return metrics


async def run_as(outer: Any, inner: Any, call: Call) -> int:
    """Run a program of the kit within another one."""
    inner.sessions_by_key = outer.sessions_by_key
    found: int = await inner(call)
    return found


def files(folder: Path) -> list[str]:
    return sorted(name.partition(".")[2] for name in os.listdir(folder) if ".snapshot-" in name)


@pytest.mark.parametrize(
    ("spec", "turns", "removed"),
    [
        (SnapshotSpec(turns=(0, 3, 9)), [0, 3], {}),
        (SnapshotSpec(every=2), [2, 4], {}),
        (SnapshotSpec(every=1, keep=2), [4, 5], {"keep": 3}),
        (SnapshotSpec(turns=(1,), every=1, keep=2), [1, 5], {"keep": 3}),
        (SnapshotSpec(entropy=4.5), [4, 5], {"rule": 4}),
        (SnapshotSpec(tool_calls=(1,)), [], {"rule": 6}),
        (SnapshotSpec(turns=(1,), entropy=100.0), [1], {"rule": 5}),
    ],
)
async def test_snapshot_rule_decides_what_remains(
    autojump_clock: Clock, tmp_path: Path, spec: SnapshotSpec, turns: list[int], removed: dict[str, int]
) -> None:
    async with town(tmp_path, {"agent": agent(turns=6)}) as here:
        found = await here.one(snapshot_at=spec)
    assert (told(found)["turns"], told(found)["removed"], told(found)["not_taken"]) == (turns, removed, {})
    assert files(tmp_path) == sorted(f"snapshot-{turn}.{kind}" for turn in turns for kind in ("json", "tar"))
    listed = list_snapshots(tmp_path, found.session_id)
    assert [each.turn for each in listed.snapshots] == turns
    assert all(each.resumable for each in listed.snapshots)
    assert (
        here.scheduler.registry.tally.snapshots == told(found)["taken"] == len(turns) + sum(removed.values())
    )


async def test_task_without_snapshots_costs_nothing(autojump_clock: Clock, tmp_path: Path) -> None:
    held = []

    async def program(call: Call) -> int:
        await trio.lowlevel.checkpoint()
        held.append(session_of_call(program, call).before_generation)
        return 0

    async with town(tmp_path, {"agent": program}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(keep=3))
    assert held == [None]
    assert "snapshots" not in found.metrics


async def test_snapshot_holds_private_pending_requests(autojump_clock: Clock, tmp_path: Path) -> None:
    """Beside the files a snapshot has the waiting requests, which the node alone can read."""
    async with town(tmp_path, {"agent": agent(turns=3)}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(turns=(2,)))
    kept, turn = read_snapshot(tmp_path, found.session_id, 2), found.turns[2]
    assert (kept.turn, kept.before_key, kept.image_id) == (2, turn.before_key, "sha256:0")
    assert [message.text for message in kept.conversation.messages][-1] == "go on"
    assert len(kept.conversation.messages) == 5
    assert kept.references.session_id == found.session_id
    assert bytes.fromhex(kept.references.secret)
    assert set(kept.places) == {"/work", "/home/agent", "/tmp", "/var/tmp"}
    for path in (archive_path(tmp_path, found.session_id, 2),):
        assert stat.S_IMODE(beside(path).stat().st_mode) == 0o600
    assert kept.references.secret not in json.dumps(told(found))


# ── when none is taken ────────────────────────────────────────────────────────


async def side_call(program: Any, call: Call) -> None:
    """A call that the harness marks as a side call."""
    live, toy = session_of_call(program, call), toys.Session()
    toy.session_id, toy.lineages = live.session_id, live.lineages
    with live.calls.enter(trio.CancelScope()):
        pending = toy.begin(toys.ask(toys.user("name it")), hints={"kind": "auxiliary"})
        assert live.before_generation is not None
        await live.before_generation(pending.plan, None)  # type: ignore[arg-type]
        live.commit(toy.turn(pending, toy.answer(pending.plan, "a title")))


async def test_only_single_main_call_is_snapshot(autojump_clock: Clock, tmp_path: Path) -> None:
    """Only the main agent's only call has a snapshot."""

    async def program(call: Call) -> int:
        live = session_of_call(program, call)
        await side_call(program, call)
        async with trio.open_nursery() as nursery:
            for word in ("one", "two"):
                nursery.start_soon(lambda word=word: ask(live, [toys.user(word)], takes=3))
        await ask(live, [toys.user("three")], takes=1)
        return 0

    async with town(tmp_path, {"agent": program}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(every=1, turns=(0,)))
    assert (told(found)["turns"], told(found)["not_taken"]) == ([3], {"role": 1, "parallel": 2})


async def test_concurrent_call_cancels_snapshot(autojump_clock: Clock, tmp_path: Path) -> None:
    """However short it is: the harness did something."""

    async def program(call: Call) -> int:
        live = session_of_call(program, call)
        call.runtime.copying_s = 2.0

        async def later() -> None:
            await trio.sleep(1)
            await ask(live, [toys.user("two")], takes=0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            await ask(live, [toys.user("one")], takes=1)
        return 0

    async with town(tmp_path, {"agent": program}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(turns=(0,)))
    assert (told(found)["turns"], told(found)["not_taken"]) == ([], {"parallel": 1})
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("copying_s", "run_s", "not_taken"),
    [(4.0, 20.0, {}), (60.0, 20.0, {"slow": 2}), (400.0, 2.0, {"slow": 2})],
)
async def test_snapshot_time_costs_no_budget(
    autojump_clock: Clock, tmp_path: Path, copying_s: float, run_s: float, not_taken: dict[str, int]
) -> None:
    inner = agent(turns=3, each=run_s / 3 - 0.1)

    async def slow(call: Call) -> int:
        call.runtime.copying_s = copying_s
        return await run_as(slow, inner, call)

    async with town(tmp_path, {"agent": slow}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(turns=(1, 2)), budgets={"run_s": run_s})
    held = 2 * min(copying_s, HELD_S)
    assert found.outcome.status == "completed"
    assert (found.timing.held_s, told(found)["held_s"]) == (pytest.approx(held), pytest.approx(held))
    assert found.timing.run_s == pytest.approx(run_s - 0.3 + held)
    assert told(found)["not_taken"] == not_taken
    assert here.scheduler.registry.tally.snapshot_s == pytest.approx(held)
    assert held < MAX_HELD_S


async def test_oversized_snapshot_is_counted(autojump_clock: Clock, tmp_path: Path) -> None:
    """A snapshot that is too large is counted, and the call goes on."""
    inner = agent(turns=3)

    async def program(call: Call) -> int:
        await call.runtime.put({"/tmp/large": bytes(2 << 20)})
        return await run_as(program, inner, call)

    async with town(tmp_path, {"agent": program}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(every=1, max_mb=1))
    assert (len(found.turns), told(found)["turns"], told(found)["not_taken"]) == (3, [], {"large": 2})


async def test_disk_faults_are_counted(
    autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with town(tmp_path, {"agent": agent(turns=2)}) as here:
        here.runtimes.settings = evolve(here.runtimes.settings, disk_reserve_mb=1 << 40)
        found = await here.one(snapshot_at=SnapshotSpec(turns=(1,)))
        assert told(found)["not_taken"] == {"disk": 1}
        here.runtimes.settings = evolve(here.runtimes.settings, disk_reserve_mb=0)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(snapshots, "write", full)
        found = await here.one(snapshot_at=SnapshotSpec(turns=(1,)))
    assert told(found)["not_taken"] == {"fault": 1}
    assert files(tmp_path) == [], "an archive without what is beside it is no snapshot"


# ── from which none is resumed ────────────────────────────────────────────────


async def test_processes_after_first_call_are_named(autojump_clock: Clock, tmp_path: Path) -> None:
    async def program(call: Call) -> int:
        live = session_of_call(program, call)
        call.runtime.beside = frozenset({SHELL})
        history = [toys.user()]
        for _ in range(3):
            turn = await ask(live, history, takes=1)
            assert turn is not None
            assert turn.answer is not None
            history += [turn.answer.as_message(), toys.user("on")]
            call.runtime.beside |= {SERVER}
        return 0

    async with town(tmp_path, {"agent": program}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(turns=(0, 2)))
    first, last = list_snapshots(tmp_path, found.session_id).snapshots
    assert (first.resumable, last.resumable) == (True, False)
    assert last.why_not == (
        "processes lived that were not there at the first call, and no copy has them: python3"
    )
    (process,) = read_snapshot(tmp_path, found.session_id, 2).processes
    assert (process.pid, process.comm) == (8, "python3")


async def test_mcp_servers_in_container_are_named(
    autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HARNESSES, "shell", evolve(HARNESSES["shell"], mcp_servers=True))
    servers = {"notes": McpServerSpec(command="notes"), "far": McpServerSpec(url="http://127.0.0.1:1")}
    harness = HarnessSpec(name="shell", command=("agent",), mcp_servers=servers)
    async with town(tmp_path, {"agent": agent(turns=2)}) as here:
        found = await here.one(harness=harness, snapshot_at=SnapshotSpec(turns=(1,)))
    (listed,) = list_snapshots(tmp_path, found.session_id).snapshots
    assert listed.why_not == "its MCP servers run in the container, and no copy has their memory: notes"


# ── listing, reading, restoring ───────────────────────────────────────────────


async def test_missing_or_damaged_snapshot_is_refused(autojump_clock: Clock, tmp_path: Path) -> None:
    async with town(tmp_path, {"agent": agent(turns=4)}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(turns=(1, 2, 3)))
    session_id = found.session_id
    with pytest.raises(
        ForkError, match=r"no snapshot of session \S+ at turn 0 \(there are some at 1, 2, 3\)"
    ):
        read_snapshot(tmp_path, session_id, 0)
    with pytest.raises(ForkError, match="its task asked for none"):
        read_snapshot(tmp_path, "other", 0)
    beside(archive_path(tmp_path, session_id, 1)).write_text("{")
    with pytest.raises(ForkError, match="at turn 1 cannot be read"):
        read_snapshot(tmp_path, session_id, 1)
    archive_path(tmp_path, session_id, 2).unlink()
    with pytest.raises(ForkError, match="no snapshot of session"):
        read_snapshot(tmp_path, session_id, 2)
    listed = list_snapshots(tmp_path, session_id).snapshots
    assert [(each.turn, each.resumable) for each in listed] == [(1, False), (2, False), (3, True)]
    assert "cannot be read" in str(listed[0].why_not)
    assert listed[1].why_not == "its archive is gone"


async def test_fresh_container_gets_snapshot_files(autojump_clock: Clock, tmp_path: Path) -> None:
    inner = agent(turns=2)

    async def program(call: Call) -> int:
        await call.runtime.put({"/work/made": b"x", "/home/agent/session": b"y", "/tmp/z": b"z"})
        return await run_as(program, inner, call)

    async with town(tmp_path, {"agent": program}) as here:
        found = await here.one(snapshot_at=SnapshotSpec(turns=(1,)))
        kept, containers = (
            read_snapshot(tmp_path, found.session_id, 1),
            Containers(order(session_id="fork"), here.scheduler.services.containers),
        )
        async with open_restored(containers, kept) as runtime:
            got = dict(runtime.files)  # type: ignore[attr-defined]
        assert got == {"/work/made": b"x", "/home/agent/session": b"y", "/tmp/z": b"z"}
        here.runtimes.image = "sha256:1"
        with pytest.raises(
            ForkError, match=r"is of image .* \(sha256:0\), and .* is sha256:1 now: a fork needs"
        ):
            async with open_restored(containers, kept):
                pass
        here.runtimes.image = "sha256:0"
        archive_path(tmp_path, found.session_id, 1).unlink()
        with pytest.raises(ForkError, match=f"the archive of session {found.session_id} at turn 1 is gone"):
            async with open_restored(containers, kept):
                pass


async def test_snapshots_are_removed_with_session(autojump_clock: Clock, tmp_path: Path) -> None:
    """An hour old, and of no session of the journal: `Evaluations` sweeps them as kept workspaces."""
    names = ("a.snapshot-3.tar", "a.snapshot-3.json", "b.snapshot-1.tar.half", "c.workspace.tar", "d.log")
    for name in names:
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "e.snapshot-0.json").write_text("too young")
    assert sorted(path.name for path in old_kept_files(tmp_path)) == sorted(names[:-1])
