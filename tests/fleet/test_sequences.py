"""The sequences that break a fleet whose second home learns of results too late, or whose only fence is a
clock (design of the fleet, section 4.2): here each ends with every place filled once.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from homes_kit import Fleet, Hollow, task, three, until

from polarnode.client.values import ClientError
from polarnode.core.fleet import Adoption, CopyRow, Epoch, TermOrder
from polarnode.journal.check import check_journal
from polarnode.journal.copies import copy_of

pytestmark = pytest.mark.trio


def ended(hollow: Hollow, task_id: str = "t1") -> Callable[[], Awaitable[bool]]:
    async def test() -> bool:
        return f"task:{task_id}" in await hollow.keys()

    return test


def filled(hollow: Hollow, places: int) -> Callable[[], Awaitable[bool]]:
    """The second home has so many commits of three places."""

    async def test() -> bool:
        row = await hollow.row("t1")
        return row is not None and row.open_places == 3 - places

    return test


async def row_of(hollow: Hollow) -> CopyRow:
    found = await hollow.row("t1")
    assert found is not None
    return found


def stop_at(hollow: Hollow, method: str, *, after: bool, let: int = 0) -> trio.Event:
    """From now on the node's requests of this method stop, before they are sent or before their answer is
    used, as a SIGSTOP would do it; `let` pass first. Set the event to let them go on.
    """
    ask, on, left = hollow.node.homes.ask, trio.Event(), [let]

    async def asked(peer: Any, how: str, path: str, **more: Any) -> Any:
        stops = how == method and not on.is_set()
        if stops and left[0]:
            left[0] -= 1
            stops = False
        if stops and not after:
            await on.wait()
        answer = await ask(peer, how, path, **more)
        if stops and after:
            await on.wait()
        return answer

    hollow.node.homes.ask = asked
    return on


async def back(fleet: Fleet, name: str) -> None:
    """A node that was killed starts again, and the front names the nodes to all."""
    await fleet[name].start()
    for each in fleet.nodes:
        if fleet[each].lives:
            await fleet.name_peers(each)


async def is_sound(fleet: Fleet, *names: str) -> None:
    for name in names:
        path = fleet[name].folder / name / "journal.sqlite"
        report = await trio.to_thread.run_sync(check_journal, path)
        assert report.ok, (name, report.faults)


async def test_home_numbers_a_group_and_dies(tmp_path: Path) -> None:
    """The second home tells the same events: same keys, same bytes."""
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        await fleet.submit("a", "b", task(places=3))
        await until(ended(a))
        before = await fleet.check_group(3)
        await a.kill()
        await fleet.adopt("b", "c")
        await until(ended(b))
        assert await fleet.check_group(3) == before
        assert await b.keys("trajectory") != []
        await back(fleet, "a")
        row = await row_of(a)
        assert (row.role, row.finished, row.waiting) == ("home", True, False)
        await fleet.resume("a", moved={"t1": ("b", 1)})
        assert (await row_of(a)).role == "former"
        assert await fleet.check_group(3) == before
        await is_sound(fleet, "a", "b", "c")


async def test_home_dies_between_commit_and_number(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        stop_at(a, "PUT", after=True)
        await fleet.submit("a", "b", task(places=3))
        await until(filled(b, 1))
        assert await a.keys() == []
        await a.kill()
        await fleet.adopt("b", "c")
        await until(ended(b))
        sessions = await fleet.check_group(3)
        await back(fleet, "a")
        held = (await row_of(a)).open_places
        assert (held, (await row_of(a)).waiting) == (3, True)
        await fleet.resume("a", moved={"t1": ("b", 1)})

        async def retired() -> bool:
            return len(await a.keys("attempt")) == 2  # the third is the one that b delivers

        await until(retired)
        assert await fleet.check_group(3) == sessions
        assert a.node.homes.held == 0
        await is_sound(fleet, "a", "b", "c")


async def test_a_fact_without_its_trajectory_fills_no_place(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        on = stop_at(a, "PUT", after=False)
        await fleet.submit("a", "b", task(places=3))
        path = "/v1/fleet/tasks/t1/places/0?session=s1&epoch_term=1&epoch_number=0"
        for body in (b"", b"\x00" * 12, b"{}" * 40):
            answer = await b.link.ask("PUT", path, body=body)
            assert answer.status in (400, 410), answer.body
        assert (await row_of(b)).open_places == 3
        on.set()
        await until(ended(a))
        for session in await fleet.check_group(3):
            found = await a.call("GET", f"/v1/trajectories/{session}")
            assert found["session_id"] == session


async def test_a_result_may_be_large(tmp_path: Path) -> None:
    """Its extras may be as large as carried_mb allows."""
    async with three(tmp_path, "a") as fleet:
        path = "/v1/fleet/tasks/t1/places/0?session=s1&epoch_term=1&epoch_number=0"
        answer = await fleet["a"].link.ask("PUT", path, body=bytes(65 << 20))
        assert answer.status == 410, answer.body[:200]  # it was read: it is no result


async def test_home_is_stopped_between_check_and_commit(tmp_path: Path) -> None:
    """What it does behind the fence is refused, and becomes attempts."""
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        on = stop_at(a, "PUT", after=False)
        await fleet.submit("a", "b", task(places=3))

        async def held() -> bool:
            return bool(a.node.homes.held == 3)

        await until(held)
        await fleet.adopt("b", "c")
        on.set()
        await until(ended(b))

        async def retired() -> bool:
            return len(await a.keys("attempt")) == 3

        await until(retired)
        assert await a.keys("trajectory", "group", "task") == []
        await fleet.check_group(3)
        row = await row_of(a)
        assert (row.role, row.home, row.epoch) == ("former", b.journal, Epoch(1, 1))
        await is_sound(fleet, "a", "b", "c")


async def test_a_session_that_runs_behind_the_fence_is_ended(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        await fleet.submit("a", "b", task(3600.0, places=2))
        await fleet.adopt("b", "c")
        assert len(b.node.scheduler.sessions("t1")) == 2
        await fleet.resume("a", moved={"t1": ("b", 1)})

        async def retired() -> bool:
            return len(await a.keys("attempt")) == 2

        await until(retired)
        assert a.node.scheduler.statistics().live == 0
        await b.call("DELETE", "/v1/tasks/t1")
        await until(ended(b))
        await fleet.check_group(2)


async def test_two_fronts_on_two_sides_of_a_partition(tmp_path: Path) -> None:
    """The one that a majority follows adopts; the other one's commands are refused wherever that one was."""
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        on = stop_at(a, "PUT", after=False)
        await fleet.submit("a", "b", task(places=3))
        async with a.link.stream("/v1/fleet/feed?front=front") as feed:
            assert b"data: " in await anext(feed)
            order = TermOrder(term=2, front="other")
            with pytest.raises(ClientError, match="feed"):
                await a.call("POST", "/v1/fleet/term", order)
            await fleet.take_office("b", "c", front="other")
            await fleet.adopt("b", "c", number=0)
            old = {"term": 1, "tasks": [{"task_id": "t1", "epoch": {"term": 1, "number": 1}}]}
            for path in ("/v1/fleet/adopt", "/v1/fleet/seconds"):
                with pytest.raises(ClientError, match="term 2"):
                    await b.call("POST", path, old)
            on.set()
            await until(ended(b))

            async def retired() -> bool:
                return len(await a.keys("attempt")) == 3

            await until(retired)
        await fleet.check_group(3)
        assert a.node.homes.office.term == 1

        async def granted() -> bool:
            answer = await a.link.ask("POST", "/v1/fleet/term", value=order)
            return bool(answer.status == 200)

        await until(granted)  # the first front's feed has ended
        with pytest.raises(ClientError, match="term 2 is held"):
            await a.call("POST", "/v1/fleet/term", TermOrder(term=2, front="third"))


async def test_a_cancel_that_home_answered_holds_at_the_adopter(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        await fleet.submit("a", "b", task(3600.0, places=3))
        on = stop_at(a, "PUT", after=False)
        await b.call("POST", "/v1/fleet/cancel/t1")
        await a.call("DELETE", "/v1/tasks/t1")
        await a.kill()
        row = await fleet.adopt("b", "c")
        assert row.cancelled
        await until(ended(b))
        await fleet.check_group(3)
        found = await b.call("GET", "/v1/tasks/t1")
        assert found["counts"] == {"cancelled": 3}
        on.set()


async def test_a_second_home_that_never_comes_back(tmp_path: Path) -> None:
    """It is replaced, and home, away for a day afterwards, finds the task adopted by the new one."""
    async with three(tmp_path) as fleet:
        a, b, c = fleet["a"], fleet["b"], fleet["c"]
        on = stop_at(a, "PUT", after=False, let=1)
        await fleet.submit("a", "b", task(places=3))
        await until(filled(b, 1))
        await b.kill()
        await fleet.replace_second("a", "c")
        on.set()
        await until(ended(a))
        before = await fleet.check_group(3)
        await until(filled(c, 3))
        await a.kill()
        await fleet.adopt("c", "", number=2)
        await until(ended(c))
        await back(fleet, "b")
        await fleet.name_peers("c")
        # the copy of the first second home is old: nobody adopts it, and it goes
        old = "term=1&epoch_term=1&epoch_number=1"
        await b.call("DELETE", f"/v1/fleet/tasks/t1?{old}")
        assert await b.row("t1") is None
        await back(fleet, "a")
        await fleet.resume("a", moved={"t1": ("c", 2)})
        assert await fleet.check_group(3) == before
        await is_sound(fleet, "a", "b", "c")


# ── kills at other steps ────────────────────────────────────────────────────────────


async def test_home_is_killed_and_comes_back_to_its_own(tmp_path: Path) -> None:
    """It waits for a front, then runs again what was not over, and nothing that was held."""
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        stop_at(a, "PUT", after=True)
        await fleet.submit("a", "b", task(places=3))
        await until(filled(b, 1))
        await a.kill()
        await back(fleet, "a")
        await trio.sleep(0.3)
        assert await a.keys() == []
        assert (await row_of(a)).waiting
        await fleet.resume("a", own=["t1"])
        await until(ended(a))
        await fleet.check_group(3)
        assert not (await row_of(a)).waiting
        await fleet.resume("a", own=["t1"])  # again: nothing
        await fleet.check_group(3)
        await is_sound(fleet, "a", "b")


async def test_the_adopter_is_killed_too_and_comes_back(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        a, b, c = fleet["a"], fleet["b"], fleet["c"]
        stop_at(a, "PUT", after=True)
        await fleet.submit("a", "b", task(places=3))
        await until(filled(b, 1))
        await a.kill()
        stop_at(b, "POST", after=False)  # the copy to the next second home
        await fleet.adopt("b", "c")
        await b.kill()
        assert await c.row("t1") is None
        await back(fleet, "b")
        assert (await row_of(b)).waiting
        await fleet.resume("b", own=["t1"])
        await until(ended(b))
        await fleet.check_group(3)
        await until(filled(c, 3))
        await b.kill()
        await fleet.adopt("c", "", number=2)
        await until(ended(c))
        await fleet.check_group(3)
        await is_sound(fleet, "a", "b", "c")


async def test_home_is_killed_while_it_fills_a_new_second_home(tmp_path: Path) -> None:
    """A copy takes all its places at once: until then nobody can adopt it."""
    async with three(tmp_path) as fleet:
        a, b, c = fleet["a"], fleet["b"], fleet["c"]
        stop_at(a, "PUT", after=False, let=2)
        await fleet.submit("a", "b", task(places=3))
        await until(filled(b, 2))

        async def numbered() -> bool:
            return len(await a.keys("trajectory")) == 2

        await until(numbered)
        await b.kill()
        stop_at(a, "POST", after=False)
        await fleet.replace_second("a", "c")
        await trio.sleep(0.3)
        assert await c.row("t1") is None
        await a.kill()
        await back(fleet, "a")
        await fleet.resume("a", own=["t1"])
        await until(ended(a))
        await until(filled(c, 3))
        await fleet.check_group(3)


async def test_orders_that_come_twice_do_nothing_more(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        stop_at(a, "PUT", after=False)
        await fleet.submit("a", "b", task(places=2))
        await a.kill()
        for _ in range(2):
            assert (await fleet.adopt("b", "c")).epoch == Epoch(1, 1)
        await until(ended(b))
        await fleet.check_group(2)
        assert await b.keys("attempt") == []


async def test_an_order_is_carried_out_though_its_front_is_gone(tmp_path: Path) -> None:
    """Quart ends the handler of a request whose client is gone."""
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        stop_at(a, "PUT", after=False)
        await fleet.submit("a", "b", task(places=2))
        await a.kill()
        adoption = Adoption(task_id="t1", epoch=Epoch(1, 1), second=fleet["c"].journal)
        async with trio.open_nursery() as handler:
            handler.start_soon(b.node.homes.adopt, [adoption])
            await trio.testing.wait_all_tasks_blocked(0.001)
            handler.cancel_scope.cancel()
        await until(ended(b))
        await fleet.check_group(2)


async def test_what_every_reader_has_is_dropped(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        await fleet.submit("a", "b", task(places=2))
        await until(ended(a))
        await trio.sleep(0.2)
        assert (await row_of(b)).role == "second"
        last = a.node.journal.last_seq
        await a.call("POST", "/v1/trajectories/ack", {"consumer": "trainer", "seq": last})

        async def dropped() -> bool:
            return (await row_of(b)).ended

        await until(dropped)
        row = await row_of(a)
        assert (row.role, row.epoch, row.finished) == ("home", Epoch(0, 0), True)  # a plain task now
        left = await row_of(b)  # what it remembers, and lists for nobody
        assert (left.role, left.home, left.ended) == ("former", a.journal, True)
        assert (await b.call("GET", "/v1/fleet/tasks"))["tasks"] == []


async def test_a_drained_node_takes_no_task(tmp_path: Path) -> None:
    async with three(tmp_path) as fleet:
        report = await fleet["a"].call("POST", "/v1/fleet/drain", {"draining": True})
        assert report["draining"]
        with pytest.raises(ClientError, match="drains"):
            await fleet.submit("a", "b", task())
        assert await fleet["a"].row("t1") is None
        await fleet["a"].call("POST", "/v1/fleet/drain", {"draining": False})
        await fleet.submit("a", "b", task(), "t2")
        await until(ended(fleet["a"], "t2"))
        assert (await fleet["a"].call("GET", "/v1/fleet/runs/t2"))["finished"]


async def test_a_home_that_is_stopped_leaves_its_places_open(tmp_path: Path) -> None:
    """A stop of the node is no end of its tasks, as often as it happens."""
    async with three(tmp_path) as fleet:
        a, b = fleet["a"], fleet["b"]
        await fleet.submit("a", "b", task(3600.0, places=2, budgets={"retries": 0}))
        for stops in (True, False, False):
            if stops:
                await a.node.stop(cancel=True)
                with pytest.raises(ClientError, match="stopping"):
                    await fleet.adopt("a", "c")
            await a.kill()
            await back(fleet, "a")
            await fleet.resume("a", own=["t1"])
            assert await a.keys("trajectory", "group") == []
            assert a.node.scheduler.statistics().live == 2
        await a.kill()
        await fleet.adopt("b", "c")
        await b.call("DELETE", "/v1/tasks/t1")
        await until(ended(b))
        await fleet.check_group(2)
        # what is not retired yet keeps its row, or a restart would run it again
        await back(fleet, "a")
        drop = "/v1/fleet/tasks/t1?term=1&epoch_term=1&epoch_number=9"
        await a.call("DELETE", drop)
        assert (await row_of(a)).waiting
        await fleet.resume("a", moved={"t1": ("b", 1)})

        async def retired() -> bool:
            return (await row_of(a)).open_places == 0

        await until(retired)
        await a.call("DELETE", drop)
        assert (await a.node.homes.rows()).tasks == ()
        # a second home again, and dropped again: what it was before does not look like the task's own end
        copy = await b.node.journal.query(copy_of, "t1")
        later = evolve(copy[1], epoch=Epoch(1, 2), second=a.journal)
        await fleet.copy("a", later, "second")
        assert (await row_of(a)).role == "second"
        await a.call("DELETE", drop)
        assert (await row_of(a)).role == "former"
        await fleet.check_group(2)
        await is_sound(fleet, "a", "b", "c")
