"""What every implementation of the log does. `log` is each of them in turn."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from journal_samples import make_spec, make_trajectory
from log_kit import NOW, claim, end, expire_node, join, keys, open_postgres, open_sqlite, submit
from memory_log import MemoryLog

from polarnode.core.codec.json import read_json
from polarnode.core.cursors import Cursor
from polarnode.core.errors import Conflict, Refused
from polarnode.core.status import RewardEvent
from polarnode.core.task import CAPTURE_HARNESS, EvaluationSpec, ForkSpec, GroupSpec, HarnessSpec
from polarnode.core.trajectory import ForkedFrom, Outcome
from polarnode.journal.log.port import FILLED_ANSWERS, ClaimOffer, Log, NodeFacts, pack_whole_session
from polarnode.journal.log.postgres.postgres import PostgresLog
from polarnode.journal.pending_callbacks import CallbackCounts
from polarnode.journal.values import EventFilters, RetentionLimits

WEEK = 7 * 24 * 3600.0


@pytest.fixture(params=["sqlite", "postgres"])
async def log(request: pytest.FixtureRequest) -> AsyncIterator[Log]:
    if request.param == "sqlite":
        async with open_sqlite(request.getfixturevalue("tmp_path") / "journal.sqlite") as alone:
            yield alone
        return
    async with open_postgres(request.getfixturevalue("dsn"), watch=False) as found:
        yield found


@pytest.fixture(params=["sqlite", "postgres", "memory"])
async def places(request: pytest.FixtureRequest) -> AsyncIterator[Log]:
    """Also the fake that tests of sessions in virtual time stand on, which has places and no events."""
    if request.param == "memory":
        yield cast(Log, MemoryLog())
        return
    if request.param == "sqlite":
        async with open_sqlite(request.getfixturevalue("tmp_path") / "journal.sqlite") as alone:
            yield alone
        return
    async with open_postgres(request.getfixturevalue("dsn"), watch=False) as found:
        yield found


@pytest.fixture
async def shared(dsn: str) -> AsyncIterator[Log]:
    """A log that several nodes share."""
    async with open_postgres(dsn, watch=False) as found:
        yield found


# ── tasks ─────────────────────────────────────────────────────────────────────


async def test_submit_and_read_task(log: Log) -> None:
    await submit(log, "a", num_samples=2, key="k", group_id="g", metadata={"text": "\0 and \ud7ff"})
    record = await log.task("a")
    assert record is not None
    assert (record.group_id, record.idempotency_key, record.submitted) == ("g", "k", NOW)
    assert [each.session_id for each in record.sessions] == ["a-0", "a-1"]
    assert record.spec.metadata == {"text": "\0 and \ud7ff"}
    assert await log.task_of_key("k") == record
    assert await log.tasks() == (record,)
    assert await log.task("b") is None
    assert not record.finished


async def test_same_key_submits_task_once(log: Log) -> None:
    await submit(log, "a", key="k")
    again = await log.submit(
        make_spec(), task_id="b", session_ids=("b-0",), idempotency_key="k", submitted=NOW
    )
    assert again.task_id == "a"
    assert len(await log.tasks()) == 1


async def test_submit_refuses_taken_id(places: Log) -> None:
    await submit(places, "a")
    await submit(places, "a")  # the same, after a lost answer
    with pytest.raises(Conflict, match="task a exists"):
        await submit(places, "a", instruction="another")


async def test_submit_refuses_null_character(log: Log) -> None:
    with pytest.raises(Refused, match=r"U\+0000"):
        await submit(log, "a\0")


async def test_tasks_are_listed_in_pages(log: Log) -> None:
    for name in "abc":
        await submit(log, name)
    assert [each.task_id for each in await log.tasks(limit=2)] == ["c", "b"]
    assert [each.task_id for each in await log.tasks(limit=2, before="b")] == ["a"]


async def test_latest_run_of_name(log: Log) -> None:
    for name in ("a", "a:run-2", "a:run-3", "ab", "a:run.9"):
        await submit(log, name)
    found = await log.latest_run("a")
    assert found is not None
    assert found.task_id == "a:run-3"
    assert await log.latest_run("b") is None


# ── claims ────────────────────────────────────────────────────────────────────


async def test_places_are_claimed_in_order(places: Log) -> None:
    node = await join(places)
    await submit(places, "old", num_samples=2)
    await submit(places, "image")
    await submit(places, "urgent", priority=90)
    first = await claim(places, node, 2)
    assert [each.session_id for each in first] == ["urgent-0", "old-0"]
    second = await places.claim(ClaimOffer(incarnation=node, room=1, images=("other",)))
    assert [each.session_id for each in second] == ["old-1"], "what runs here goes before an older task"


async def test_claim_of_begun_tasks_only(places: Log) -> None:
    node = await join(places)
    await submit(places, "a", num_samples=3)
    assert not await places.claim(ClaimOffer(incarnation=node, room=9, begun_only=True))
    await claim(places, node, 1)
    await submit(places, "urgent", priority=90)
    rest = await places.claim(ClaimOffer(incarnation=node, room=9, begun_only=True))
    assert [each.session_id for each in rest] == ["a-1", "a-2"]


async def test_claim_prefers_prepared_images(places: Log) -> None:
    node = await join(places)
    await submit(places, "a")
    await submit(places, "b", runtime=make_spec().runtime.__class__(image="special"))
    found = await places.claim(ClaimOffer(incarnation=node, room=1, images=("special",)))
    assert [each.task_id for each in found] == ["b"]


async def test_claim_needs_node_labels(places: Log) -> None:
    node = await join(places)
    await submit(places, "a", requires={"zone": "x", "model": "m"})
    assert not await claim(places, node, labels={"zone": "x"})
    assert await claim(places, node, labels={"zone": "x", "model": "m", "node": "n"})


async def test_concurrent_submits_share_one_key(log: Log) -> None:
    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(partial(submit, log, name, key="k"))
    (only,) = await log.tasks()
    assert await log.task_of_key("k") == only
    assert len(await claim(log, await join(log))) == 1


async def test_capture_takes_place_by_name(places: Log) -> None:
    node = await join(places)
    await submit(places, "t", num_samples=2, harness=HarnessSpec(name=CAPTURE_HARNESS))
    assert not await claim(places, node), "its callers run its sessions"
    taken = await places.take_place("t", 1, node)
    assert taken is not None
    assert (taken.session_id, taken.sample_index, taken.attempt) == ("t-1", 1, 0)
    assert await places.take_place("t", 1, node) is None, "it is taken"
    assert await places.take_place("t", 2, node) is None
    assert await places.take_place("u", 0, node) is None
    assert await places.finish_claim(taken, end(taken)) in FILLED_ANSWERS
    assert await places.cancel("t", NOW)
    assert [each.session_id for each in await places.claim_endings(node, 10)] == ["t-0"]


async def test_second_claim_gives_nothing(shared: Log) -> None:
    first, second = await join(shared, "a"), await join(shared, "b")
    await submit(shared, "t", num_samples=3)
    mine = await claim(shared, first, 2)
    assert [each.attempt for each in mine] == [0, 0]
    assert len(await claim(shared, second)) == 1
    assert not await claim(shared, first)
    assert await shared.claims(first) == mine, "what a node asks after a lost answer"


async def test_finish_completes_whole_group(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", num_samples=2, group_id="g")
    one, two = await claim(log, node)
    assert await log.finish_claim(one, end(one)) in FILLED_ANSWERS
    assert await log.finish_claim(two, end(two, reward=0.0, finished=NOW + 5)) in FILLED_ANSWERS
    assert await keys(log) == ["trajectory:t-0", "trajectory:t-1", "group:t", "task:t"]
    page = (await log.events(Cursor())).page
    whole, group, task = (read_json(page.events[index].body) for index in (0, 2, 3))
    assert whole["session_id"] == "t-0"
    assert len(whole["traces"]) == 1
    assert group["rewards"] == [1.0, 0.0]
    assert group["state"] == "complete"
    assert group["group_id"] == "g"
    assert task == {
        "task_id": "t",
        "group_id": "g",
        "counts": {"completed": 2},
        "submitted": NOW,
        "finished": NOW + 5,
    }
    record = await log.task("t")
    assert record is not None
    assert record.finished
    assert await log.trajectory("t-0") == make_trajectory("t-0", group_id="g")


async def test_finish_after_lost_answer(log: Log) -> None:
    node = await join(log)
    await submit(log, "t")
    (held,) = await claim(log, node)
    assert await log.finish_claim(held, end(held)) in FILLED_ANSWERS
    assert await log.finish_claim(held, end(held)) == "already"
    assert await keys(log) == ["trajectory:t-0", "group:t", "task:t"]


async def test_finish_of_unknown_task(places: Log) -> None:
    node = await join(places)
    await submit(places, "t")
    (held,) = await claim(places, node)
    stray = pack_whole_session(make_trajectory("x", task_id="gone"), finished=NOW)
    assert await places.finish_claim(type(held)(**{**_fields(held), "task_id": "gone"}), stray) == "unknown"


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in value.__attrs_attrs__}


async def test_siblings_finish_at_once(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", num_samples=8)
    async with trio.open_nursery() as nursery:
        for held in await claim(log, node):
            nursery.start_soon(log.finish_claim, held, end(held))
    assert len(await keys(log)) == 10


async def test_finish_with_large_body(log: Log) -> None:
    node = await join(log)
    await submit(log, "t")
    (held,) = await claim(log, node)
    assert await log.finish_claim(held, end(held, turns=3, sampled=1_000_000)) in FILLED_ANSWERS
    whole = await log.trajectory("t-0")
    assert whole is not None
    assert whole.sampled_tokens == 3_000_000


async def test_capture_is_published_once(log: Log) -> None:
    node = await join(log)
    capture = pack_whole_session(make_trajectory("c", task_id="", group_id=""), finished=NOW)
    assert await log.publish_session(capture, node) == "now"
    assert await log.publish_session(capture, node) == "already"
    assert await keys(log) == ["trajectory:c"]


# ── places that are put back ──────────────────────────────────────────────────


async def test_put_back_counts_a_retry(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", retries=1)
    (held,) = await claim(log, node)
    assert await log.put_back(held, end(held, status="interrupted", reward=None)) is None
    (again,) = await claim(log, node)
    assert (again.attempt, again.retries) == (1, 1)
    assert again.session_id != held.session_id
    assert await log.finish_claim(again, end(again)) in FILLED_ANSWERS
    assert await keys(log) == ["attempt:t-0", f"trajectory:{again.session_id}", "group:t", "task:t"]
    lost = await log.session("t-0")
    assert lost is not None
    assert lost.retried_as == again.session_id


async def test_put_back_keeps_place_at_node(places: Log) -> None:
    node = await join(places)
    await submit(places, "t")
    (held,) = await claim(places, node)
    kept = await places.put_back(held, end(held, status="interrupted"), keep=True, counts=False)
    assert kept is not None
    assert (kept.attempt, kept.retries) == (1, 0)
    assert [each.session_id for each in await places.claims(node)] == [kept.session_id]
    assert await places.put_back(held) is None, "it was put back before"
    assert await places.finish_claim(kept, end(kept)) in FILLED_ANSWERS


async def test_spent_retries_end_group(shared: Log) -> None:
    await submit(shared, "t", num_samples=2, retries=1)
    for attempt in range(2):
        node = await join(shared, f"dead{attempt}")
        held = await claim(shared, node)
        assert [each.attempt for each in held] == [attempt] * 2
        await expire_node(shared, node)
    node = await join(shared, "alive")
    assert not await claim(shared, node), "a task that kills nodes walks on to no other"
    for ending in await shared.claim_endings(node, 10):
        assert ending.ending == "retries spent"
        lost = Outcome(status="error", boundary="node", reason="its node was lost")
        assert (
            await shared.finish_claim(ending, end(ending, outcome=lost, reward=None, turns=0))
            in FILLED_ANSWERS
        )
    found = await keys(shared)
    assert found[2:] == ["group:t", "task:t"]


async def test_lost_node_finishes_unclaimed_place(shared: Log) -> None:
    slow, other = await join(shared, "slow"), await join(shared, "other")
    await submit(shared, "t")
    (held,) = await claim(shared, slow)
    await expire_node(shared, slow)
    assert await shared.finish_claim(held, end(held)) in FILLED_ANSWERS, "nobody else runs it"
    assert not await claim(shared, other)


async def test_late_finish_becomes_attempt(shared: Log) -> None:
    slow, other = await join(shared, "slow"), await join(shared, "other")
    await submit(shared, "t")
    (held,) = await claim(shared, slow)
    await expire_node(shared, slow)
    (again,) = await claim(shared, other)
    assert await shared.finish_claim(held, end(held)) == "another"
    assert await shared.publish_session(end(held), slow) == "now"
    assert await shared.finish_claim(again, end(again)) in FILLED_ANSWERS
    assert await shared.finish_claim(held, end(held)) == "another"
    assert await keys(shared) == ["attempt:t-0", f"trajectory:{again.session_id}", "group:t", "task:t"]


# ── cancels and early stops ───────────────────────────────────────────────────


async def test_cancel_running_and_queued_places(places: Log) -> None:
    node = await join(places)
    await submit(places, "t", num_samples=2)
    (held,) = await claim(places, node, 1)
    assert await places.cancel("t", NOW)
    assert await places.sessions_to_stop(node) == {held.session_id: "cancelled"}
    assert not await claim(places, node)
    (queued,) = await places.claim_endings(node, 10)
    assert queued.ending == "cancelled"
    assert queued.session_id == "t-1"
    for each in (held, queued):
        assert await places.finish_claim(each, end(each, status="cancelled", reward=None)) in FILLED_ANSWERS
    assert not await places.cancel("t", NOW)
    assert not await places.cancel("u", NOW)


async def test_cancelled_place_of_dead_node(shared: Log) -> None:
    dead, node = await join(shared, "dead"), await join(shared)
    await submit(shared, "t")
    await claim(shared, dead)
    await shared.cancel("t", NOW)
    await expire_node(shared, dead)
    assert not await claim(shared, node)
    assert [each.ending for each in await shared.claim_endings(node, 10)] == ["cancelled"]


async def test_early_stop_across_nodes(shared: Log) -> None:
    one, two = await join(shared, "one"), await join(shared, "two")
    await submit(shared, "t", num_samples=4, group=GroupSpec(early_stop_min=2))
    first, second = await claim(shared, one, 2)
    (third,) = await claim(shared, two, 1)
    await shared.finish_claim(first, end(first, reward=None))  # not usable
    assert await shared.finish_claim(second, end(second)) in FILLED_ANSWERS
    assert not await shared.sessions_to_stop(two)
    (fourth,) = await claim(shared, one, 1)
    assert await shared.finish_claim(fourth, end(fourth)) in FILLED_ANSWERS
    assert await shared.sessions_to_stop(two) == {third.session_id: "early stop"}


async def test_early_stop_ends_queued_places(places: Log) -> None:
    node = await join(places)
    await submit(places, "t", num_samples=2, group=GroupSpec(early_stop_min=1))
    (first,) = await claim(places, node, 1)
    await places.finish_claim(first, end(first))
    assert not await claim(places, node)
    assert [each.ending for each in await places.claim_endings(node, 10)] == ["early stop"]


# ── nodes ─────────────────────────────────────────────────────────────────────


async def test_rejoining_node_inherits_own_places(log: Log) -> None:
    await submit(log, "t", num_samples=2)
    first = await join(log)
    one, two = await claim(log, first)
    joined = await log.join(NodeFacts(name="n"))
    assert [each.session_id for each in joined.inherited] == [one.session_id, two.session_id]
    assert not await log.give_sign(first), "it was replaced"
    assert await log.finish_claim(one, end(one)) == "another", "an older process of the name is fenced out"
    mine = joined.inherited[0]
    assert await log.finish_claim(mine, end(mine, status="interrupted")) in FILLED_ANSWERS
    assert await log.put_back(joined.inherited[1]) is None
    assert [each.attempt for each in await claim(log, joined.incarnation)] == [1]


async def test_expire_needs_the_current_sign(shared: Log) -> None:
    node = await join(shared)
    watched = (await shared.read_signs())[node]
    assert await shared.give_sign(node)
    assert not await shared.declare_lost(node, watched), "it has signed since"
    assert await shared.declare_lost(node, (await shared.read_signs())[node])
    assert not await shared.give_sign(node)
    assert node not in await shared.read_signs()


async def test_lost_node_claims_nothing(shared: Log) -> None:
    node = await join(shared)
    await expire_node(shared, node)
    await submit(shared, "t")
    assert not await claim(shared, node)
    assert not await shared.claim_endings(node, 1)


async def test_leaving_node_gives_places_back(shared: Log) -> None:
    node, other = await join(shared), await join(shared, "other")
    await submit(shared, "t")
    await claim(shared, node)
    await shared.leave(node)
    assert len(await claim(shared, other)) == 1


async def test_nodes_and_node_of_session(log: Log) -> None:
    node = await join(log, url="http://a", labels={"zone": "x"}, certificate="ab")
    await log.give_sign(node, {"load": 3})
    await submit(log, "t")
    await claim(log, node)
    (row,) = await log.nodes()
    assert (row.facts.url, row.facts.labels, row.running, row.report) == (
        "http://a",
        {"zone": "x"},
        1,
        {"load": 3},
    )
    assert await log.node_of("t-0") == row
    assert await log.node_of("u") is None


# ── events and consumers ──────────────────────────────────────────────────────


async def _finished(log: Log, *names: str) -> None:
    node = await join(log, "finisher")
    for name in names:
        await submit(log, name)
    for held in await claim(log, node):
        await log.finish_claim(held, end(held))


async def test_events_after_cursor(log: Log) -> None:
    await _finished(log, "a", "b")
    name = await log.log_name()
    found = await log.events(Cursor(position=2, log=name), limit=2)
    assert [each.seq for each in found.page.events] == [3, 4]
    assert found.gap is None
    assert found.log == name
    assert found.page.seen == 4
    filtered = await log.events(Cursor(), filters=EventFilters(task_id="b", kinds=("group",)))
    assert [each.key for each in filtered.page.events] == ["group:b"]
    assert filtered.page.seen == 6, "a reader whose filters match nothing more is at the end"


async def test_consumer_never_moves_back(log: Log) -> None:
    await _finished(log, "a")
    assert (await log.consumer_cursor("c")).position == 0
    assert (await log.acknowledge("c", Cursor(position=2), now=NOW)).position == 2
    assert (await log.acknowledge("c", Cursor(position=1), now=NOW + 1)).position == 2
    assert (await log.acknowledge("c", Cursor(position=99), now=NOW + 2)).position == 3
    (row,) = await log.consumers()
    assert (row.consumer, row.position, row.behind_events, row.moved, row.last_seen) == (
        "c",
        3,
        0,
        NOW + 2,
        NOW + 2,
    )
    assert await log.forget_consumer("c")
    assert not await log.forget_consumer("c")


async def test_open_streams_are_counted(log: Log) -> None:
    node = await join(log)
    await log.acknowledge("c", Cursor(), now=NOW)

    async def streams() -> tuple[int, bool]:
        await log.give_sign(node)
        (row,) = await log.consumers()
        return row.connected, row.holds

    log.track_stream("c", 1)
    log.track_stream("c", 1)
    assert await streams() == (2, True)
    log.track_stream("c", -1)
    assert (await streams())[0] == 1
    log.track_stream("c", -1)
    assert (await streams())[0] == 0


async def test_streams_of_dead_node_end(shared: Log) -> None:
    """Else a consumer that was read there when its node died would hold retention for ever."""
    node = await join(shared)
    await shared.acknowledge("c", Cursor(), now=NOW - WEEK)
    shared.track_stream("c", 1)
    await shared.give_sign(node)
    assert (await shared.consumers())[0].connected == 1
    await expire_node(shared, node)
    assert (await shared.consumers())[0].connected == 0
    again = await join(shared)
    await shared.give_sign(again)
    assert (await shared.consumers())[0].connected == 1, "the stream is still open in this process"


async def test_consumer_is_registered_once(log: Log) -> None:
    await _finished(log, "a")
    end_of_log = await log.last_cursor()
    assert end_of_log == Cursor(position=3, log=await log.log_name())
    assert (await log.ensure_consumer("new", end_of_log, now=NOW)).position == 3
    assert (await log.ensure_consumer("new", Cursor(), now=NOW)) == end_of_log, "it is known from then on"
    assert (await log.ensure_consumer("old", Cursor(), now=NOW)).position == 0
    assert [(each.consumer, each.position) for each in await log.consumers()] == [("new", 3), ("old", 0)]


async def test_position_of_another_log(log: Log) -> None:
    """A number says nothing of its log: one beyond the end is of another, whose reader has read nothing here."""
    await _finished(log, "a")
    found = await log.events(Cursor(position=9))
    assert found.gap is not None
    assert (found.gap.position, len(found.page.events)) == (0, 3)
    assert (await log.acknowledge("c", Cursor(position=9), now=NOW)).position == 3


async def test_standing_reports_log_positions(log: Log) -> None:
    await _finished(log, "a", "b")
    await log.acknowledge("c", Cursor(position=4), now=NOW)
    if isinstance(log, PostgresLog):
        await log.update_status()
    found = log.log_status
    assert (found.position, found.pruned, found.acknowledged) == (6, 0, 4)
    assert (found.log, found.consumers) == (await log.log_name(), {"c": 4})
    assert found.oldest_unacknowledged is not None
    assert found.unacknowledged_bytes > 0


async def test_finished_groups_newest_first(log: Log) -> None:
    node = await join(log)
    await submit(log, "a", num_samples=2, metadata={"n": 1})
    for held in await claim(log, node):
        await log.finish_claim(held, end(held, reward=float(held.sample_index), finished=NOW))
    await submit(log, "b")
    (held,) = await claim(log, node)
    await log.finish_claim(held, end(held, status="error", finished=NOW + 5))
    newest, oldest = await log.finished_groups(10)
    assert (newest["task_id"], newest["ended"], newest["usable"]) == ("b", NOW + 5, 1)
    assert (oldest["task_id"], oldest["metadata"], oldest["submitted"]) == ("a", {"n": 1}, NOW)
    advantages: Any = oldest["advantages"]
    assert advantages[0] < 0 < advantages[1]
    assert [each["task_id"] for each in await log.finished_groups(1)] == ["b"]
    assert [each["task_id"] for each in await log.finished_groups(10, until=NOW + 1)] == ["a"]
    assert [each["task_id"] for each in await log.finished_groups(10, task_id="a")] == ["a"]
    assert [each["task_id"] for each in await log.finished_groups(1, state="complete")] == ["b"]
    assert await log.finished_groups(1, state="dropped") == ()


async def test_retention_prunes_acknowledged_events(log: Log) -> None:
    await _finished(log, "a", "b")
    keep = RetentionLimits(acknowledged=0, everything=1 << 40)
    assert await log.prune(keep, now=NOW) == 0, "no consumer has acknowledged anything"
    await log.acknowledge("slow", Cursor(position=3), now=NOW)
    await log.acknowledge("quick", Cursor(position=6), now=NOW)
    assert await log.prune(keep, now=NOW) == 3
    assert await log.task("a") is None
    assert await log.session("a-0") is None
    found = await log.events(Cursor(position=1))
    assert found.gap is not None
    assert found.gap.position == 3
    assert "retention" in found.gap.reason
    assert found.page.first_seq == 4
    assert await log.prune(keep, now=NOW) == 0
    # a consumer that was not seen for a week is no longer waited for
    await log.acknowledge("quick", Cursor(position=6), now=NOW + WEEK)
    assert await log.prune(keep, now=NOW + WEEK + 60) == 3
    assert (await log.events(Cursor(position=6))).gap is None
    await _finished(log, "c")
    assert (await keys(log, 6))[0] == "trajectory:c-0", "positions go on"


async def test_retention_prunes_beyond_total_limit(log: Log) -> None:
    await _finished(log, "a", "b")
    await log.acknowledge("c", Cursor(position=0), now=NOW)
    assert await log.prune(RetentionLimits(everything=0, acknowledged=0), now=NOW) == 6


async def test_retention_prunes_by_age(log: Log) -> None:
    await _finished(log, "a")
    keep = RetentionLimits(acknowledged_s=100.0)
    await log.acknowledge("c", Cursor(position=3), now=NOW)
    assert await log.prune(keep, now=NOW) == 0
    assert await log.prune(keep, now=NOW + 99) == 0
    assert await log.prune(keep, now=NOW + 101) == 3


# ── weights ───────────────────────────────────────────────────────────────────


async def test_version_counts_with_two_holders(shared: Log) -> None:
    one, two = await join(shared, "one"), await join(shared, "two")
    await shared.add_weights("v1", {"step": 1}, at=NOW)
    await shared.add_weight_holder("v1", one)
    assert not await shared.make_current("v1")
    await shared.add_weight_holder("v1", two)
    assert await shared.make_current("v1")
    (row,) = await shared.weights()
    assert row.current
    assert row.holders == (one, two)
    assert row.body == {"step": 1}
    await shared.add_weights("v2", {}, at=NOW)
    await shared.add_weight_holder("v2", one)
    await shared.add_weight_holder("v2", two)
    await expire_node(shared, one)
    assert not await shared.make_current("v2"), "a dead holder has no files"
    await shared.add_weights("v3", {}, shared=True, at=NOW)
    assert await shared.make_current("v3", holders=2)
    assert [each.version for each in await shared.weights() if each.current] == ["v3"]


async def test_stale_node_claims_nothing(log: Log) -> None:
    node = await join(log)
    await log.add_weights("v1", {}, shared=True, at=NOW)
    await log.make_current("v1")
    await log.report_serving(node, {"": "v0"})
    await submit(log, "t")
    assert [each.facts.name for each in await log.stale_nodes()] == ["n"]
    assert not await claim(log, node, serving={"": "v0"})
    await log.report_serving(node, {"": "v1"})
    assert not await log.stale_nodes()
    assert await claim(log, node, serving={"": "v1"})


async def test_claim_requires_adapter_version(log: Log) -> None:
    node = await join(log)
    body = {"source": {"kind": "adapter", "adapter": "a"}}
    await log.add_weights("a2", body, shared=True, at=NOW)
    await log.make_current("a2")
    await submit(log, "t", adapter="a")
    await submit(log, "u")
    assert [each.task_id for each in await claim(log, node, serving={"a": "a1"})] == ["u"]
    assert [each.task_id for each in await claim(log, node, serving={"a": "a2"})] == ["t"]
    assert [each.version for each in await log.weights(adapters=True)] == ["a2"]


async def test_version_is_found_by_name(log: Log) -> None:
    node = await join(log)
    await log.add_weights("v1", {"step": 1}, shared=True, at=NOW)
    await log.add_weights("v1", {"step": 2}, at=NOW)
    await log.add_weight_holder("v1", node)
    await log.make_current("v1")
    row = await log.weights_of("v1")
    assert row is not None
    assert (row.body, row.current, row.counted, row.holders) == ({"step": 1}, True, True, (node,))
    assert await log.weights_of("v2") is None


async def test_latest_version_of_each_adapter(log: Log) -> None:
    await join(log)
    for version, adapter in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("a3", "a")):
        body: dict[str, Any] = {"source": {"kind": "adapter", "adapter": adapter}}
        await log.add_weights(version, body, shared=True, at=NOW)
    await log.add_weights("v1", {}, shared=True, at=NOW)
    latest = await log.weights(adapters=True, latest=True)
    assert [each.version for each in latest] == ["a3", "b1"]
    assert [each.version for each in await log.weights(adapters=True)] == ["a3", "a2", "b1", "a1"]
    assert [each.version for each in await log.weights(latest=True)] == ["v1"]


async def test_current_version_is_among_latest(shared: Log) -> None:
    """A node loads the version that counts while a newer one has no second copy yet."""
    await join(shared)
    await shared.add_weights("v1", {}, shared=True, at=NOW)
    await shared.make_current("v1")
    for version in ("v2", "v3"):
        await shared.add_weights(version, {}, at=NOW)
    latest = await shared.weights(latest=True)
    assert [(each.version, each.current, each.counted) for each in latest] == [
        ("v3", False, False),
        ("v1", True, True),
    ]


async def test_deleted_adapter_is_not_required(log: Log) -> None:
    node = await join(log)
    body = {"kind": "adapter", "adapter": "a"}
    await log.add_weights("a1", {"source": {**body}}, shared=True, at=NOW)
    await log.make_current("a1")
    await submit(log, "t", adapter="a")
    assert not await claim(log, node)
    await log.change_weights("a1", {"source": {**body, "deleted": "true"}})
    assert await claim(log, node), "whoever claims it says that there is no such adapter"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_weight_change_wakes_nodes(kind: str, dsn: str, tmp_path: Path) -> None:
    opened = open_sqlite(tmp_path / "j") if kind == "sqlite" else open_postgres(dsn)
    async with opened as log:
        node = await join(log)
        await log.add_weights("v1", {}, shared=True, at=NOW)
        for change in (partial(log.make_current, "v1"), partial(log.report_serving, node, {"": "v1"})):
            seen = log.news
            with trio.fail_after(30):
                while log.news == seen:  # a notification is lost where nobody listens yet
                    await change()
                    await log.wait_news(seen, 1)


async def test_versions_of_each_model(shared: Log) -> None:
    """Two trainers give their versions the same names, and neither makes the other's nodes stale."""
    policy = await join(shared, "one", labels={"model": "policy"})
    judge = await join(shared, "two", labels={"model": "judge"})
    for model, node in (("policy", policy), ("judge", judge)):
        await shared.add_weights("1", {"of": model}, model=model, at=NOW)
        await shared.add_weight_holder("1", node, model=model)
    assert await shared.make_current("1", model="policy", holders=1)
    (row,) = await shared.weights(model="policy")
    assert (row.body, row.holders) == ({"of": "policy"}, (policy,))
    assert [each.current for each in await shared.weights(model="judge")] == [False]
    for each in (policy, judge):
        await shared.report_serving(each, {"": "0"})
    assert [each.facts.name for each in await shared.stale_nodes()] == ["one"]
    await submit(shared, "t", num_samples=2)
    assert not await claim(shared, policy, 1, labels={"model": "policy"})
    assert await claim(shared, policy, 1, labels={"model": "policy"}, serving={"": "1"})
    assert await claim(shared, judge, 1, labels={"model": "judge"})


async def test_transfers_are_known_everywhere(shared: Log) -> None:
    for number in range(70):
        await shared.add_transfer("update", f"u{number}", {"ids": {"1": str(number)}}, model="m")
    await shared.add_transfer("group", "u69", [1, 2], model="m")
    await shared.add_transfer("group", "u69", [1, 3], model="m")
    assert await shared.read_transfer("update", "u69", model="m") == {"ids": {"1": "69"}}
    assert await shared.read_transfer("group", "u69", model="m") == [1, 3]
    assert await shared.read_transfer("update", "u69", model="other") is None
    assert await shared.read_transfer("update", "u0", model="m") is None, (
        "updates that were left are forgotten"
    )
    await shared.end_transfer("update", "u69", model="m")
    assert await shared.read_transfer("update", "u69", model="m") is None
    assert await shared.read_transfer("group", "u69", model="m") == [1, 3]


async def test_hold_one_model_or_all(shared: Log) -> None:
    await join(shared, "one")
    await shared.hold_generation("retract")
    await shared.hold_generation(None, model="judge")
    assert [await shared.generation_hold(model=each) for each in ("policy", "judge")] == ["retract", None]
    await shared.hold_generation("abort", model="judge")
    await shared.hold_generation(None, model="policy")
    assert [await shared.generation_hold(model=each) for each in ("policy", "judge", "new")] == [
        None,
        "abort",
        "retract",
    ]
    await shared.hold_generation(None)
    assert [await shared.generation_hold(model=each) for each in ("policy", "judge", "new")] == [
        None,
        None,
        None,
    ]


async def test_hold_ends_with_held_nodes(shared: Log) -> None:
    """A trainer that died holds nobody who comes later."""
    one, two = await join(shared, "one"), await join(shared, "two")
    await shared.hold_generation("retract")
    await join(shared, "three")
    await expire_node(shared, one)
    assert await shared.generation_hold() == "retract"
    await shared.leave(two)
    assert await shared.generation_hold() is None
    assert await shared.generation_hold(follows=True) == "retract", "who is held waits for the trainer's word"


# ── callbacks ─────────────────────────────────────────────────────────────────


async def test_callback_is_leased_to_one(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", callback_url="http://r")
    (held,) = await claim(log, node)
    await log.finish_claim(held, end(held))
    (first,) = await log.lease_callbacks(10, seconds=60)
    assert (first.key, first.url, first.task_id) == ("trajectory:t-0", "http://r", "t")
    assert not await log.lease_callbacks(10, seconds=60), "the events of a task are sent in order"
    await log.retry_callback(first, after_s=0)
    (again,) = await log.lease_callbacks(10, seconds=60)
    assert not await log.accept_callback(first), "another has leased it since"
    assert await log.accept_callback(again)
    assert [each.key for each in await log.lease_callbacks(10, seconds=60)] == ["group:t"]
    assert await log.count_callbacks() == CallbackCounts(pending=2, expired=0)


async def test_callback_limit_per_url(log: Log) -> None:
    node = await join(log)
    for name, url in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y"), ("e", "z")):
        await submit(log, name, callback_url=f"http://{url}", callback_kinds=("trajectory",))
        (held,) = await claim(log, node)
        await log.finish_claim(held, end(held))
    assert log.callbacks_pending

    async def leased(**more: Any) -> list[str]:
        found = await log.lease_callbacks(10, seconds=60, **more)
        for each in found:
            await log.retry_callback(each, after_s=0)
        return [each.task_id for each in found]

    assert await leased(each=2) == ["a", "b", "d", "e"]
    assert await leased(each=1, rooms={"http://x": 3, "http://y": 0}) == ["a", "b", "c", "e"]
    assert await leased(each=0, rooms={"http://z": 1}) == ["e"]
    [first] = await log.lease_callbacks(1, seconds=60)
    assert await leased(each=1, rooms={"http://x": 2}) == ["b", "c", "d", "e"]
    assert (first.task_id, first.lease) == ("a", 3)


async def test_retention_waits_for_callbacks(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", callback_url="http://r")
    (held,) = await claim(log, node)
    await log.finish_claim(held, end(held))
    await log.acknowledge("c", Cursor(position=3), now=NOW)
    keep = RetentionLimits(acknowledged=0)
    assert await log.prune(keep, now=NOW) == 0
    while found := await log.lease_callbacks(1, seconds=60):
        await log.accept_callback(found[0])
    assert await log.prune(keep, now=NOW) == 3


# ── forks, attempts, evaluations ──────────────────────────────────────────────


async def test_forks_of_session(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", num_samples=2)
    root, fork = await claim(log, node)
    parent = ForkedFrom(session_id=root.session_id, turn=1, got=1, by="replay")
    await log.record_session(end(fork, forked_from=parent).identity)
    (found,) = await log.forks(root.session_id, 10)
    assert found.session_id == fork.session_id
    assert found.forked_from == parent


async def test_earlier_attempts_are_last_first(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", retries=5)
    (held,) = await claim(log, node)
    for _ in range(2):
        held = await log.put_back(held, end(held, status="interrupted", turns=2), keep=True)  # type: ignore[assignment]
    found = await log.earlier_attempts(end(held).identity)
    assert [(each.identity.attempt, each.count) for each in found] == [(1, 2), (0, 2)]


async def test_fork_parent_includes_turns(log: Log) -> None:
    node = await join(log)
    await submit(log, "t")
    (held,) = await claim(log, node)
    fork = ForkSpec(session=held.session_id, turn=1)
    begun = await log.fork_parent(fork)
    assert begun is not None
    assert begun.count == 0, "it has no turns yet"
    await log.finish_claim(held, end(held, turns=3))
    found = await log.fork_parent(fork)
    assert found is not None
    assert (found.spec, found.count, found.damaged) == (held.spec, 3, ())
    assert [each.index for each in found.turns] == [0]
    assert found.next is not None
    assert found.next.index == 1
    assert await log.fork_parent(ForkSpec(session="none", turn=0)) is None


async def test_claim_skips_avoided_places(log: Log) -> None:
    node = await join(log)
    await submit(log, "t", num_samples=3)
    held = await claim(log, node, avoided=frozenset({("t", 1)}))
    assert [each.sample_index for each in held] == [0, 2]
    assert [each.sample_index for each in await claim(log, node)] == [1]


async def test_one_reward_per_evaluation(log: Log) -> None:
    await _finished(log, "a")
    node = await join(log)
    spec = EvaluationSpec(task_id="a")
    status = await log.submit_evaluation(
        spec, {"a-0": None, "x": "unknown"}, evaluation_id="e", idempotency_key="k", incarnation=node, now=NOW
    )
    assert dict(status.counts) == {"pending": 1, "refused": 1}
    assert await log.session_ends(["a-0", "x"]) == {"a-0": True}
    assert (await log.placed_sessions("a", None), await log.placed_sessions(None, "a")) == (
        ("a-0",),
        ("a-0",),
    )
    assert await log.placed_sessions("b", None) == ()
    assert [each.evaluation_id for each in await log.pending_evaluations(node)] == ["e"]
    given = RewardEvent(session_id="a-0", task_id="a", group_id="a", reward=0.5, evaluation_id="e", given=NOW)
    assert await log.write_reward(given)
    assert not await log.write_reward(given)
    done = await log.evaluation(None, "k")
    assert done is not None
    assert done.finished
    assert done.sessions[0].reward == 0.5
    page = (await log.events(Cursor(position=3), filters=EventFilters(kinds=("reward",)))).page
    assert [read_json(each.body)["n"] for each in page.events] == [1]
