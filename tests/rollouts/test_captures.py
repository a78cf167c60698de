"""Captures: a session whose harness is somebody's own. Its key opens it and nothing else, and it ends like
any other, once, whoever ends it first.
"""

import json
import os
import threading
from array import array
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio
from adapters_kit import write_adapter
from attrs import evolve
from captures_kit import Desk, Told, asked, in_thread, open_capture_node
from fakes_engine import ScriptedEngine, order, until
from plane_kit import CONTEXT, HandEngine, answers
from session_kit import scheduling, town
from weights_kit import simulated_tiny

from polarnode.core.codec import read_capture, read_capture_end
from polarnode.core.errors import Busy, Conflict, DiskFull, Refused
from polarnode.core.ports import GenerateOrder
from polarnode.core.task import CaptureEnd, CaptureSpec
from polarnode.core.trajectory import Built, Trajectory
from polarnode.engine.engines import Engines, open_engines
from polarnode.engine.residency import HOLD_S
from polarnode.journal import queries
from polarnode.journal.journal import open_journal
from polarnode.journal.log.port import LogUnavailable, NodeFacts
from polarnode.journal.log.sqlite import SqliteLog
from polarnode.merge.invariants import check
from polarnode.rollouts import captures
from polarnode.rollouts.captures import Capture
from polarnode.rollouts.recovery import recover

KINDS = ("trajectory", "group", "task")
AT_MOST, LOOK = 10.0, 0.2  # seconds


def engine(*texts: str) -> ScriptedEngine:
    return ScriptedEngine(reply=answers(*texts or ("Bread.",)), vocab_size=4096, context_length=CONTEXT)


@pytest.fixture
async def desk(tmp_path: Path) -> Any:
    async with open_capture_node(tmp_path, engine("Bread.", "Loaf.", "Crust.")) as opened:
        yield opened


async def kept(desk: Desk, session_id: str) -> Trajectory:
    found = await desk.journal.reader.query(queries.trajectory, session_id)
    assert found is not None
    check(found.turns, Built(traces=found.traces, left_out=found.left_out))
    return found


# ── a harness of one's own ────────────────────────────────────────────────────


def test_sdks_made_by_two_threads() -> None:
    """Each with its own environment: mixed, a session is sampled under another one's key."""
    other_inside, first_has_read = threading.Event(), threading.Event()

    def other(**_: Any) -> str:
        other_inside.set()
        first_has_read.wait(AT_MOST)
        return os.environ["OPENAI_API_KEY"]

    def first(**_: Any) -> str:
        thread.start()
        other_inside.wait(LOOK)  # never set where one waits for the other
        found = os.environ["OPENAI_API_KEY"]
        first_has_read.set()
        return found

    thread = threading.Thread(target=Told({"OPENAI_API_KEY": "2"})._made, args=(other,))
    assert Told({"OPENAI_API_KEY": "1"})._made(first) == "1"
    thread.join(AT_MOST)
    assert not thread.is_alive()


async def test_sdks_configure_from_environment(desk: Desk) -> None:
    """The SDKs need nothing but the environment, and the session's end is a trajectory."""
    opened = await desk.open(metadata={"row": 7})
    told = Told(opened["env"])
    said = [await in_thread(told.chat), await in_thread(told.messages)]
    ended = await desk.end(
        opened["session_id"], reward=0.5, metrics={"tests": 3}, turn_rewards={"1": 0.25}, exit_code=0
    )
    found = await kept(desk, opened["session_id"])
    assert said == ["Bread.", "Loaf."]
    assert [turn.provider for turn in found.turns] == ["openai_chat", "anthropic"]
    assert (found.outcome.status, found.outcome.exit_code, found.reward, found.harness, found.node) == (
        "completed",
        0,
        0.5,
        "capture",
        "node-0",
    )
    assert (found.metadata, found.metrics["evaluation"]) == ({"row": 7}, {"tests": 3})
    assert {span.turn: span.reward for trace in found.traces for span in trace.turn_spans} == {
        0: None,
        1: 0.25,
    }
    assert {trace.reward for trace in found.traces} == {0.5}
    counts = {
        "turns": 2,
        "traces": len(found.traces),
        "sampled_tokens": found.sampled_tokens,
        "trainable_tokens": found.trainable_tokens,
    }
    assert {name: ended[name] for name in counts} == counts
    assert (ended["reward"], ended["outcome"]["status"]) == (0.5, "completed")
    assert desk.tally.sessions == {"completed": 1}


async def test_capture_is_task_group_and_session(desk: Desk) -> None:
    """A capture is a task, a group and a session to all that read those."""
    opened = await desk.open(group_id="g")
    session_id, task_id = opened["session_id"], opened["task_id"]
    assert (await desk.caller.get(f"/v1/tasks/{task_id}")).json()["counts"] == {"pending": 1}
    assert (await desk.caller.get(f"/v1/sessions/{session_id}")).json()["session"]["status"] == "pending"
    await desk.end(session_id, reward=1)
    assert await desk.events() == [f"trajectory:{session_id}", f"group:{task_id}", f"task:{task_id}"]
    async with desk.caller.stream(follow="false", task_id=task_id) as stream:
        trajectory, group = await stream.event(), await stream.event()
    assert trajectory["data"]["trajectory"]["group_id"] == group["data"]["group"]["group_id"] == "g"
    assert group["data"]["group"]["rewards"] == [1.0]


async def test_group_ends_with_last_capture(desk: Desk) -> None:
    """Several captures are one group, which is over with the last of its places."""
    two = {"task_id": "t", "num_samples": 2, "sampling": {"temperature": 1.0}}
    first = await desk.open(**two)
    await desk.end(first["session_id"], reward=0)
    assert await desk.events() == [f"trajectory:{first['session_id']}"]
    second = await desk.open(**two, sample_index=1)
    assert (second["task_id"], second["group_id"], second["sample_index"]) == ("t", "t", 1)
    await desk.end(second["session_id"], reward=1)
    assert await desk.events() == [
        f"trajectory:{first['session_id']}",
        f"trajectory:{second['session_id']}",
        "group:t",
        "task:t",
    ]
    record = await desk.journal.reader.query(queries.task, "t")
    assert record is not None
    assert [(place.sample_index, place.reward) for place in record.sessions] == [(0, 0.0), (1, 1.0)]


async def test_concurrent_captures_stay_separate(desk: Desk) -> None:
    one, two = await desk.open(), await desk.open()
    async with trio.open_nursery() as nursery:
        for each in (one, two):
            for _ in range(3):
                nursery.start_soon(in_thread, Told(each["env"]).chat)
    await desk.end(one["session_id"])
    await in_thread(Told(two["env"]).messages)
    await desk.end(two["session_id"])
    counts = [len((await kept(desk, each["session_id"])).turns) for each in (one, two)]
    assert counts == [3, 4]
    assert one["key"] != two["key"]


async def test_key_in_path_authenticates_harness(desk: Desk) -> None:
    """A path with the key in it serves a harness that sends no key."""
    opened = await desk.open()
    answer = await in_thread(asked, f"{opened['base_urls']['any']}/v1", "another-key")
    assert answer.status_code == 200
    assert (
        opened["base_urls"]["openai"]
        == opened["env"]["OPENAI_BASE_URL"]
        == f"{opened['base_urls']['anthropic']}/v1"
    )
    assert "POLARNODE_INSTRUCTION" not in opened["env"]


# ── keys ──────────────────────────────────────────────────────────────────────


async def test_wrong_or_missing_key_is_refused(desk: Desk) -> None:
    url = (await desk.open())["base_urls"]["openai"]
    for key in ("sk-polarnode-guessed", None):
        answer = await in_thread(asked, url, key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_foreign_web_origin_is_refused(desk: Desk) -> None:
    """A web page of another origin is refused, even with the key."""
    opened = await desk.open()
    url, key = opened["base_urls"]["openai"], {"Authorization": f"Bearer {opened['key']}"}
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient() as client:
        for page in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
            said = await client.post(f"{url}/chat/completions", json=chat, headers=key | page)
            assert (said.status_code, said.json()["error"]["type"]) == (403, "forbidden")
        fine = await client.post(f"{url}/chat/completions", json=chat, headers=key)
    assert fine.status_code == 200
    assert (await desk.end(opened["session_id"]))["turns"] == 1


async def test_finished_capture_key_is_explained(desk: Desk) -> None:
    """The answer to the key of a finished capture says that it is over."""
    opened = await desk.open()
    await desk.end(opened["session_id"])
    answer = await in_thread(asked, opened["base_urls"]["openai"], opened["key"])
    assert answer.status_code == 410


async def test_capture_key_opens_no_control_plane(desk: Desk) -> None:
    """A capture's key opens models and nothing of the control plane."""
    base = (await desk.open())["base_urls"]["anthropic"]
    caller = type(desk.caller)(url=base)
    for method, path in (
        ("POST", "/v1/capture"),
        ("GET", "/v1/status"),
        ("GET", "/metrics"),
        ("GET", "/v1/tasks"),
        ("DELETE", "/v1/capture/x"),
    ):
        assert (await caller.call(method, path)).status == 404
    assert (await in_thread(httpx.get, f"{base}/v1/models")).status_code == 200


async def test_keys_are_shown_only_once(desk: Desk) -> None:
    """A key is in the first answer and in no list."""
    opened = await desk.open()
    listed, looked = (
        await desk.caller.get("/v1/capture"),
        await desk.caller.get(f"/v1/capture/{opened['session_id']}"),
    )
    assert [each["session_id"] for each in listed.json()["captures"]] == [opened["session_id"]]
    assert opened["key"] not in listed.text + looked.text
    assert opened["key"] not in repr(await desk.captures.begin(CaptureSpec()))


# ── the end ───────────────────────────────────────────────────────────────────


async def test_first_end_of_capture_stands(tmp_path: Path) -> None:
    """The first end stands, and later ends get the same answer."""
    async with open_capture_node(tmp_path, engine()) as desk:
        opened = await desk.open()
        await in_thread(Told(opened["env"]).chat)
        first = await desk.end(opened["session_id"], reward=1)
        assert await desk.end(opened["session_id"], reward=0, status="failed") == first
        assert (await desk.caller.get(f"/v1/capture/{opened['session_id']}")).json() == first
    async with open_capture_node(tmp_path, engine()) as desk:  # the node was started again
        assert await desk.end(opened["session_id"], reward=0) == first
        assert len(await desk.events()) == 3


async def test_trains_every_agent_of_crew(tmp_path: Path) -> None:
    """Every agent of a crew is trained, with tools or without; the answer says what was not, and why."""
    async with open_capture_node(tmp_path, engine()) as desk:
        opened = await desk.open()
        told = Told(opened["env"])
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        await in_thread(partial(told.chat, "Plan it.", system="You are the planner."))
        await in_thread(partial(told.chat, "Do it.", system="You are the coder.", tools=tools))
        await in_thread(partial(told.chat, "Judge it.", system="You are the critic."))
        await in_thread(
            partial(told.chat, system="You are a title generator. You output ONLY a thread title.")
        )
        ended = await desk.end(opened["session_id"], reward=1)
        found = await desk.journal.reader.query(queries.trajectory, opened["session_id"])
    assert found is not None
    assert [turn.role for turn in found.turns] == ["main", "main", "main", "auxiliary"]
    title = len(found.turns[3].sampled)
    assert (ended["left_out"], ended["left_out_tokens"]) == ({"auxiliary": 1}, {"auxiliary": title})
    assert ended["sampled_tokens"] == ended["trainable_tokens"] + title


async def test_two_simultaneous_ends_are_one(desk: Desk) -> None:
    opened = await desk.open()
    ends: list[Any] = []

    async def end(reward: float) -> None:
        ends.append(await desk.end(opened["session_id"], reward=reward))

    async with trio.open_nursery() as nursery:
        for reward in (0.0, 1.0):
            nursery.start_soon(end, reward)
    assert ends[0] == ends[1]
    assert len(await desk.events()) == 3


@pytest.mark.parametrize("seed", range(3))
async def test_each_end_is_delivered_once(tmp_path: Path, seed: int) -> None:
    """Ends from all sides at once, in the middle of calls: by DELETE, twice; by the clock; by the task; by a
    node that stops.
    """
    chance, said = Random(seed), dict[str, int]()

    async def agent(desk: Desk, opened: "dict[str, Any]") -> None:
        said[opened["session_id"]] = 0
        for _ in range(4):
            if (await in_thread(asked, opened["base_urls"]["openai"], opened["key"])).status_code != 200:
                return
            said[opened["session_id"]] += 1

    async def ended(desk: Desk, opened: "dict[str, Any]") -> None:
        await trio.sleep(chance.random() / 2)
        match chance.choice(("twice", "clock", "task", "node")):
            case "twice":
                async with trio.open_nursery() as both:
                    for reward in (0.0, 1.0):
                        both.start_soon(partial(desk.end, opened["session_id"], reward=reward))
            case "clock":
                found = desk.captures.registry.get(Capture, opened["session_id"])
                if found is not None:
                    found.clock.scope.deadline = trio.current_time()
            case "task":
                await desk.scheduler.cancel(opened["task_id"])
            case "node":
                desk.captures.registry.cancel_all()

    async with open_capture_node(tmp_path, engine()) as desk:
        every = [await desk.open() for _ in range(6)]
        async with trio.open_nursery() as nursery:
            for opened in every:
                nursery.start_soon(agent, desk, opened)
                nursery.start_soon(ended, desk, opened)
        await desk.captures.registry.stop(cancel=True)
        events = await desk.events()
        assert sorted(events) == sorted(
            f"{kind}:{each['task_id' if kind != 'trajectory' else 'session_id']}"
            for each in every
            for kind in KINDS
        )
        for opened in every:
            found = await kept(desk, opened["session_id"])
            complete = [turn for turn in found.turns if turn.state == "complete"]
            assert len(complete) >= said[opened["session_id"]], "an answer that was given is in no trajectory"
            assert [turn.index for turn in found.turns] == [
                turn.index for turn in await desk.journal.reader.query(queries.turns, opened["session_id"])
            ]
        assert (desk.captures.list(), desk.captures.sessions_by_key.statistics().live) == ((), 0)


async def test_end_continues_after_client_leaves(desk: Desk) -> None:
    opened = await desk.captures.begin(CaptureSpec())
    with trio.CancelScope() as scope:
        scope.cancel()
        await desk.captures.end(opened.session_id, CaptureEnd(reward=1.0))
    found = await desk.captures.trajectory(opened.session_id)
    assert found is not None
    assert found.reward == 1.0


async def test_call_in_flight_is_kept_partially(tmp_path: Path) -> None:
    """A call under way at the end of a capture is kept as far as it came."""
    hand = HandEngine()
    async with open_capture_node(tmp_path, hand) as desk:
        opened = await desk.open()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, asked, opened["base_urls"]["openai"], opened["key"])
            await hand.asked.wait()
            hand.give("Half a ")
            await hand.took.wait()
            ended = await desk.end(opened["session_id"], status="failed", reason="it hung", reward=0)
        found = await kept(desk, opened["session_id"])
        assert (ended["outcome"]["status"], ended["outcome"]["reason"]) == ("failed", "it hung")
        assert [turn.state for turn in found.turns] == ["partial"]
        assert found.trainable_tokens > 0


async def test_unknown_turn_rewards_leave_capture_open(desk: Desk) -> None:
    """Rewards of turns that the capture does not have leave it open."""
    opened = await desk.open()
    await in_thread(Told(opened["env"]).chat)
    for field, number in (("turn_rewards", "1"), ("lineage_rewards", "9")):
        refused = await desk.caller.call(
            "DELETE", f"/v1/capture/{opened['session_id']}", json_body={"reward": 1, field: {number: 0.5}}
        )
        assert (refused.status, refused.json()["error"]["path"]) == (400, f"$.{field}")
    assert (await desk.end(opened["session_id"], reward=1, turn_rewards={"0": 0.5}))["reward"] == 1


@pytest.mark.parametrize("levels", [100, 252, 253, 254, 700])
async def test_unencodable_metrics_leave_capture_open(desk: Desk, levels: int) -> None:
    """At 252 levels they were taken once, and no reader of the stream came past them."""
    opened = await desk.open()
    deep: Any = 1
    for _ in range(levels):
        deep = [deep]
    refused = await desk.caller.call(
        "DELETE", f"/v1/capture/{opened['session_id']}", json_body={"reward": 1, "metrics": {"n": deep}}
    )
    assert refused.status == 400
    assert refused.json()["error"]["path"].startswith("$.metrics.n")
    assert (await desk.end(opened["session_id"], reward=1, metrics={"n": [1]}))["reward"] == 1


async def test_unknown_capture_cannot_be_ended(desk: Desk) -> None:
    for method in ("GET", "DELETE"):
        answer = await desk.caller.call(method, "/v1/capture/nobody")
        assert (answer.status, answer.json()["error"]["type"]) == (404, "not_found")


# ── budgets ───────────────────────────────────────────────────────────────────


async def test_abandoned_capture_ends_at_budget(desk: Desk) -> None:
    """A capture that nobody ends is over when its time or its turns are spent."""
    opened = await desk.open(budgets={"run_s": 600})
    assert 0 < opened["expires_s"] <= 600
    await in_thread(Told(opened["env"]).chat)
    capture = desk.captures.registry.get(Capture, opened["session_id"])
    assert capture is not None
    capture.clock.scope.deadline = trio.current_time()
    found = await desk.captures.trajectory(opened["session_id"])
    assert found is not None
    assert (found.outcome.status, found.outcome.clock, found.reward) == ("timeout", "run", None)
    assert found.trainable_tokens > 0
    late = await desk.end(opened["session_id"], reward=1)
    assert (late["reward"], late["outcome"]["clock"]) == (None, "run")


async def test_capture_clock_starts_when_opened(desk: Desk) -> None:
    opened = await desk.open(budgets={"run_s": 0.2})
    found = await desk.captures.trajectory(opened["session_id"])
    assert found is not None
    assert (found.outcome.clock, found.turns) == ("run", ())
    assert found.timing.run_s >= 0.2


async def test_calls_held_cost_no_time(tmp_path: Path) -> None:
    """A capture does not wait before it begins: without a place in the cache its first call is held, and what
    it was held is added to its time.
    """
    settings = simulated_tiny(tmp_path / "state")
    assert settings.simulated is not None
    small = evolve(settings.simulated.simulation, kv_tokens=2_000)
    settings = evolve(settings, simulated=evolve(settings.simulated, simulation=small))
    async with open_engines(settings) as engines, open_capture_node(tmp_path, engines) as desk:
        desk.captures.places = desk.captures.registry.places = engines
        filling = 0
        while engines.begin_session(f"other{filling}", "pi", "g", [].append) is None:
            filling += 1
        async with engines.generate(long_order(1_900, "other0")) as chunks:
            assert [chunk async for chunk in chunks]
        machine = engines._hosts[0].residents.machine
        assert machine is not None
        assert machine._allowance.spend(int(machine._allowance.tokens)), "else so small a prompt goes at once"
        opened = await desk.open(budgets={"run_s": 600}, sampling={"max_tokens": 4})
        (host,) = engines.statistics().hosts
        assert host.residency is not None
        assert host.residency.displaced == 1, "it has begun without a place"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, Told(opened["env"]).chat)
            await until(lambda: held(engines) == 1)
            capture = desk.captures.registry.get(Capture, opened["session_id"])
            assert capture is not None
            assert capture.clock.held_s == HOLD_S
            assert capture.expires_s > 600
            await trio.sleep(0.3)
            for number in range(filling):
                engines.end_session(f"other{number}")
        assert 0.3 <= capture.clock.held_s < HOLD_S
        await desk.end(opened["session_id"], reward=1)
        found = await kept(desk, opened["session_id"])
        assert found.timing.held_s == capture.clock.held_s
        assert len(found.turns) == 1


def held(engines: Engines) -> int:
    residency = engines.statistics().hosts[0].residency
    assert residency is not None
    return residency.held


def long_order(tokens: int, session: str) -> GenerateOrder:
    prompt = array("i", [5 + number % 900 for number in range(tokens)])
    return evolve(order(max_tokens=4), prompt=prompt, affinity=session)


@pytest.mark.parametrize(("budget", "clock"), [({"max_turns": 1}, "turns"), ({"max_tokens": 1}, "tokens")])
async def test_spent_budget_overrides_reported_status(
    desk: Desk, budget: "dict[str, int]", clock: str
) -> None:
    """The outcome names the budget that was spent, whatever the caller reports."""
    opened = await desk.open(budgets=budget)
    codes = [
        (await in_thread(asked, opened["base_urls"]["openai"], opened["key"])).status_code for _ in range(2)
    ]
    ended = await desk.end(opened["session_id"], reward=1)
    assert codes[0] == 200
    assert codes[1] >= 400
    assert (ended["outcome"]["status"], ended["outcome"]["clock"], ended["reward"], ended["turns"]) == (
        "timeout",
        clock,
        1,
        1,
    )


async def test_looping_agent_is_refused(desk: Desk) -> None:
    """A caller whose agent loops is refused, and its capture says so."""
    opened = await desk.open(budgets={"max_repeats": 2})
    history: list[Any] = [{"role": "user", "content": "hi"}]

    def ask(number: int) -> int:
        history.extend(
            [{"role": "assistant", "content": str(number)}, {"role": "user", "content": "Error: no call"}]
        )
        return httpx.post(
            f"{opened['base_urls']['openai']}/chat/completions",
            headers={"Authorization": f"Bearer {opened['key']}"},
            json={"model": "m", "messages": history},
            timeout=60,
        ).status_code

    assert [await in_thread(ask, number) for number in range(3)] == [200, 200, 400]
    ended = await desk.end(opened["session_id"], reward=1)
    assert (ended["outcome"]["status"], ended["outcome"]["clock"]) == ("timeout", "repeats")
    assert ended["outcome"]["reason"].startswith("it looped: 2 turns in a row")
    assert (ended["reward"], ended["turns"]) == (1, 2)


# ── beginning ─────────────────────────────────────────────────────────────────


async def test_same_place_returns_same_capture(desk: Desk) -> None:
    first = await desk.open(task_id="t")
    again = await desk.caller.post("/v1/capture", {"task_id": "t"})
    assert (again.status, again.json()["created"]) == (200, False)
    assert (again.json()["key"], again.json()["session_id"]) == (first["key"], first["session_id"])
    other = await desk.caller.post("/v1/capture", {"task_id": "t", "metadata": {"other": 1}})
    assert (other.status, other.json()["error"]["type"]) == (409, "conflict")
    await desk.end(first["session_id"])
    over = await desk.caller.post("/v1/capture", {"task_id": "t"})
    assert (over.status, "is over" in over.json()["error"]["message"]) == (409, True)


async def test_full_node_says_when_to_retry(tmp_path: Path) -> None:
    async with open_capture_node(tmp_path, engine(), limit=1) as desk:
        opened = await desk.open()
        busy = await desk.caller.post("/v1/capture", {})
        assert (busy.status, busy.json()["error"]["type"], busy.headers["retry-after"]) == (429, "busy", "5")
        with pytest.raises(Busy):
            await desk.captures.begin(CaptureSpec())
        await desk.end(opened["session_id"])
        await desk.open()


BROKEN: "list[tuple[dict[str, Any], str]]" = [
    ({"task_id": "no space"}, "$.task_id"),
    ({"sample_index": 1}, "$.sample_index"),
    ({"num_samples": 0}, "$.num_samples"),
    ({"budgets": {"run_s": 0}}, "$.budgets.run_s"),
    ({"sampling": {"top_p": 2}}, "$.sampling.top_p"),
    ({"carry": {"top_logprobs": 21}}, "$.carry.top_logprobs"),
    ({"builder": {"import_path": "nothing"}}, "$.builder.import_path"),
    ({"harness": {"name": "pi"}}, "$.harness"),
]


@pytest.mark.parametrize(("body", "path"), BROKEN, ids=[path for _, path in BROKEN])
def test_invalid_capture_is_refused_with_path(body: "dict[str, Any]", path: str) -> None:
    with pytest.raises(Refused) as refused:
        read_capture(body)
    assert refused.value.path == path


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"status": "timeout"}, "$.status"),
        ({"turn_rewards": {"0": 1.0}}, "$.reward"),
        ({"reward": 1.0, "turn_rewards": {"first": 1.0}}, "$.turn_rewards.first"),
        ({"reward": 1.0, "lineage_rewards": {"01": 1.0}}, "$.lineage_rewards['01']"),
        ({"rewards": 1.0}, "$.rewards"),
    ],
)
def test_invalid_end_is_refused_with_path(body: "dict[str, Any]", path: str) -> None:
    with pytest.raises(Refused) as refused:
        read_capture_end(body)
    assert refused.value.path == path


async def test_unknown_builder_is_refused_early(desk: Desk) -> None:
    """A builder that does not exist is refused before anything runs."""
    answer = await desk.caller.post("/v1/capture", {"builder": {"name": "no_such"}})
    assert answer.status == 400
    assert (await desk.captures.journal.writer.flush(), desk.captures.list()) == (None, ())


async def test_zero_capture_limit_refuses_captures(tmp_path: Path) -> None:
    async with open_capture_node(tmp_path, engine(), limit=0) as desk:
        answer = await desk.caller.post("/v1/capture", {})
    assert (answer.status, "capture_limit is 0" in answer.text) == (400, True)


async def test_full_disk_delays_capture_end(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that finds a full disk says so, and succeeds when there is room."""
    opened = await desk.open()
    monkeypatch.setattr(captures, "WRITTEN_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(type(desk.journal.writer), "flush", _never)
        full = await desk.caller.call(
            "DELETE", f"/v1/capture/{opened['session_id']}", json_body={"reward": 1}
        )
        assert (full.status, full.json()["error"]["type"]) == (507, "disk_full")
    monkeypatch.setattr(captures, "WRITTEN_S", 30.0)
    assert (await desk.end(opened["session_id"], reward=0))["reward"] == 1


async def _never(writer: Any) -> None:
    await trio.sleep_forever()


async def test_full_disk_refuses_new_captures(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = await desk.captures.begin(CaptureSpec(task_id="t"))
    monkeypatch.setattr(type(desk.journal.health), "_warning", lambda health: "the disk is full")
    with pytest.raises(DiskFull):
        await desk.captures.begin(CaptureSpec())
    assert (await desk.end(opened.session_id))["outcome"]["status"] == "completed"


# ── tasks, stopping, deaths ───────────────────────────────────────────────────


async def test_cancelling_task_ends_its_captures(desk: Desk) -> None:
    """Cancelling the task ends open places and those that never began."""
    opened = await desk.open(task_id="t", num_samples=3)
    await in_thread(Told(opened["env"]).chat)
    assert await desk.scheduler.cancel("t")
    with trio.fail_after(30):  # the places that never began are ended by the scheduler's next look
        while desk.tally.sessions["cancelled"] < 2:  # noqa: ASYNC110
            await trio.sleep(0.01)
    found = await desk.captures.trajectory(opened["session_id"])
    assert found is not None
    assert (found.outcome.status, len(found.turns)) == ("cancelled", 1)
    record = await desk.journal.reader.query(queries.task, "t")
    assert record is not None
    assert [place.outcome and place.outcome.status for place in record.sessions] == ["cancelled"] * 3
    assert (await desk.events())[-2:] == ["group:t", "task:t"]
    assert not await desk.scheduler.cancel("t")
    assert not await desk.scheduler.cancel("another")


async def test_stopping_node_ends_open_captures(desk: Desk) -> None:
    """A stopping node ends captures with what they have, and opens no more."""
    opened = await desk.open()
    await in_thread(Told(opened["env"]).chat)
    await desk.captures.registry.stop(cancel=True)
    found = await desk.captures.trajectory(opened["session_id"])
    assert found is not None
    assert (found.outcome.status, found.outcome.reason, len(found.turns)) == (
        "cancelled",
        "its node was stopped",
        1,
    )
    refused = await desk.caller.post("/v1/capture", {})
    assert (refused.status, "stopping" in refused.text) == (400, True)


async def test_capture_requested_during_stop_is_closed(desk: Desk) -> None:
    """Its place is looked up first, which takes a moment: it must not open behind the back of who waits for
    all of them.
    """
    errors: list[Exception] = []

    async def begin() -> None:
        try:
            await desk.captures.begin(CaptureSpec(task_id="t"))
        except Refused as refused:
            errors.append(refused)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(begin)
        await trio.lowlevel.checkpoint()
        await desk.captures.registry.stop(cancel=True)
    assert [str(error).partition(" and")[0] for error in errors] == ["this node is stopping"]
    assert desk.captures.list() == ()


async def test_node_death_interrupts_open_capture(tmp_path: Path) -> None:
    """After a node's death an open capture is an interrupted trajectory."""
    spec = {"task_id": "t", "num_samples": 2, "metadata": {"row": 7}, "builder": {"name": "per_request"}}
    async with open_capture_node(tmp_path, engine()) as desk:
        opened = await desk.open(**spec)
        await in_thread(Told(opened["env"]).chat)
        await desk.journal.writer.flush()
    async with open_journal(tmp_path / "journal.sqlite", now=lambda: 2.0) as journal, town(tmp_path) as here:
        async with scheduling(SqliteLog(journal), here, journal.writer) as scheduler:
            await recover(journal, scheduler, NodeFacts(name="n1"), lambda text: None)
            assert scheduler.statistics().live == 0, "the node can not run its harness again"
        found, record = (
            await journal.reader.query(queries.trajectory, opened["session_id"]),
            await journal.reader.query(queries.task, "t"),
        )
    assert found is not None
    assert record is not None
    assert (found.outcome.status, found.outcome.boundary, found.metadata, len(found.turns)) == (
        "interrupted",
        "node",
        {"row": 7},
        1,
    )
    assert len(found.traces) == 1
    assert record.finished
    async with open_capture_node(tmp_path, engine()) as desk:
        assert (await desk.end(opened["session_id"], reward=1))["outcome"]["status"] == "interrupted"
        late = await desk.caller.post("/v1/capture", spec | {"sample_index": 1})
        assert late.status == 409, json.dumps(late.json())


# ── adapters ──────────────────────────────────────────────────────────────────


async def test_session_needs_its_adapter_until_end(
    tmp_path: Path,
) -> None:
    """A session sampled by an adapter needs it to its end, and is as stale as that adapter."""
    async with (
        open_engines(simulated_tiny(tmp_path / "state", lora_rank=8)) as engines,
        open_capture_node(tmp_path, engines) as desk,
    ):
        registry, adapters = desk.captures.registry, engines.adapters
        served = {"": ("0", "1", "2"), "a": ("a-1", "a-2")}
        desk.captures.admission = evolve(desk.captures.admission, adapters=adapters)
        registry.adapters, registry.served_versions = adapters, lambda name: served[name]
        await adapters.put("a", "a-1", write_adapter(tmp_path / "1"))
        refused = await desk.caller.post("/v1/capture", {"adapter": "b"})
        assert (refused.status, refused.json()["error"]["path"]) == (400, "$.adapter")
        assert "name one of a" in refused.text
        opened = await desk.open(adapter="a", sampling={"max_tokens": 4})
        await in_thread(Told(opened["env"]).chat)
        with pytest.raises(Conflict, match="1 sessions sample by adapter 'a'"):
            adapters.drop("a")
        await adapters.put("a", "a-2", write_adapter(tmp_path / "2", seed=2))
        await in_thread(Told(opened["env"]).chat, "go on")
        await desk.end(opened["session_id"], reward=1)
        found = await kept(desk, opened["session_id"])
        versions = [span.version for turn in found.turns for span in turn.version_spans]
        assert (versions, found.staleness) == (["a-1", "a-2"], 1)
        assert adapters.status()[0].sessions == 0
        adapters.drop("a")


async def test_place_taken_after_lost_answer(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again after the log took the place, and its answer was lost, has the capture."""
    usual, lost = SqliteLog.take_place, [LogUnavailable("the connection was lost")]

    async def take_place(*given: Any) -> Any:
        found = await usual(*given)
        if lost:
            raise lost.pop()
        return found

    monkeypatch.setattr(SqliteLog, "take_place", take_place)
    with pytest.raises(LogUnavailable):
        await desk.captures.begin(CaptureSpec(task_id="t"))
    opened = await desk.captures.begin(CaptureSpec(task_id="t"))
    assert opened.created
    assert not (await desk.captures.begin(CaptureSpec(task_id="t"))).created
