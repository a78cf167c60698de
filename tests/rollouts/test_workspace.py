"""What lies in a runtime: files and steps before the harness, the workspace in a fresh runtime after it, and
verdicts that can be kept.
"""

from typing import Any, cast

import merge_toys as toys
import pytest
import trio
from fakes_runtime import MemoryRuntime

from polarnode.core.errors import EvaluatorError, Refused
from polarnode.core.ports import Judge
from polarnode.core.task import EvaluatorSpec, FileSpec, HarnessSpec, PrepareStep, RuntimeSpec, TaskSpec
from polarnode.core.trajectory import Outcome, Turn, Verdict
from polarnode.rollouts import session_containers
from polarnode.rollouts.evaluation import NodeClock

# ── a copy for a fresh judge ──────────────────────────────────────────────────


async def test_copy_contains_only_the_source() -> None:
    source, target = MemoryRuntime(workdir="/work"), MemoryRuntime(workdir="/testbed")
    source.files, target.files = (
        {"/work/a/b": b"new", "/etc/x": b"no"},
        {"/testbed/a/b": b"old", "/testbed/stale": b"", "/opt/y": b"stays"},
    )
    await source.copy_workdir(target)
    assert target.files == {"/testbed/a/b": b"new", "/opt/y": b"stays"}
    for runtime in (source, target):
        await runtime.close()


# ── files and steps ───────────────────────────────────────────────────────────


async def test_files_are_placed_with_modes() -> None:
    runtime = MemoryRuntime(workdir="/testbed/")
    files = (FileSpec(path="a/run.sh", text="é", mode=0o755), FileSpec(path="/opt/b", base64="AAEC"))
    await session_containers.prepare(runtime, RuntimeSpec(files=files))
    assert runtime.files == {"/testbed/a/run.sh": "é".encode(), "/opt/b": b"\0\1\2"}
    assert runtime.modes == {"/testbed/a/run.sh": 0o755, "/opt/b": 0o644}
    await runtime.close()


async def test_steps_run_in_order_as_user() -> None:
    """Steps run in order, as the user that they name, with the task's environment."""
    ran: list[tuple[str, str, str]] = []

    async def noting(call: object) -> int:
        await trio.lowlevel.checkpoint()
        ran.append((call.argv[1], call.user, call.env["A"]))  # type: ignore[attr-defined]
        return int(call.argv[1] == "fails")  # type: ignore[attr-defined]

    runtime = MemoryRuntime(programs={"step": noting})
    spec = RuntimeSpec(
        prepare=(PrepareStep(argv=("step", "one"), user="root"), PrepareStep(argv=("step", "two"))),
        eval_prepare=(PrepareStep(argv=("step", "fails")), PrepareStep(argv=("step", "never"))), env={"A": "1"},
    )  # fmt: skip
    await session_containers.prepare(runtime, spec)
    assert ran == [("one", "root", "1"), ("two", "agent", "1")]
    with pytest.raises(EvaluatorError, match="'step fails' ended with exit code 1"):
        await session_containers.prepare_evaluation(runtime, spec)
    assert ran[2:] == [("fails", "agent", "1")]
    await runtime.close()


async def test_failed_step_shows_name_and_output() -> None:
    async def talks(call: object) -> int:
        await trio.lowlevel.checkpoint()
        call.stdout += b"x" * 10_000 + b"the reason\n"  # type: ignore[attr-defined]
        return 2

    runtime = MemoryRuntime(programs={"talks": talks})
    with pytest.raises(Refused) as caught:
        await session_containers.prepare(
            runtime, RuntimeSpec(prepare=(PrepareStep(argv=("true",)), PrepareStep(argv=("talks",))))
        )
    assert caught.value.path == "$.runtime.prepare[1]"
    assert str(caught.value).endswith("the reason")
    assert len(str(caught.value)) < 700
    await runtime.close()


# ── verdicts ──────────────────────────────────────────────────────────────────


def _no_judge(name: str) -> Judge:
    raise EvaluatorError(f"no judge is called {name}")


def test_session_seen_by_evaluator() -> None:
    spec = TaskSpec(
        instruction="i", harness=HarnessSpec(), evaluator=EvaluatorSpec(config={"c": 1}), metadata={"m": 2}
    )
    clean, left = MemoryRuntime(workdir="/w"), MemoryRuntime()
    seen = session_containers.finished(
        clean, left, NodeClock(), _no_judge, Outcome(status="failed"), (), spec
    )
    assert (seen.instruction, seen.config, seen.metadata, seen.outcome.status) == (
        "i",
        {"c": 1},
        {"m": 2},
        "failed",
    )
    assert (seen.runtime.workdir, seen.left.workdir) == ("/w", "/work")
    for runtime in (clean, left):
        runtime.endpoint.close()


@pytest.mark.parametrize("reward", [0, 1.5, -3, 2**50, -1e18])
def test_finite_reward_becomes_float(reward: float) -> None:
    kept = session_containers.checked(Verdict(reward=reward, metrics={"a": [1, {"b": None}]}))
    assert (kept.reward, type(kept.reward), kept.metrics) == (float(reward), float, {"a": [1, {"b": None}]})


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), -float("inf"), 10**400, 1e19, True, None, "1", [1]]
)
def test_nonfinite_reward_is_refused(reward: object) -> None:
    with pytest.raises(EvaluatorError, match="return a finite number"):
        session_containers.checked(Verdict(reward=reward))  # type: ignore[arg-type]


def three_turns() -> tuple[Turn, ...]:
    made = toys.Session()
    _, message = made.say(toys.ask(toys.user()), "one")
    made.say(toys.ask(toys.user(), message, toys.user("go on")), "two")
    made.say(toys.ask(toys.system("another"), toys.user("look")), "three")
    return made.turns


def test_turn_and_lineage_rewards_become_floats() -> None:
    kept = session_containers.checked(
        Verdict(reward=1, lineage_rewards={1: 2}, turn_rewards={0: 0, 2: -1}), three_turns()
    )
    assert (kept.lineage_rewards, kept.turn_rewards) == ({1: 2.0}, {0: 0.0, 2: -1.0})
    assert {type(reward) for reward in kept.turn_rewards.values()} == {float}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"turn_rewards": {3: 1.0}}, "a reward to turn 3, which this session has not: it has 0 to 2"),
        ({"turn_rewards": {True: 1.0}}, "turn True"),
        ({"turn_rewards": {"0": 1.0}}, "turn '0'"),
        ({"turn_rewards": {0: float("nan")}}, "gave nan as the reward of turn 0: return a finite number"),
        ({"turn_rewards": [1.0]}, "list as its turn rewards"),
        ({"lineage_rewards": {2: 1.0}}, "lineage 2, which this session has not: it has 0 to 1"),
        ({"lineage_rewards": {0: None}}, "gave None as the reward of lineage 0"),
    ],
)
def test_rewards_of_unknown_turns_are_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(EvaluatorError) as raised:
        session_containers.checked(Verdict(reward=1.0, **said), three_turns())
    assert words in str(raised.value)


def test_session_without_turns_takes_no_rewards() -> None:
    """A session without turns has no turn to reward."""
    with pytest.raises(EvaluatorError, match="it has none"):
        session_containers.checked(Verdict(reward=1.0, turn_rewards={0: 1.0}))


@pytest.mark.parametrize("metrics", [{"a": object()}, 7, [1]])
def test_unencodable_metrics_are_refused(metrics: object) -> None:
    with pytest.raises(EvaluatorError, match="the evaluator's metrics are not JSON"):
        session_containers.checked(Verdict(reward=1.0, metrics=metrics))  # type: ignore[arg-type]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [100, 252, 300, 900])
def test_deep_metric_costs_no_reward(levels: int) -> None:
    kept = session_containers.checked(Verdict(reward=0.5, metrics={"x": nested(levels), "exit_code": 0}))
    assert (kept.reward, kept.metrics["exit_code"]) == (0.5, 0)
    refused = cast(dict[str, str], kept.metrics["x"])
    assert "metrics.x" in refused["refused"]
    assert "is nested more than 100 levels deep" in refused["refused"]
    assert refused["text"] == "[" * levels + "1" + "]" * levels
    deepest = session_containers.checked(Verdict(reward=0.5, metrics={"x": nested(99)}))
    assert deepest.metrics == {"x": nested(99)}


def test_oversized_metrics_cost_no_reward() -> None:
    one = session_containers.checked(Verdict(reward=1.0, metrics={"x": "y" * (2 << 20), "z": 1})).metrics
    assert one["z"] == 1
    assert "larger than 1 MiB" in cast(dict[str, str], one["x"])["refused"]
    many = session_containers.checked(
        Verdict(reward=1.0, metrics={str(number): "y" * 1000 for number in range(2000)})
    ).metrics
    assert "metrics is larger than 1 MiB" in str(many["refused"])
    assert len(str(many["text"])) == session_containers.MAX_REFUSED_CHARS


def test_huge_integer_metric_becomes_digits() -> None:
    """A metric beyond 64 bits is kept as its digits."""
    kept = session_containers.checked(Verdict(reward=1.0, metrics={"count": 2**80, "of": 3}))
    assert kept.metrics == {"count": str(2**80), "of": 3}
