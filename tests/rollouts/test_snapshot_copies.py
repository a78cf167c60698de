"""Copies of snapshots between two nodes in memory, with real journals: what arrives, what is refused, what is
removed, and a session that goes on with one.

Real nodes are in tests/live.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from fakes_engine import until
from keeper_kit import KEEPER, Keeper, programs
from polarnode.rollouts.snapshot_copies import KeptSnapshots
from session_kit import life, task

from polarnode.core.errors import Conflict, DiskFull, ForkError, PolarnodeError
from polarnode.core.fleet import Epoch, Peer, TaskCopy
from polarnode.core.task import SnapshotSpec, TaskSpec
from polarnode.core.trajectory import Trajectory
from polarnode.journal import copies
from polarnode.journal.journal import Journal, open_journal
from polarnode.merge.trajectory import Identity
from polarnode.rollouts import snapshot_copies
from polarnode.rollouts.lifecycle import Homes
from polarnode.rollouts.scheduler import Scheduler
from polarnode.rollouts.snapshots import archive_path, read_snapshot

SPEC = task(harness=KEEPER, snapshot_at=SnapshotSpec(turns=(2,)), budgets={"retries": 0}, num_samples=1)
EPOCH = Epoch(1, 0)
PEER = Peer(journal="second", url="http://second")


@define(eq=False)
class Wire:
    """What a home knows of its fleet, and the other end. `pieces` arrived; `lost` answers are to come."""

    other: KeptSnapshots
    pieces: list[int] = field(factory=list)
    lost: int = 0
    answers: list[int] = field(factory=list)

    def second_of(self, task_id: str) -> tuple[Epoch, Peer] | None:
        return EPOCH, PEER

    async def ask(self, peer: Peer, method: str, path: str, *, body: bytes) -> tuple[int, Any] | None:
        query = dict(part.split("=") for part in path.partition("?")[2].split("&"))
        if self.lost:
            self.lost -= 1
            return None
        try:
            await self.other.receive(
                "t", 0, query["session"], EPOCH,
                offset=int(query["offset"]), size=int(query["size"]), piece=body,
            )  # fmt: skip
        except PolarnodeError as error:
            self.answers.append(409)
            return 409, str(error)
        self.pieces.append(len(body))
        self.answers.append(200)
        return 200, {}


def kept_in(folder: Path, journal: Journal, *, reserve: int = 0) -> KeptSnapshots:
    (folder / "copies").mkdir(exist_ok=True)
    return KeptSnapshots(folder=folder / "copies", sessions=folder, reserve=reserve, journal=journal)


@asynccontextmanager
async def second_home(folder: Path, *, spec: TaskSpec = SPEC) -> AsyncIterator[KeptSnapshots]:
    await trio.Path(folder).mkdir(exist_ok=True)
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        copy = TaskCopy(task_id="t", epoch=EPOCH, home="home", second=journal.id, spec=spec, submitted=1.0)
        journal.write(copies.copy_entry(copy, "second"))
        await journal.flushed()
        yield kept_in(folder, journal)


async def lost_in(folder: Path) -> Trajectory:
    """A session with a snapshot before turn 2 whose container died before turn 3, and its journal."""
    await trio.Path(folder).mkdir()
    async with life(folder / "journal.sqlite", programs(Keeper(dies={0: 3}))) as (_, scheduler, _):
        _, (name,) = scheduler.submit(evolve(SPEC, task_id="t"))
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        found = await journal.trajectory(name)
    assert found is not None
    return found


def whose(lost: Trajectory) -> Identity:
    return Identity(
        session_id=lost.session_id, task_id="t", group_id="t", sample_index=0, harness=lost.harness, harness_version=None,
        model="tiny", node="n1",
    )  # fmt: skip


async def send(folder: Path, lost: Trajectory, wire: Wire) -> None:
    """Until the copy is there, or was refused."""
    async with open_journal(folder / "journal.sqlite", now=time.time) as journal:
        home = kept_in(folder, journal)
        home.taken(whose(lost), 2)
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: started(home, wire, task_status))
            with trio.fail_after(600):
                while not (list(wire.other.folder.glob("*.copy")) or 409 in wire.answers):  # noqa: ASYNC110
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()


async def started(home: KeptSnapshots, wire: Wire, task_status: Any) -> None:
    ready = trio.Event()
    task_status.started()
    await home.run(wire, ready)


async def test_a_copy_arrives_in_pieces_and_becomes_a_sessions_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_copies, "PIECE", 1000)
    lost = await lost_in(tmp_path / "home")
    async with second_home(tmp_path / "second") as other:
        wire = Wire(other, lost=2)  # it is sent again
        await send(tmp_path / "home", lost, wire)
        assert len(wire.pieces) > 3
        assert max(wire.pieces) == 1000
        found = await other.install("t", 0, "mine")
        assert found is not None
        assert (found.identity.session_id, found.turn) == (lost.session_id, 2)
        assert found.turns == tuple(evolve(turn) for turn in lost.turns[:2])
        theirs = read_snapshot(tmp_path / "home", lost.session_id, 2)
        own = read_snapshot(tmp_path / "second", "mine", 2)
        assert own == evolve(theirs, session_id="mine")
        one, copied = (
            archive_path(tmp_path / "home", lost.session_id, 2),
            archive_path(other.sessions, "mine", 2),
        )
        assert copied.read_bytes() == one.read_bytes()
        assert await other.install("t", 1, "mine") is None


@pytest.mark.parametrize("cut", ["head", "turns", "archive", "all"])
async def test_a_damaged_copy_is_refused_in_words(tmp_path: Path, cut: str) -> None:
    lost = await lost_in(tmp_path / "home")
    async with second_home(tmp_path / "second") as other:
        await send(tmp_path / "home", lost, Wire(other))
        [path] = other.folder.glob("*.copy")
        whole = path.read_bytes()
        at = whole.index(b"before_key")
        damaged = {
            "head": b"\xff" + whole[1:],
            "turns": whole[:at] + b"B" + whole[at + 1 :],
            "archive": whole[:-10],
            "all": b"",
        }
        path.write_bytes(damaged[cut])
        with pytest.raises(ForkError, match="cannot be used"):
            await other.install("t", 0, "mine")
        assert not archive_path(other.sessions, "mine", 2).exists()


async def test_what_is_not_kept_here_is_refused(tmp_path: Path) -> None:
    async with second_home(tmp_path) as other:
        take = partial(other.receive, "t", 0, "s 2", EPOCH)
        with pytest.raises(Conflict, match="not open here"):
            await other.receive("t", 0, "s 2", Epoch(1, 1), offset=0, size=3, piece=b"abc")
        with pytest.raises(Conflict, match="begin it again"):
            await take(offset=3, size=6, piece=b"abc")
        await take(offset=0, size=6, piece=b"abc")
        with pytest.raises(Conflict, match="has 3 bytes"):
            await take(offset=4, size=6, piece=b"ab")
        full = evolve(other, reserve=1 << 62)
        with pytest.raises(DiskFull, match="no room"):
            await full.receive("t", 0, "s 2", EPOCH, offset=3, size=6, piece=b"abc")
        assert [each.suffix for each in other.folder.iterdir()] == [".part"]


async def test_a_copy_of_a_place_that_was_filled_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_copies, "SWEEP_S", 0.2)
    lost = await lost_in(tmp_path / "home")
    async with second_home(tmp_path / "second") as other:
        await send(tmp_path / "home", lost, Wire(other))
        assert list(other.folder.glob("*.copy"))
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: started(other, Wire(other), task_status))
            await trio.sleep(2 * snapshot_copies.SWEEP_S)
            assert list(other.folder.glob("*.copy"))  # the place is open
            data = copies.pack_result(evolve(lost, task_id="t"), 1.0)
            other.journal.write(copies.commit_entry("t", 0, lost.session_id, EPOCH, data))
            await other.journal.flushed()
            with trio.fail_after(30):
                await until(lambda: not list(other.folder.iterdir()))
            nursery.cancel_scope.cancel()


class Second(Homes):
    def first_attempt(self, task_id: str) -> int:
        return 1


async def adopted(folder: Path, other: KeptSnapshots, keeper: Keeper, spec: TaskSpec = SPEC) -> Trajectory:
    """A session that takes the place of one that another node had."""
    async with life(folder / "own.sqlite", programs(keeper)) as (journal, scheduler, _):
        services = evolve(scheduler.services, copies=other)
        begun: Scheduler = scheduler
        begun.services = begun.registry.services = services
        begun.registry.homes = Second()
        journal.task_submitted(spec, task_id="t", session_ids=("mine",), idempotency_key=None)
        begun.registry.groups.begin("t", spec)
        begun.adopt(spec, "t", {0: "mine"})
    async with open_journal(folder / "own.sqlite", now=time.time) as journal:
        found = await journal.trajectory("mine")
    assert found is not None
    return found


async def test_a_session_goes_on_with_a_copy(tmp_path: Path) -> None:
    lost = await lost_in(tmp_path / "home")
    async with second_home(tmp_path / "second") as other:
        await send(tmp_path / "home", lost, Wire(other))
        keeper = Keeper()
        found = await adopted(tmp_path / "second", other, keeper)
    assert (found.outcome.status, keeper.begun) == ("completed", [2])
    assert found.continued_from is not None
    assert (found.continued_from.session_id, found.continued_from.turn) == (lost.session_id, 2)
    assert [turn.sampled for turn in found.turns[:2]] == [turn.sampled for turn in lost.turns[:2]]
    assert found.trainable_tokens == sum(len(turn.sampled) for turn in found.turns)


@pytest.mark.parametrize("why", ["none", "damaged", "off"])
async def test_without_a_usable_copy_it_begins_from_the_start(tmp_path: Path, why: str) -> None:
    lost = await lost_in(tmp_path / "home")
    async with second_home(tmp_path / "second") as other:
        spec = SPEC
        if why != "none":
            await send(tmp_path / "home", lost, Wire(other))
        if why == "damaged":
            [path] = other.folder.glob("*.copy")
            path.write_bytes(path.read_bytes()[:-10])
        if why == "off":
            spec = evolve(SPEC, snapshot_at=evolve(SPEC.snapshot_at, resume_lost=False))
        keeper = Keeper()
        found = await adopted(tmp_path / "second", other, keeper, spec)
    assert (found.outcome.status, found.continued_from, keeper.begun) == ("completed", None, [0])
