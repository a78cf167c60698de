"""The loop of examples/grpo on a node of its own: groups come, a step is taken, the weights go back, and the
next sessions are sampled by them.

A fake harness and rewards by the dice: what is looked at is the way of tokens and weights, not that anything
is learned.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from live_kit import AGENT

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


def test_two_steps_and_the_second_is_sampled_by_what_the_first_learned(
    podman_works: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    import torch

    from examples.grpo.__main__ import PACKAGED
    from examples.grpo.learner import Learner, Recipe
    from examples.grpo.own_node import own_node
    from examples.grpo.train import Plan, Run

    learner = Learner(PACKAGED, Recipe(lr=3e-4, scale_lr=3e-3, final_lr=3e-3, inner=1))
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    with own_node(tmp_path / "node", run_limit=4) as client:
        run = Run(
            client,
            learner,
            Plan(harness="shell", steps=2, prompts=2, samples=2, evaluate=0),
            tmp_path,
            spec=spec,
        )
        lines = run.train()
        served = client.weights().version
    assert [line["versions"] for line in lines] == [["0"], ["1"]]
    assert served == "2"
    assert all(line["updates"] == 1 and line["sessions"] == 4 and not line["unusable"] for line in lines)
    # of the second step too: what serves is what was pushed
    assert max(line["worst"] for line in lines) < 1e-3
    assert any(not torch.equal(before[name], value) for name, value in learner.model.state_dict().items())
    assert [json.loads(line)["kind"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        "step",
        "step",
    ]
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["2"]
