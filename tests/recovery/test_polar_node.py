"""A bridge of Polar's before a real node: it submits, listens, polls and trains on what it gets, over the
node's death too.

The bridge is written as slime_bridge is: a callback listener of its own, a poll as a backstop, samples made
of each trace. It knows the node's URL and Polar's models, and nothing else.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from recovery_kit import TOKEN, Place, ServingNode, place_at, short_temporary

sys.path.append(str(Path(__file__).parents[1] / "kits"))  # the bridge's side of Polar stands there

import polar_client as polar
from callback_kit import CallbackReceiver, open_receiver
from polar_client import PolarClient

pytestmark = pytest.mark.podman

SETTINGS = """
engine = "simulated"
warm = 0
init_limit = 2
run_limit = 6
[simulated]
tokens_per_s = 400.0
first_token_s = 0.01
answer_tokens = 16
"""
# An agent as a one-file program, in a request as Polar takes it: its key and its endpoint are in its
# environment, as there.
AGENT = """
import json, os, sys, time, urllib.request
messages = [{"role": "user", "content": os.environ["TASK"]}]
for turn in range(int(os.environ["TURNS"])):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    head = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on, step %d." % turn}]
time.sleep(float(os.environ["REST"]))
"""


def request(
    task_id: str, *, samples: int = 2, turns: int = 2, rest: float = 0.0, **more: Any
) -> dict[str, Any]:
    shell = {
        "command": f"exec python3 -c '{AGENT}'",
        "env": {"TASK": "Count.", "TURNS": str(turns), "REST": str(rest)},
    }
    return {
        "task_id": task_id,
        "instruction": "Count.",
        "num_samples": samples,
        "timeout_seconds": 300.0,
        "agent": {"harness": "shell", "custom_shell": shell},
        "builder": {"strategy": "prefix_merging", "config": {}},
        "evaluator": {"strategy": "session_completed"},
        "metadata": {"group_id": 7, "policy_version": 3, "rollout_step": 3},
    } | more


@pytest.fixture
def place(podman_works: None, tmp_path: Path) -> Iterator[Place]:
    with short_temporary() as temporary:
        yield place_at(tmp_path, temporary, settings=SETTINGS)


@asynccontextmanager
async def life(place: Place) -> AsyncIterator[ServingNode]:
    """A life of the node, which is another process: waiting for it is done in threads."""
    serving = place.serving()
    node = await trio.to_thread.run_sync(serving.__enter__)
    try:
        yield node
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(serving.__exit__, None, None, None)


def killed(node: ServingNode) -> None:
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.wait()


def client_of(node: ServingNode) -> PolarClient:
    return PolarClient(url=f"http://127.0.0.1:{node.port}", headers={"X-Polar-Control-Token": TOKEN})


# ── the bridge ────────────────────────────────────────────────────────────────


async def trained(client: PolarClient, receiver: CallbackReceiver, said: dict[str, Any]) -> polar.TaskResult:
    """Submit, and wait for the callback; a poll is the backstop."""
    task_id = await client.submit(said | {"callback_url": receiver.url})
    with trio.fail_after(300):
        while not (found := [body for _, body in receiver.got if body["task_id"] == task_id]):
            await receiver.came.wait()
    result: polar.TaskResult = polar.read(found[0], polar.TaskResult)
    return result


def samples_of(result: polar.SessionResult) -> list[tuple[list[int], list[int], list[float]]]:
    """Each trace as slime's Sample has it: tokens, mask of the response, logprobs."""
    samples = []
    for trace in result.trajectory.traces:
        logprobs = trace.response_logprobs or ()
        assert len(logprobs) == len(trace.response_ids) == len(trace.loss_mask)
        assert all(value <= 0.0 for value in logprobs)
        assert trace.prompt_ids
        assert trace.response_ids
        samples.append(
            (
                [*trace.prompt_ids, *trace.response_ids],
                list(trace.loss_mask),
                list(logprobs),
            )
        )
    return samples


async def test_bridge_trains_on_exact_node_tokens(place: Place) -> None:
    async with life(place) as node, open_receiver() as receiver:
        client = client_of(node)
        result = await trained(client, receiver, request("step-1"))
        assert (result.task_id, result.status, len(result.results)) == ("step-1", "completed", 2)
        for session in result.results:
            assert (session.status, session.error, session.trajectory.metadata.policy_version) == (
                "COMPLETED",
                None,
                3,
            )
            (sample,) = samples_of(session)
            trajectory = await trio.to_thread.run_sync(node.client.trajectory, session.session_id)
            (trace,) = trajectory.traces
            assert sample[0] == list(trace.token_ids)
            assert sample[1] == list(trace.loss_mask[trace.prompt_length :])
            assert sample[2] == pytest.approx(list(trace.logprobs[trace.prompt_length :]))
            assert session.trajectory.traces[0].reward == 1.0
            said = [message["role"] for message in session.trajectory.traces[0].response_messages]
            assert said == ["assistant", "user", "assistant"]
        polled = await client.finished("step-1")
        assert polled.results == result.results
        rows = (await client.ask("GET", "/tasks/step-1/sessions"))["sessions"]
        assert {(row["status"], row["completion_count"]) for row in rows} == {("COMPLETED", 2)}
        calls = (await client.ask("GET", f"/sessions/{result.results[0].session_id}/completions"))[
            "completions"
        ]
        assert [len(call["request"]["messages"]) for call in calls] == [1, 3]
        assert calls[1]["response"]["choices"][0]["input_token_ids"][
            : len(calls[0]["response"]["choices"][0]["input_token_ids"])
        ]
        assert (await trained(client, receiver, request("step-2", samples=1))).status == "completed"


async def test_timed_out_and_cancelled_keep_rows(place: Place) -> None:
    """Where Polar has nothing: a session that was timed out, and one that was cancelled."""
    async with life(place) as node:
        client = client_of(node)
        await client.submit(request("late", samples=1, rest=600.0, timeout_seconds=8.0))
        await client.submit(request("off", samples=1, rest=600.0))
        late = (await client.finished("late")).results[0]
        assert (late.status, late.trajectory.status) == ("TIMEOUT", "TIMEOUT")
        assert all(polar.trainable_agent_timeout(late, trace) for trace in late.trajectory.traces)
        assert [sum(sample[1]) > 0 for sample in samples_of(late)] == [True]
        with trio.fail_after(120):
            while not any(  # noqa: ASYNC110
                row["completion_count"] == 2
                for row in (await client.ask("GET", "/tasks/off/sessions"))["sessions"]
            ):
                await trio.sleep(0.2)
        said = await client.ask("DELETE", "/rollout/task/off")
        assert said["cancelled"] is True
        off = await client.finished("off")
        assert (off.status, off.results[0].status) == ("failed", "ERROR")
        assert [sum(sample[1]) > 0 for sample in samples_of(off.results[0])] == [True]


async def test_each_result_survives_both_deaths(place: Place) -> None:
    """The trainer refuses, hangs and is gone, the node is killed between; at the end each result was taken,
    and none more often than it was tried.
    """
    tasks = [f"step-{index}" for index in range(4)]
    async with open_receiver() as receiver:
        port = int(receiver.url.split(":")[2].split("/")[0])
        receiver.manner = "refuse"
        async with life(place) as node:
            client = client_of(node)
            for task_id in tasks[:2]:
                await client.submit(request(task_id, samples=1, turns=1, callback_url=receiver.url))
            await receiver.wait_asked(2)
            for task_id in tasks[2:]:
                await client.submit(request(task_id, samples=1, turns=1, rest=3.0, callback_url=receiver.url))
            killed(node)
        assert receiver.got == []
    async with life(place) as node:  # the trainer is gone
        client = client_of(node)
        for task_id in tasks:
            assert (await client.finished(task_id)).status == "completed"
        assert (await trio.to_thread.run_sync(node.status))["callbacks"]["taken"] == 0
        killed(node)
    async with open_receiver(port=port) as receiver, life(place) as node:
        await receiver.until(4)
        assert sorted(body["task_id"] for _, body in receiver.got) == tasks
        assert set(receiver.counts.values()) == {1}
        for _, body in receiver.got:
            result = polar.read(body, polar.TaskResult)
            assert [sum(sample[1]) > 0 for session in result.results for sample in samples_of(session)] == [
                True
            ]
        with trio.fail_after(60):
            while (await trio.to_thread.run_sync(node.status))["callbacks"]["owed"]:  # noqa: ASYNC110 (over HTTP)
                await trio.sleep(0.2)
