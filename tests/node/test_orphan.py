"""A node that nobody holds and no front follows ends; either of them keeps it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from polarnode.cli.serve import _stop_as_orphan
from polarnode.cli.stopping import StopRequest
from polarnode.core.errors import ConfigError
from polarnode.node.config_sources import read_config
from polarnode.node.orphan import orphaned
from polarnode.support.locks import take_lock


async def ends(lifeline: Path, followed: dict[str, int], orphan_s: float, within_s: float) -> bool:
    with trio.move_on_after(within_s) as patience:
        await orphaned(lifeline, lambda: bool(followed), orphan_s)
    return not patience.cancelled_caught


async def test_a_node_lives_while_it_is_held_or_followed(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "m.lock"
    assert await ends(path, {}, 300.0, 302.0), "nobody ever held it"
    held = take_lock(path)
    assert held is not None
    assert not await ends(path, {}, 300.0, 1000.0)
    held.close()
    assert not await ends(path, {"front": 1}, 300.0, 1000.0), "a front that follows it is enough"
    assert await ends(path, {}, 300.0, 302.0)


async def test_the_time_begins_when_the_last_one_left(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    followed, path = {"front": 1}, tmp_path / "m.lock"
    async with trio.open_nursery() as nursery:
        began = trio.current_time()

        async def leave() -> None:
            await trio.sleep(500)
            followed.clear()
            await trio.sleep(200)
            followed["next"] = 1
            await trio.sleep(100)
            followed.clear()

        nursery.start_soon(leave)
        await orphaned(path, lambda: bool(followed), 300.0)
        assert 1099 <= trio.current_time() - began <= 1102


def test_a_lifeline_is_a_setting() -> None:
    found = read_config(environment={"POLARNODE_LIFELINE": "/x/m.lock", "POLARNODE_ORPHAN_S": "7"})
    assert (found.lifeline, found.orphan_s) == ("/x/m.lock", 7.0)
    for bad in ("0", "inf"):
        with pytest.raises(ConfigError, match="POLARNODE_ORPHAN_S must be more than 0 seconds"):
            read_config(environment={"POLARNODE_ORPHAN_S": bad})


async def test_an_orphan_stops_as_at_a_signal(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    config = read_config(flags={"lifeline": str(tmp_path / "m.lock"), "orphan_s": 7.0})
    node = SimpleNamespace(config=config, homes=SimpleNamespace(office=SimpleNamespace(feeds={})))
    stopped: list[float] = []
    began = trio.current_time()
    stop = StopRequest(lambda: stopped.append(trio.current_time() - began))
    await _stop_as_orphan(node, stop, trio.Event())  # type: ignore[arg-type]
    assert stop.requested
    assert 7 <= stopped[0] <= 9
