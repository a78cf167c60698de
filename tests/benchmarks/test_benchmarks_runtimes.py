"""The benchmark of runtimes on few and small containers: whole sessions on real Podman, from a copy and
prewarmed, with nothing left behind.
"""

import importlib.util
import secrets
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
from podman_parts import settings

from polarnode.containers.runtimes import open_runtimes
from polarnode.core.task import Budgets, EvaluatorSpec, HarnessSpec, PrepareStep, RuntimeSpec, TaskSpec
from polarnode.rollouts.scheduler import Scheduler


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    file = Path(__file__).parents[2] / "benchmarks" / "runtimes.py"
    spec = importlib.util.spec_from_file_location("benchmark_runtimes", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.podman
async def test_group_passes_every_container_phase(podman: None, bench: ModuleType, tmp_path: Path) -> None:
    """The workspace is prepared once, the root is sealed, a fresh evaluator sees the workdir alone, artifacts
    are kept, nothing stays.
    """
    script = (
        "echo $(cat prepared) > answer; (echo x > /usr/x) 2>/dev/null && echo open >> answer; echo y >"
        " /tmp/cheat; sleep 300 & exit 0"
    )
    steps = (PrepareStep(argv=("sh", "-c", f"date +%s%N > prepared; : {secrets.token_hex(8)}")),)
    task = TaskSpec(
        instruction="go",
        harness=HarnessSpec(name="shell", command=("sh", "-c", script)),
        num_samples=3,
        runtime=RuntimeSpec(image="base", memory_mb=256, pids=64, prepare=steps, artifacts=("answer",)),
        evaluator=EvaluatorSpec(
            name="command",
            config={"argv": ["sh", "-c", "cat answer; test ! -e /tmp/cheat && test $(wc -l < answer) = 1"]},
            fresh_runtime=True,
        ),
        budgets=Budgets(retries=0),
    )
    async with open_runtimes(settings(warm=2)) as runtimes:
        async with bench.open_scheduler(runtimes, tmp_path, 2, 2) as scheduler:
            ended = await bench.run_task(scheduler, task)
        with trio.fail_after(120):
            while runtimes.statistics().warm or runtimes.statistics().live:  # noqa: ASYNC110 (seen from outside)
                await trio.sleep(0.05)
        statistics = runtimes.statistics()
    assert [(each.outcome.status, each.reward) for each in ended] == [("completed", 1.0)] * 3, ended[
        0
    ].outcome
    said: list[Any] = [each.metrics["evaluation"]["output_tail"] for each in ended]
    assert len(set(said)) == 1, "one of them prepared for all"
    assert (statistics.copied, statistics.reused) == (1, 5)
    for each in ended:
        with tarfile.open(each.metrics["artifacts"]["path"]) as kept:
            assert kept.getnames() == ["answer"]


@pytest.mark.podman
async def test_each_way_of_starting_works(podman: None, bench: ModuleType, tmp_path: Path) -> None:
    for way in bench.WAYS:
        assert await bench.starts_a_second(way, 2, 3) > 0
    played = await bench.flow(bench.WAYS[-1], 2, 0.2, 3, tmp_path)
    assert [each.outcome.status for each in played.ended] == ["completed"] * 2
    assert len(played.shown()) == 4


def test_idle_and_hidden_shares_of_run(bench: ModuleType) -> None:
    """Idle and hidden count from the first run to the last init."""
    looks = bench.Looks(Scheduler)
    looks.places = [0, 0, 2, 4, 4, 4, 0]
    looks.init = [True, True, True, True, True, False, False]
    assert looks.shares() == (pytest.approx(1 - 10 / 12), pytest.approx(2 / 3))
    looks.init = [False] * 7
    assert looks.shares() == (0.0, 1.0)
