"""`kill -9` of the node in mid-run, and its orderly end: nothing is left on the machine, and nothing that was
captured is lost.

One story told on one node, because each start takes its time: it is killed, started again, and asked to stop.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from attrs import define, field
from engine_reference import shared_memory_of
from live_kit import Belongings, ServingNode, belongings, serving, until

from polarnode.client import ClientError, Event, PolarnodeClient, Unreachable
from polarnode.core.trajectory import Trajectory
from polarnode.journal import queries
from polarnode.journal.journal import open_journal
from polarnode.support.concurrency import group_members

pytestmark = [pytest.mark.podman, pytest.mark.engine]

# an empty folder, one a user, that torch makes when it is imported: transformers does, for its tokenizers
TORCHS_OWN = "torchinductor_"
# seconds an orderly stop may take where everything is ten times slower; it takes some three
STOPPED_S = 120.0


@define(eq=False)
class Reader:
    """A trainer that reads and acknowledges for as long as the test lasts, over every death of its node."""

    client: PolarnodeClient
    events: list[Event] = field(factory=list)
    stopped: bool = False
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self.client.trajectories(consumer="trainer", ack=True):
                self.events.append(event)
                if self.stopped:
                    return
        # its patience ends long after the test, in the middle of another, whose node may have the same port
        except (ClientError, Unreachable):
            if not self.stopped:
                raise

    def has(self, session_id: str) -> bool:
        return f"trajectory:{session_id}" in {event.key for event in self.events}


def busy(node: ServingNode, count: int) -> list[str]:
    """Sessions that go on until they are ended, each with some turns captured."""
    sessions = [
        node.agent(turns=None, stream=index % 2 == 0, budgets={"retries": 0}) for index in range(count)
    ]
    node.under_way(*sessions, turns=3)
    return sessions


@define
class Killed:
    """What was there a moment before the node was killed."""

    quick: str
    running: list[str]
    before: dict[str, dict[int, tuple[str, list[int]]]]
    belongings: Belongings
    first_event: Event


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node") / "state"


def test_killed_node_leaves_and_loses_nothing(podman_works: None, state_dir: Path, temporary: Path) -> None:
    with serving(state_dir, temporary) as node:
        reader = Reader(node.client)
        killed = killed_in_mid_run(node)
        shared = shared_memory_of(killed.belongings.engine_groups[0])
        assert killed.belongings.engines()
        node.process.kill()
        node.process.wait()
        since = time.monotonic()
        until(lambda: killed.belongings.engines() == [], "the engine's processes end by themselves")
        print(f"the engine was gone {time.monotonic() - since:.1f} s after the node")
    since = time.monotonic()
    with serving(state_dir, temporary, node_id=node.node_id, port=node.port) as again:
        print(f"ready again after {time.monotonic() - since:.1f} s")
        nothing_is_left_of(killed.belongings, again)
        assert not any(path.exists() for path in shared)
        interrupted_with_all_they_had(again, killed)
        nothing_is_missed(again, killed, reader)
        an_orderly_stop(again, reader)
    reader.stopped = True
    left = [path.name for path in temporary.iterdir()]
    assert [name for name in left if not name.startswith(TORCHS_OWN)] == []


def killed_in_mid_run(node: ServingNode) -> Killed:
    quick = node.agent(turns=1)
    node.finished(quick)
    # never acknowledged: it dies while it works on it
    first = next(node.client.trajectories(consumer="crasher", ack=True))
    running = busy(node, 3)
    before = {one: node.captured(one) for one in running}
    assert node.status()["runtimes"]["live"] == 3
    return Killed(quick=quick, running=running, before=before, belongings=belongings(node), first_event=first)


def nothing_is_left_of(killed: Belongings, again: ServingNode) -> None:
    assert killed.containers
    assert not set(killed.containers) & {each["Id"] for each in again.containers()}
    until(lambda: killed.processes() == [], "every process of the killed node is gone", within=60)


def interrupted_with_all_they_had(again: ServingNode, killed: Killed) -> None:
    for session, turns in killed.before.items():
        trajectory = again.client.trajectory(session, turns="full")
        assert (trajectory.outcome.status, trajectory.outcome.boundary) == ("interrupted", "node")
        kept = {turn.index: (turn.state, list(turn.sampled)) for turn in trajectory.turns}
        assert {index: kept[index] for index in turns} == turns
        assert all(state == "complete" for state, _ in kept.values())
        assert {index for index, (_, sampled) in kept.items() if sampled} <= in_traces(trajectory)
    assert again.client.trajectory(killed.quick).outcome.status == "completed"


def in_traces(trajectory: Trajectory) -> set[int]:
    return {span.turn for trace in trajectory.traces for span in trace.turn_spans}


def nothing_is_missed(again: ServingNode, killed: Killed, reader: Reader) -> None:
    """By who reads on, by who comes back, and by who begins anew: each trajectory is in the stream once,
    under one key.
    """
    after = again.agent(turns=1)
    again.finished(after)
    until(lambda: reader.has(after), "the reader found its node again")
    every = list(again.client.trajectories(follow=False))
    expected = [f"trajectory:{session}" for session in (killed.quick, *killed.running, after)]
    assert sorted(event.key for event in every if event.kind == "trajectory") == sorted(expected)
    assert [event.seq for event in every] == sorted({event.seq for event in every})
    known = {event.seq: event.key for event in every}
    until(
        lambda: {event.seq: event.key for event in reader.events} == known,
        "the reader has every event, repeats under their own keys",
    )
    back: Iterator[Event] = again.client.trajectories(consumer="crasher", follow=False)
    assert [event.key for event in back] == [event.key for event in every]
    assert known[killed.first_event.seq] == killed.first_event.key


def an_orderly_stop(node: ServingNode, reader: Reader) -> None:
    """SIGTERM with sessions under way: they are cancelled with what they have, and nothing is left on the
    machine.
    """
    sessions = busy(node, 2)
    before = {one: node.captured(one) for one in sessions}
    there = belongings(node)
    shared = shared_memory_of(there.engine_groups[0])
    asked = time.monotonic()
    os.kill(node.process.pid, signal.SIGTERM)
    assert node.process.wait(STOPPED_S) == 0, node.said()
    print(
        f"stopped in {time.monotonic() - asked:.1f} s; {sum(reader.has(one) for one in sessions)} of 2"
        " trajectories were read before it"
    )
    assert there.processes() == []
    assert group_members(there.engine_groups[0]) == []
    assert node.containers() == []
    assert not any(path.exists() for path in shared)
    kept = trio.run(published, node.state_dir, sessions)
    assert len(kept) == len(sessions)
    for trajectory in kept:
        assert trajectory.outcome.status == "cancelled"
        turns = {turn.index: (turn.state, list(turn.sampled)) for turn in trajectory.turns}
        assert {index: turns[index] for index in before[trajectory.session_id]} == before[
            trajectory.session_id
        ]
        assert set(before[trajectory.session_id]) <= in_traces(trajectory)


async def published(state_dir: Path, sessions: list[str]) -> list[Trajectory]:
    """What the journal of a node that is over holds for whoever reads it next."""
    async with open_journal(state_dir / "journal.sqlite", now=time.time) as journal:
        assert await journal.reader.query(queries.unfinished_sessions) == ()
        found = [await journal.reader.query(queries.trajectory, session) for session in sessions]
    return [trajectory for trajectory in found if trajectory is not None]
