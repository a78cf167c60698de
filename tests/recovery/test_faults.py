"""One node through every fault that is not its own death: each session ends as it should, and at the end all
is accounted for and nothing is left.

The accounting is the node fixture's end: every turn in one trajectory, every place with one final session, no
container, process, mount or socket.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve
from recovery_kit import (
    Place,
    ServingNode,
    Traces,
    account,
    descendants,
    free_port,
    place_at,
    podman,
    read_ledger,
    session_of,
    short_temporary,
    texts_of,
    until,
)

from polarnode.core.trajectory import Trajectory

pytestmark = pytest.mark.podman


@define(eq=False)
class House:
    """The node of this module, and what it has had on the machine."""

    place: Place
    node: ServingNode
    traces: Traces

    def submit(self, **more: Any) -> str:
        """A task of one session; its id."""
        task = self.place.task(**more)
        return self.node.client.submit(task).task_id

    def holder(self, task_id: str) -> "dict[str, Any]":
        """The session that holds the place now, as its task lists it."""
        (session,) = self.node.client.task(task_id)["sessions"]
        return dict(session)

    def ended(self, task_id: str) -> Trajectory:
        """The final trajectory of the place."""
        until(lambda: self.node.client.task(task_id)["finished"], "the task is over")
        return self.node.client.trajectory(self.holder(task_id)["session_id"], turns="full")

    def before(self, final: Trajectory) -> "list[Trajectory]":
        """Those who held its place before it, the first first."""
        attempts = self.node.client.trajectories(
            task_id=final.task_id, kinds=("attempt",), turns="full", follow=False
        )
        return [
            found
            for event in attempts
            if (found := event.trajectory) is not None and found.sample_index == final.sample_index
        ]

    def in_phase(self, task_id: str, phase: str, *, turns: int = 0) -> str:
        """Wait until the place's session is there; its id."""

        def there() -> str | None:
            rows = (row for row in self.node.status()["sessions"] if row["task_id"] == task_id)
            return next(
                (str(row["session_id"]) for row in rows if row["phase"] == phase and row["turns"] >= turns),
                None,
            )

        found = until(there, f"the session is in {phase}")
        self.traces.note_processes(self.node)
        assert found is not None
        return found

    def told(self, session_id: str) -> list[str]:
        """What the harness of a session says it was told."""
        ledger = read_ledger(self.node.log(session_id), whole=False)
        return [] if ledger is None else ledger.texts


@pytest.fixture(scope="module")
def house(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with short_temporary() as temporary:
        place = place_at(tmp_path_factory.mktemp("faults"), temporary)
        traces = Traces(place)
        with place.serving() as node:
            yield House(place, node, traces)
            traces.note_processes(node)
        assert node.process.returncode == 0, node.said()[-3000:]
        traces.check_nothing_left()
        account(place.state_dir)


# ── the trainer's and the agent's own ends: never tried again ─────────────────


@pytest.mark.parametrize("phase", ["init", "run", "post"])
def test_cancelled_in_any_phase(house: House, phase: str) -> None:
    task = house.place.task(turns=None if phase == "run" else 1, pause=0.1)
    if phase == "init":
        task["runtime"]["prepare"] = [{"argv": ["sleep", "600"]}]
    if phase == "post":
        task["evaluator"] = {
            "name": "command",
            "config": {"script": "while ! test -e /work/go; do sleep 0.1; done; sleep 3; exit 0"},
        }
        task["harness"]["command"] = ["sh", "-c", "python3 /work/ledger.py '{}'; touch /work/go"]
    task_id = house.node.client.submit(task).task_id
    session_id = house.in_phase(task_id, phase, turns=2 if phase == "run" else 0)
    assert house.node.client.cancel(task_id)
    final = house.ended(task_id)
    assert final.session_id == session_id, "a cancelled place is given to nobody"
    assert final.outcome.status == ("completed" if phase == "post" else "cancelled"), final.outcome
    assert texts_of(final)[: len(house.told(session_id))] == house.told(session_id)
    assert not house.node.client.cancel(task_id)


def test_session_runs_out_of_time(house: House) -> None:
    final = house.ended(house.submit(turns=None, pause=0.1, budgets={"run_s": 3.0}))
    assert (final.outcome.status, final.outcome.clock, final.attempt) == ("timeout", "run", 0)
    assert house.told(final.session_id)
    assert texts_of(final)[: len(house.told(final.session_id))] == house.told(final.session_id)


@pytest.mark.parametrize(("end", "exit_code"), [(3, 3), ("SIGSEGV", 139)])
def test_crashing_harness_has_exit_code(house: House, end: int | str, exit_code: int) -> None:
    final = house.ended(house.submit(turns=2, end=end))
    assert (final.outcome.status, final.outcome.exit_code, final.attempt) == ("failed", exit_code, 0)
    assert texts_of(final) == house.told(final.session_id)
    assert len(texts_of(final)) == 2


# ── the machine's faults: a fresh session takes the place ─────────────────────


@pytest.mark.parametrize("killed", ["container", "monitor"])
def test_killed_container_or_monitor(house: House, killed: str) -> None:
    task_id = house.submit(turns=6, pause=0.5)
    first = house.in_phase(task_id, "run", turns=2)
    container = container_of(house, first)
    if killed == "container":
        podman("kill", "--signal", "KILL", container)
    else:
        os.kill(harness_monitor_of(container), signal.SIGKILL)
    final = house.ended(task_id)
    (lost,) = house.before(final)
    assert (lost.session_id, lost.outcome.status, lost.outcome.boundary, lost.retried_as) == (
        first,
        "error",
        "runtime",
        final.session_id,
    )
    assert texts_of(lost)[: len(house.told(first))] == house.told(first)
    assert len(lost.turns) >= 2
    assert (final.outcome.status, final.attempt, len(texts_of(final))) == ("completed", 1, 6)


def harness_monitor_of(container: str) -> int:
    """The conmon of the one program that Podman runs in a container besides its first process."""
    first = podman("inspect", "--format", "{{.State.Pid}}", container).strip()
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it ended meanwhile
            if pid != first and os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{first}/ns/pid"):
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if Path(f"/proc/{parent}/comm").read_text() == "conmon\n":
                    found.add(int(parent))
    (monitor,) = found
    return monitor


def container_of(house: House, session_id: str) -> str:
    """A container that was taken from the warm ones does not say whose it is: the one whose harness asks for
    this session is found by its turns.
    """
    told = house.told(session_id)
    for each in house.traces.note_containers():
        ledger = Path(f"/proc/{each['Pid']}/root/work/ledger.jsonl")
        if session_of(each) == session_id or (ledger.exists() and told and told[0] in ledger.read_text()):
            return str(each["Id"])
    raise AssertionError(f"no container holds session {session_id}")


def test_podman_service_dies(house: House) -> None:
    """Its containers live on; a run whose exit code went with it is tried again, and the next service is
    there by then.
    """
    task_id = house.submit(turns=6, pause=0.5)
    house.in_phase(task_id, "run", turns=2)
    before = house.node.status()["runtimes"]["service_restarts"]
    os.kill(service_of(house.node), signal.SIGKILL)
    final = house.ended(task_id)
    assert (final.outcome.status, len(texts_of(final))) == ("completed", 6)
    assert [each.outcome.boundary for each in house.before(final)] == ["runtime"] * final.attempt
    assert house.node.status()["runtimes"]["service_restarts"] == before + 1


def service_of(node: ServingNode) -> int:
    below = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for pid in descendants(node.process.pid)
        if Path(f"/proc/{pid}").exists()
    }
    (found,) = (pid for pid, words in below.items() if b"service" in words and words[0].endswith(b"podman"))
    return found


@pytest.mark.parametrize("patience", [120.0, 0.0])
def test_engine_host_dies(house: House, patience: float) -> None:
    """A harness that asks again goes on where it was; one that gives up is tried again."""
    task_id = house.submit(turns=40, patience=patience)
    first = house.in_phase(task_id, "run", turns=3)
    host = house.node.host()
    os.kill(host["pid"], signal.SIGKILL)
    until(
        lambda: (
            house.node.host()["restarts"] == host["restarts"] + 1 and house.node.host()["state"] == "ready"
        ),
        "a new host serves",
    )
    final = house.ended(task_id)
    assert (final.outcome.status, len(texts_of(final))) == ("completed", 40), final.outcome
    if patience:
        assert (final.session_id, final.attempt) == (first, 0)
    for lost in house.before(final):
        assert (lost.outcome.status, lost.outcome.boundary, lost.turns[-1].state) == (
            "error",
            "engine",
            "failed",
        )
    failed = {turn.index for turn in final.turns if turn.state == "failed"}
    assert not failed & {span.turn for trace in final.traces for span in trace.turn_spans}


# ── what can not be ───────────────────────────────────────────────────────────


def test_two_nodes_on_one_folder(house: House) -> None:
    second = evolve(house.place, port=free_port()).start()
    try:
        assert second.process.wait() != 0
    finally:
        second.process.kill()
    assert "is in use by another process: stop that node, or give this one its own state folder" in " ".join(
        second.said().split()
    )
    assert house.ended(house.submit(turns=1)).outcome.status == "completed", "the first goes on"
