"""The lives and deaths of engine hosts, with a program in their place that speaks their protocol: what the
node does, without SGLang's start-up.
"""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from fakes_engine import joined, order, sample

from polarnode.core.backoff import Backoff
from polarnode.core.errors import EngineError, Refused
from polarnode.engine import host_process, routing
from polarnode.engine import update as update_module
from polarnode.engine.checkpoints import fingerprint
from polarnode.engine.engines import Engines, open_hosts
from polarnode.engine.host import Loaded
from polarnode.engine.host_process import HostProcess
from polarnode.engine.protocol import CommitUpdate, Done, LoadTensors, ToHost
from polarnode.engine.routing import MAX_DEATHS
from polarnode.engine.settings import EngineSettings
from polarnode.engine.update import MessageMaker
from polarnode.support.concurrency import group_members

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "kits" / "engine_program.py"))


@asynccontextmanager
async def opened(tmp_path: Path, script: str = "serve", *, hosts: int = 1) -> AsyncIterator[Engines]:
    (tmp_path / "config.json").write_text("{}")
    gpus = tuple(range(hosts))
    extra = {"script": script, "counter": str(tmp_path / "counter")}
    settings = EngineSettings(
        model_path=tmp_path, device="cuda", gpus=gpus, state_dir=tmp_path / "state", extra=dict(extra)
    )
    with trio.fail_after(120):
        async with open_hosts(settings, program=PROGRAM) as engines:
            yield engines


def pid_of(engines: Engines, index: int = 0) -> int:
    pid = engines.statistics().hosts[index].pid
    assert pid is not None
    return pid


async def until_state(engines: Engines, state: str, *, restarts: int = 0, index: int = 0) -> None:
    def arrived() -> bool:
        host = engines.statistics().hosts[index]
        return host.state == state and host.restarts >= restarts

    while not arrived():  # noqa: ASYNC110 - a test looks from outside
        await trio.sleep(0.02)


async def test_host_serves_until_stopped(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        assert joined(await sample(engines, order([1]))) == [7, 7]
        statistics = engines.statistics()
        pid = pid_of(engines)
    assert (statistics.vocab_size, statistics.context_length, statistics.weight_version) == (100, 60, "0")
    assert statistics.hosts[0].state == "ready"
    residency = statistics.hosts[0].residency
    assert residency is not None
    assert residency.capacity == 64 + 100, "sessions are counted against the cache in main memory too"
    assert "asked to end" in (tmp_path / "state/engine-0.log").read_text()
    assert group_members(pid) == []


async def test_failed_first_start_names_setting(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        async with opened(tmp_path, "always_fail"):
            pytest.fail("it does not serve")
    assert "--cpu" in str(caught.value)
    assert "RuntimeError: No CUDA GPUs are available" in str(caught.value)
    assert "engine-0.log" in str(caught.value)
    assert (tmp_path / "counter").read_text() == "1"  # no setting was changed, so it was not tried again


async def test_taken_port_is_retried(tmp_path: Path) -> None:
    async with opened(tmp_path, "port_once") as engines:
        assert joined(await sample(engines, order([1]))) == [7, 7]
    assert (tmp_path / "counter").read_text() == "2"


async def test_start_can_be_cancelled(tmp_path: Path) -> None:
    with trio.move_on_after(2) as scope:
        async with opened(tmp_path, "deaf"):
            pytest.fail("it never serves")
    assert scope.cancelled_caught


async def test_body_error_is_raised_unwrapped(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(tmp_path):
            raise ZeroDivisionError


async def test_dead_host_fails_calls_and_restarts(tmp_path: Path) -> None:
    async with opened(tmp_path, hosts=2) as engines:
        other = pid_of(engines, 1)
        async with engines.generate(order([2])) as stream:
            await stream.__anext__()
            os.kill(pid_of(engines, 0), 9)
            with pytest.raises(EngineError, match="engine host 0 died") as caught:
                await stream.__anext__()
            assert caught.value.retryable
        assert joined(await sample(engines, order([1]))) == [7, 7]  # the other host has it
        await until_state(engines, "ready", restarts=1)
        assert pid_of(engines, 1) == other
        assert [host.restarts for host in engines.statistics().hosts] == [1, 0]


async def test_new_calls_wait_for_restarting_host(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        with pytest.raises(EngineError):
            await sample(engines, order([3]))
        assert engines.statistics().hosts[0].state != "ready"
        assert joined(await sample(engines, order([1]))) == [7, 7]


async def test_repeatedly_dying_host_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "RESTART_PAUSES", Backoff(first_s=0.01, longest_s=1.0))
    async with opened(tmp_path) as engines:
        for _ in range(MAX_DEATHS):
            with pytest.raises(EngineError, match="died"):
                await sample(engines, order([3]))
        await until_state(engines, "failed")
        with pytest.raises(EngineError, match="given up") as caught:
            await sample(engines, order([1]))
        assert not caught.value.retryable


async def test_host_sending_garbage_is_replaced(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        with pytest.raises(EngineError, match="FrameError"):
            await sample(engines, order([4]))
        assert joined(await sample(engines, order([1]))) == [7, 7]


async def test_host_sending_node_message_is_replaced(tmp_path: Path) -> None:
    """It once ended the node: the message was refused outside of what ends one host."""
    async with opened(tmp_path) as engines:
        with pytest.raises(EngineError, match="the host may not send Abort"):
            await sample(engines, order([5]))
        assert joined(await sample(engines, order([1]))) == [7, 7]


async def test_invalid_token_fails_only_its_call(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        pid = pid_of(engines)
        async with engines.generate(order([6])) as stream:
            assert list((await stream.__anext__()).ids) == [7]
            with pytest.raises(EngineError, match="outside the vocabulary of 100 tokens"):
                await stream.__anext__()
        assert joined(await sample(engines, order([1]))) == [7, 7]
        assert pid_of(engines) == pid


async def test_leaving_stream_ends_host_request(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        async with engines.generate(order([2])) as stream:
            await stream.__anext__()
            assert engines.statistics().hosts[0].in_flight == 1
        while engines.statistics().hosts[0].in_flight:  # noqa: ASYNC110 - until the host's last word of it
            await trio.sleep(0.02)


async def test_restarted_host_restores_weights_and_pause(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        await engines.update_weights_from_disk(Path("/weights/new"), "9", "retract")
        await engines.pause("in_place")
        os.kill(pid_of(engines), 9)
        await until_state(engines, "ready", restarts=1)
        assert engines.statistics().weight_version == engines.statistics().hosts[0].weight_version == "9"
        assert engines.statistics().paused == "in_place"
        assert (tmp_path / "state/engine-0.log").read_text().split("\n")[:2] == [
            "update /weights/new",
            "Pause",
        ]
        await engines.resume()
        chunks = await sample(engines, order([1]))
        assert chunks[-1].version_spans[0].version == "9"


async def test_refused_weights_are_not_remembered(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        with pytest.raises(Refused, match="the previous ones are served: engine host 0: /weights/bad"):
            await engines.update_weights_from_disk(Path("/weights/bad"), "9")
        assert (tmp_path / "state/engine-0.log").read_text().split() == [
            "Pause",
            "BeginUpdate",
            "update",
            "/weights/bad",
            "RollBack",
            "Continue",
        ]
        os.kill(pid_of(engines), 9)
        await until_state(engines, "ready", restarts=1)
        assert engines.statistics().weight_version == "0"
        with pytest.raises(Refused, match="absolute"):
            await engines.update_weights_from_disk(Path("here"), "9")
        assert engines.versions == ("0",)


def sent(*words: str) -> MessageMaker:
    """A payload for each host, which the program reads."""
    return lambda call, host: LoadTensors(call=call, payloads=[words[host].encode()])


async def test_one_host_refusal_keeps_old_weights(tmp_path: Path) -> None:
    async with opened(tmp_path, hosts=2) as engines:
        with pytest.raises(Refused, match="engine host 1: bad"):
            async with engines.updating("retract") as update:
                await update.load(sent("good", "bad"))
        for index in range(2):
            assert "RollBack\nContinue" in (tmp_path / f"state/engine-{index}.log").read_text()
            assert engines.statistics().hosts[index].weight_version == "0"
        assert joined(await sample(engines, order([1]))) == [7, 7]


async def test_host_death_keeps_old_weights(tmp_path: Path) -> None:
    async with opened(tmp_path, hosts=2) as engines:
        await engines.update_weights_from_disk(Path("/weights/old"), "1")
        with pytest.raises(EngineError, match="the previous ones are served: engine host 1"):
            async with engines.updating("retract") as update:
                await update.load(sent("good", "deadly"))
        await until_state(engines, "ready", restarts=1, index=1)
        assert [host.weight_version for host in engines.statistics().hosts] == ["1", "1"]
        assert "update /weights/old" in (tmp_path / "state/engine-1.log").read_text()
        assert "RollBack" in (tmp_path / "state/engine-0.log").read_text()


async def test_host_death_before_serving_keeps_new(
    tmp_path: Path,
) -> None:
    """Past `check` the version is the node's."""
    async with opened(tmp_path, hosts=2) as engines:
        async with engines.updating("in_place") as update:
            await update.load(sent("good", "good"))
            await update.check()
            os.kill(pid_of(engines, 1), 9)
            await engines.commit(update, Loaded(version="2", path="/weights/two"))
        await until_state(engines, "ready", restarts=1, index=1)
        assert [host.weight_version for host in engines.statistics().hosts] == ["2", "2"]
        assert engines.versions == ("0", "2")


async def test_silent_host_in_update_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path, hosts=2) as engines:
        monkeypatch.setattr(update_module, "STEP_S", 0.5)
        with pytest.raises(Refused, match="engine host 1: no answer"):
            async with engines.updating("in_place") as update:
                await update.load(sent("good", "endless"))
        await until_state(engines, "ready", restarts=1, index=1)
        assert [host.weight_version for host in engines.statistics().hosts] == ["0", "0"]


async def test_missing_disk_weights_are_awaited(tmp_path: Path) -> None:
    """A host that lost a trainer's tensors must not serve other weights under their name; the next update
    brings it back.
    """
    async with opened(tmp_path, hosts=2) as engines:
        async with engines.updating("in_place") as update:
            await update.load(sent("good", "good"))
            await update.check()
            await engines.commit(update, Loaded(version="1"))
        os.kill(pid_of(engines, 1), 9)
        await until_state(engines, "stale", restarts=1, index=1)
        assert "serves again with the next update" in str(engines.statistics().hosts[1].last_error)
        for _ in range(4):
            assert (await sample(engines, order([1])))[-1].version_spans[0].version == "1"
        await engines.update_weights_from_disk(Path("/weights/two"), "2")
        assert [(host.state, host.weight_version) for host in engines.statistics().hosts] == [
            ("ready", "2")
        ] * 2


async def test_dead_host_is_not_made_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that answers an update, and dies before the others have answered, serves after its restart only."""
    ask = HostProcess.ask

    async def dies_after_answering(process: HostProcess, make: Callable[[int], ToHost]) -> Done:
        done = await ask(process, make)
        if isinstance(make(0), CommitUpdate) and process.pid is not None:
            os.kill(process.pid, 9)
            await until_state(engines, "dead")
        return done

    async with opened(tmp_path) as engines:
        monkeypatch.setattr(HostProcess, "ask", dies_after_answering)
        async with engines.updating("in_place") as update:
            await update.load(sent("good"))
            await update.check()
            await engines.commit(update, Loaded(version="1"))
            assert engines.statistics().hosts[0].state == "dead"


async def test_overwritten_folder_is_not_reloaded(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    async with opened(tmp_path) as engines:
        await engines.update_weights_from_disk(folder, "1", files=fingerprint(folder))
        (folder / "config.json").write_text("{ }")
        os.kill(pid_of(engines), 9)
        await until_state(engines, "stale", restarts=1)
        assert "whose files have changed" in str(engines.statistics().hosts[0].last_error)


async def test_new_calls_wait_for_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New calls wait for an update, and the others are drained."""
    async with opened(tmp_path) as engines:
        monkeypatch.setattr(update_module, "DRAIN_S", 0.3)
        async with engines.generate(order([2])) as stream:  # it never ends, so it is retracted in the end
            await stream.__anext__()
            async with trio.open_nursery() as nursery:

                async def late() -> None:
                    assert (await sample(engines, order([1])))[-1].version_spans[-1].version == "1"

                async with engines.updating("drain") as update:
                    nursery.start_soon(late)
                    await trio.testing.wait_all_tasks_blocked()
                    assert engines.statistics().hosts[0].in_flight == 1
                    await update.load(sent("good"))
                    await update.check()
                    await engines.commit(update, Loaded(version="1"))


async def test_earlier_pause_outlasts_update(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        await engines.pause("retract")
        await engines.update_weights_from_disk(Path("/weights/new"), "1", "drain")
        assert engines.statistics().paused == "retract"
        assert "Continue" not in (tmp_path / "state/engine-0.log").read_text()


async def test_second_concurrent_update_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines, engines.updating("in_place"):
        with pytest.raises(EngineError, match="one update at a time"):
            await engines.update_weights_from_disk(Path("/weights/new"), "1")


async def test_question_to_dying_host_fails(tmp_path: Path) -> None:
    """A question to a host that dies gets an answer: the error."""
    async with opened(tmp_path) as engines:
        os.kill(pid_of(engines), 19)  # SIGSTOP: it does not answer
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(EngineError, match="could not pause"):
                    await engines.pause("abort")

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(pid_of(engines), 9)


async def test_unresponsive_host_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_process, "SHUTDOWN_GRACE", 0.5)
    async with opened(tmp_path) as engines:
        pid = pid_of(engines)
        os.kill(pid, 19)
    assert group_members(pid) == []


async def test_request_id_in_use_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        twice = order([2])
        async with engines.generate(twice):
            with pytest.raises(EngineError, match="in use"):
                async with engines.generate(twice):
                    pytest.fail("refused")


async def test_sessions_stay_with_their_host(tmp_path: Path) -> None:
    async with opened(tmp_path, hosts=2) as engines, AsyncExitStack() as calls:
        for session in ("a", "b", "a", "a"):
            await calls.enter_async_context(engines.generate(order([2], affinity=session)))
        assert [host.in_flight for host in engines.statistics().hosts] == [3, 1]


# ── calls that wait for their turn ────────────────────────────────────────────


async def fill(engines: Engines, calls: AsyncExitStack) -> None:
    """Calls that never end, as many as the host takes: its cache of 64 tokens is full, and it reports
    nothing.
    """
    for _ in range(routing.MIN_ENGINE_QUEUE):
        await calls.enter_async_context(engines.generate(order([2], affinity="flood")))


async def test_waiting_call_moves_from_dead_host(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines, trio.open_nursery() as nursery, AsyncExitStack() as calls:
        await fill(engines, calls)
        done = trio.Event()

        async def late() -> None:
            assert joined(await sample(engines, order([1], affinity="late"))) == [7, 7]
            done.set()

        nursery.start_soon(late)
        await trio.testing.wait_all_tasks_blocked()
        host = engines.statistics().hosts[0]
        assert (host.in_flight, host.queued, host.queued_sessions) == (routing.MIN_ENGINE_QUEUE, 1, 1)
        os.kill(pid_of(engines), 9)
        await done.wait()
        assert engines.statistics().hosts[0].restarts == 1
        assert engines.statistics().hosts[0].in_flight == 0, "the others failed with their host"


async def test_call_left_waiting_is_never_sent(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines, AsyncExitStack() as calls:
        await fill(engines, calls)
        with trio.move_on_after(0.05) as patience:
            async with engines.generate(order([1], affinity="late")):
                pytest.fail("it has no turn")
        assert patience.cancelled_caught
        host = engines.statistics().hosts[0]
        assert (host.in_flight, host.queued) == (routing.MIN_ENGINE_QUEUE, 0)


async def test_call_left_when_due_frees_place(tmp_path: Path) -> None:
    """A call that leaves in the tick of its turn gives its place back."""
    async with opened(tmp_path) as engines, AsyncExitStack() as calls:
        await fill(engines, calls)
        scope = trio.CancelScope()

        async def late() -> None:
            with scope:
                await sample(engines, order([2], affinity="late"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(late)
            await trio.testing.wait_all_tasks_blocked()
            engines._hosts[0].calls.queue.report(running=40, waiting=0, most=100)
            engines._hosts[0].calls.admit()
            assert engines.statistics().hosts[0].in_flight == routing.MIN_ENGINE_QUEUE + 1
            scope.cancel()  # its task has not run since
        while engines.statistics().hosts[0].in_flight > routing.MIN_ENGINE_QUEUE:  # noqa: ASYNC110 - a test looks from outside
            await trio.sleep(0.01)


async def test_waiting_calls_use_updated_weights(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines, trio.open_nursery() as nursery, AsyncExitStack() as calls:
        await fill(engines, calls)

        async def late() -> None:
            assert (await sample(engines, order([1], affinity="late")))[-1].version_spans[-1].version == "1"

        nursery.start_soon(late)
        await trio.testing.wait_all_tasks_blocked()
        async with engines.updating("retract") as update:
            await calls.aclose()  # there is room now, and nothing is sent
            while engines.statistics().hosts[0].in_flight:  # noqa: ASYNC110 - a test looks from outside
                await trio.sleep(0.01)
            assert engines.statistics().hosts[0].queued == 1
            await update.load(sent("good"))
            await update.check()
            await engines.commit(update, Loaded(version="1"))
