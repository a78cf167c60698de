"""The loop of examples/grpo, and TRL's GRPOTrainer with its plug-in, on a node of its own and on a fleet of two:
groups come, a step is taken, the weights go back, and the next sessions are sampled by them, on every node.

A fake harness and rewards by the dice: what is looked at is the way of tokens and weights, not that anything
is learned.
"""

import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from live_kit import AGENT
from plugin_kit import run_program

from polarnode.client import PolarnodeClient
from polarnode.node.config import TINY_MODEL

WORST = "sampling/sampling_logp_difference/max"
ROOT = Path(__file__).parents[2]
DICE = "echo \"0.$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')\" > /tmp/reward"

# torch and transformers warn of themselves
pytestmark = [pytest.mark.podman, pytest.mark.engine, pytest.mark.filterwarnings("default")]


def spec(
    task: Any, *, name: str, harness: str, samples: int, builder: str = "prefix_merging"
) -> dict[str, Any]:
    """The example's task, with the agent that speaks and no harness."""
    return {
        "task_id": name,
        "instruction": task.instruction,
        "num_samples": samples,
        "harness": {
            "name": "shell",
            "command": ["python3", "/work/agent.py", json.dumps({"turns": 2, "max_tokens": 12})],
        },
        "runtime": {"files": [{"path": "agent.py", "text": AGENT.read_text()}]},
        "evaluator": {"name": "command", "config": {"script": DICE, "reward_file": "/tmp/reward"}},
        "builder": {"name": builder},
        "sampling": {"temperature": 1.0},
    }


def held_out_task() -> Any:
    from examples.grpo.tasks import held_out

    [task] = held_out(1, ("write",))
    return task


@pytest.fixture(scope="module", params=[1, 2], ids=["node", "fleet"])
def client(
    request: Any, podman_works: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PolarnodeClient]:
    """Of a node that takes adapters, and of the first of two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from examples.grpo.own_node import own_node

        with own_node(
            tmp_path_factory.mktemp("node"), run_limit=4, lora_rank=4, nodes=request.param
        ) as opened:
            yield opened


def sampled(client: PolarnodeClient, begin: str) -> set[tuple[str, str]]:
    """The nodes that ran the tasks whose names begin so, each with the versions that sampled there."""
    return {
        (line["node"], span["version"])
        for line in client.export(arrays="json")
        if line["task_id"].startswith(begin)
        for trace in line["traces"]
        for span in trace["version_spans"]
    }


def nodes_of(client: PolarnodeClient) -> int:
    return len(client.status().get("nodes", ["one"]))


def spec_by_turns(client: PolarnodeClient) -> Callable[..., dict[str, Any]]:
    """`spec`, each next task on the next node: where they run else depends on which node has room first."""
    names = cycle([node["name"] for node in client.status().get("nodes", ())] or [""])

    def placed(task: Any, **more: Any) -> dict[str, Any]:
        name = next(names)
        return spec(task, **more) | ({"requires": {"node": name}} if name else {})

    return placed


def test_adapter_learns_and_base_stays(
    client: PolarnodeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded logprobs of each step are the learner's own, so the engine samples by the adapter pushed."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    from examples.grpo.__main__ import PACKAGED
    from examples.grpo.learner import Learner, Recipe
    from examples.grpo.train import Plan, Run

    learner = Learner(PACKAGED, Recipe(lora=4, lora_lr=1e-2, inner=1))
    plan = Plan(harness="shell", steps=2, prompts=2, samples=2, evaluate=0)
    run = Run(client, learner, plan, tmp_path, spec=spec, mark="lora-")
    cold = {"sampling": {"temperature": 0.0}}

    def greedy(name: str) -> list[list[int]]:
        client.submit(run.spec(held_out_task(), name=name, harness="shell", samples=1) | cold)
        [group] = run.collect([name])
        return [list(trace.token_ids) for each in group.trajectories for trace in each.traces]

    before = greedy("before")
    lines = run.train()
    after = greedy("after")
    [adapter] = client.adapters().adapters
    client.delete_adapter(adapter.name)  # base weights are updated next
    assert [line["versions"] for line in lines] == [["grpo-lora-0"], ["grpo-lora-1"]]
    assert (adapter.name, adapter.version) == ("grpo", "grpo-lora-2")
    assert max(line["worst"] for line in lines) < 1e-3
    assert all(line["updates"] == 1 and line["sessions"] == 4 and not line["unusable"] for line in lines)
    assert before == after
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["2"]


def test_second_step_samples_learned_weights(
    client: PolarnodeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    import torch

    from examples.grpo.__main__ import PACKAGED
    from examples.grpo.learner import Learner, Recipe
    from examples.grpo.train import Plan, Run

    learner = Learner(PACKAGED, Recipe(lr=3e-4, scale_lr=3e-3, final_lr=3e-3, inner=1))
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    run = Run(
        client,
        learner,
        Plan(harness="shell", steps=2, prompts=2, samples=2, evaluate=0),
        tmp_path,
        spec=spec_by_turns(client),
    )
    lines = run.train()
    served = client.weights().version
    assert [line["versions"] for line in lines] == [["0"], ["1"]]
    assert served == "2"
    assert all(line["updates"] == 1 and line["sessions"] == 4 and not line["unusable"] for line in lines)
    # of the second step too: what serves is what was pushed
    assert max(line["worst"] for line in lines) < 1e-3
    for number in range(2):  # on every node, the version of the step before
        found = sampled(client, f"step-{number}-")
        assert {version for _, version in found} == {str(number)}
        assert len(found) == nodes_of(client)
    assert any(not torch.equal(before[name], value) for name, value in learner.model.state_dict().items())
    assert [json.loads(line)["kind"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        "step",
        "step",
    ]
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["2"]


def test_forks_step_trains_tokens_once(
    client: PolarnodeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step on sessions and their forks trains every sampled token once."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    from examples.grpo.__main__ import PACKAGED
    from examples.grpo.learner import Learner, Recipe
    from examples.grpo.train import Plan, Run

    plan = Plan(harness="shell", steps=1, prompts=1, samples=4, per_session=1, fork_at="even", evaluate=0)
    run = Run(client, Learner(PACKAGED, Recipe(inner=1)), plan, tmp_path, spec=spec, mark="tree-")
    run.begin()
    [line] = run.train()
    assert (line["sessions"], line["unusable"]) == (4, 0)
    assert line["worst"] < 1e-3
    told = [each for each in client.export(arrays="json") if each["task_id"].startswith("tree-")]
    forks = [each["forked_from"] for each in told if each["forked_from"] is not None]
    assert sorted(fork["session_id"] for fork in forks) == sorted(
        each["session_id"] for each in told if each["forked_from"] is None
    )
    assert {(fork["turn"], fork["got"], fork["differs"]) for fork in forks} == {(1, 1, None)}
    # two turns of each session, and the second one of each fork
    assert sum(len(trace["turn_spans"]) for each in told for trace in each["traces"]) == 2 * 2 + 2 * 2
    assert line["tokens"] == sum(sum(trace["loss_mask"]) for each in told for trace in each["traces"])
    assert line["tokens"] == sum(
        span["end"] - span["start"]
        for each in told
        for trace in each["traces"]
        for span in trace["turn_spans"]
        if each["forked_from"] is None or span["turn"] >= each["forked_from"]["got"]
    )


def test_another_run_begins_own_weights(
    client: PolarnodeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks and versions have names of its own, and what the run before left is not sampled from."""
    monkeypatch.syspath_prepend(str(ROOT))
    import torch

    from examples.grpo.__main__ import PACKAGED
    from examples.grpo.learner import Learner, Recipe
    from examples.grpo.train import Plan, Run

    plan = Plan(harness="shell", steps=1, prompts=2, samples=2, evaluate=0)
    first = Run(client, Learner(PACKAGED, Recipe()), plan, tmp_path / "first", mark="first-")
    with torch.no_grad():
        first.learner.model.model.norm.weight.mul_(0.5)
    first.push("1")
    run = Run(client, Learner(PACKAGED, Recipe(inner=1)), plan, tmp_path / "again", spec=spec, mark="again-")
    run.begin()
    [line] = run.train()
    assert line["versions"] == ["again-0"]
    assert line["worst"] < 1e-3
    assert client.weights().version == line["version"] == "again-1"


def test_trl_recomputes_recorded_logprobs(
    client: PolarnodeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second rollout too: it is sampled by what the first step learned, whichever node ran it."""
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.grpo.tasks import numbered

    made = spec_by_turns(client)
    tasks = [
        made(numbered(number, seed=0, kinds=("write",)), name="", harness="shell", samples=2)
        for number in range(4)
    ]
    log = run_program(
        "trl_live_program.py",
        stdin={
            "model": str(TINY_MODEL),
            "url": client.base_url,
            "token": client.token,
            "folder": str(tmp_path),
            "tasks": [{name: each for name, each in task.items() if name != "task_id"} for task in tasks],
            "run": "trl",
        },
    )
    worst = [line[WORST] for line in log if WORST in line]
    assert len(worst) == 2
    assert max(worst) < 1e-3
    found = sampled(client, "trl-")
    assert len({version for _, version in found}) == 2
    assert len({node for node, _ in found}) == nodes_of(client)
