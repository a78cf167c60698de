"""A node that nobody holds ends by itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define

from polarnode.cli.serve import _stop_as_orphan
from polarnode.cli.stopping import StopRequest
from polarnode.core.errors import ConfigError
from polarnode.journal.log.port import LogUnavailable
from polarnode.node.config_sources import read_config
from polarnode.node.orphan import has_work, wait_orphaned
from polarnode.support.locks import take_lock


async def ends(lifeline: Path, orphan_s: float, within_s: float) -> bool:
    with trio.move_on_after(within_s) as patience:
        await wait_orphaned(lifeline, orphan_s)
    return not patience.cancelled_caught


async def test_node_with_held_lock_lives(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    path = tmp_path / "m.lock"
    assert await ends(path, 300.0, 302.0), "nobody ever held it"
    held = take_lock(path)
    assert held is not None
    assert not await ends(path, 300.0, 1000.0)
    held.close()
    assert await ends(path, 300.0, 302.0)


async def test_orphan_time_begins_at_release(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    path = tmp_path / "m.lock"
    async with trio.open_nursery() as nursery:
        began = trio.current_time()

        async def hold_twice() -> None:
            for begins, seconds in ((0, 500), (200, 100)):
                await trio.sleep(begins)
                held = take_lock(path)
                assert held is not None
                await trio.sleep(seconds)
                held.close()

        nursery.start_soon(hold_twice)
        await trio.testing.wait_all_tasks_blocked()
        await wait_orphaned(path, 300.0)
        assert 1099 <= trio.current_time() - began <= 1102


def test_lifeline_is_a_setting() -> None:
    found = read_config(environment={"POLARNODE_LIFELINE": "/x/m.lock", "POLARNODE_ORPHAN_S": "7"})
    assert (found.lifeline, found.orphan_s) == ("/x/m.lock", 7.0)
    for bad in ("0", "inf"):
        with pytest.raises(ConfigError, match="POLARNODE_ORPHAN_S must be more than 0 seconds"):
            read_config(environment={"POLARNODE_ORPHAN_S": bad})


async def test_orphan_stops_like_on_signal(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    config = read_config(flags={"lifeline": str(tmp_path / "m.lock"), "orphan_s": 7.0})
    node = SimpleNamespace(config=config)
    stopped: list[float] = []
    began = trio.current_time()
    stop = StopRequest(lambda: stopped.append(trio.current_time() - began))
    await _stop_as_orphan(node, stop, trio.Event())  # type: ignore[arg-type]
    assert stop.requested
    assert 7 <= stopped[0] <= 9


@define
class _Log:
    """The part of a shared log that says whether a node is needed."""

    open_places: int = 0
    last_seen: float = 0.0
    connected: int = 0
    away: bool = False

    async def consumers(self) -> tuple[Any, ...]:
        await trio.lowlevel.checkpoint()
        if self.away:
            raise LogUnavailable("away")
        return (SimpleNamespace(connected=self.connected, last_seen=self.last_seen),)


@pytest.mark.parametrize(
    ("log", "live", "needed"),
    [
        (_Log(), 0, False),
        (_Log(), 1, True),
        (_Log(open_places=1), 0, True),
        (_Log(connected=1), 0, True),
        (_Log(last_seen=95.0), 0, True),
        (_Log(last_seen=80.0), 0, False),
        (_Log(away=True), 0, True),
    ],
)
async def test_node_is_needed_during_work(log: Any, live: int, needed: bool) -> None:
    assert await has_work(log, live, orphan_s=10.0, now=100.0) is needed
