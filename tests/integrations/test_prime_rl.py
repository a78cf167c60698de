"""prime-rl's plug-in in verifiers' own code: verifiers 0.4.0 finds harness and taskset by their id and serves
their episodes (tests/kits/prime_rl_program.py); the requests of prime-rl's weight update are PrimeIntellect-ai/
prime-rl 559b44772's (src/prime_rl/utils/client.py, src/prime_rl/transports/weights/filesystem.py).
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_kit import run_program


@pytest.fixture(scope="module")
def found() -> Any:
    installed = Path(sys.prefix, "oracles", "verifiers").is_dir()
    assert installed, "verifiers is not in .venv/oracles: run tools/setup.sh test"
    return run_program("prime_rl_program.py")


def rows(episode: Any) -> list[list[int]]:
    """The sampled tokens of each branch, of which prime-rl makes a sample."""
    return [
        [token for token, on in zip(one["ids"], one["mask"], strict=True) if on]
        for one in episode["branches"]
    ]


def test_row_is_branch_session_is_trace(found: Any) -> None:
    episodes = found["episodes"]
    assert rows(episodes["one"]) == [[20, 21, 22, 23, 24]]
    assert rows(episodes["two"]) == [[20, 21], [40]]
    assert rows(episodes["sliced"]) == [
        [20, 21],
        *([30 + turn, 40 + turn, 50 + turn] for turn in range(1, 5)),
    ]
    assert [episodes[name]["reward"] for name in ("one", "two", "sliced", "zero")] == [1.0, 0.25, 0.5, 0.0]
    assert all(episodes[name]["ok"] for name in ("one", "two", "sliced", "zero"))


def test_ids_and_logprobs_are_the_engines(found: Any) -> None:
    [branch] = found["episodes"]["one"]["branches"]
    assert branch["ids"] == [10, 11, 12, 20, 21, 13, 14, 22, 23, 24]
    assert branch["logprobs"] == [0, 0, 0, -0.5, -0.625, 0, 0, -1.5, -1.625, -1.75]
    assert branch["experts"] == [10, 2, 3]  # a row for each token, which prime-rl insists on
    assert found["episodes"]["one"]["turns"] == 2
    assert found["episodes"]["one"]["output_tokens"] == 5


def test_looped_rollout_is_truncated_and_trained(found: Any) -> None:
    """verifiers counts as truncated only the limits whose names it knows."""
    looped = found["episodes"]["looped"]
    assert (looped["ok"], looped["truncated"]) == (True, ["max_turns", True])
    assert found["episodes"]["late"]["truncated"] == ["max_turns", True]
    assert rows(looped) == rows(found["episodes"]["one"])
    assert found["episodes"]["one"]["truncated"][1] is False


def test_teacher_logprobs_become_references(found: Any) -> None:
    """prime-rl 559b44772, `trace_to_samples` (orchestrator/trajectories.py): `ref_logprobs` is the branch's."""
    [branch] = found["episodes"]["taught"]["branches"]
    assert branch["reference"] == [0, 0, 0, -0.25, -0.375, 0, 0, -1.25, -1.375, -1.5]
    assert [each["reference"] for each in found["episodes"]["two"]["branches"]] == [None, None]


def test_versions_are_in_trace_info(found: Any) -> None:
    assert found["episodes"]["two"]["info"]["polarnode"]["versions"] == [["7"], ["8"]]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("lost", "SandboxError: session lost-0 was lost: the container ended"),
        ("unscored", "HarnessError: session unscored has no reward: it was so"),
        ("wrong", "HarnessError: harness 'polarnode': Refused: budgets.run_s must be"),
    ],
)
def test_session_without_verdict_is_error(found: Any, name: str, error: str) -> None:
    """prime-rl leaves traces with an error out of their group's mean and out of its batch."""
    episode = found["episodes"][name]
    assert not episode["ok"]
    assert episode["errors"][0].startswith(error)
    assert episode["branches"] == []


def test_task_has_trainer_sampling(found: Any) -> None:
    assert found["tasks"][0] == ["one", 1, 0.5, 64, 0.0]


def test_broadcast_is_served_as_version(found: Any) -> None:
    version, mode, files = found["served"][0]
    assert (version, mode) == ("r-step_3-1700000000", "in_place")
    assert {"STABLE", "config.json"} <= set(files)
    answers = found["relayed"]
    assert [status for status, _ in answers] == [200, 200, 200, 200, 400, 400, 400, 200, 404, 200, 400]
    assert json.loads(answers[3][1]) == {"status": "ok", "version": "r-step_3-1700000000"}
    assert "/broadcasts/step_4/STABLE is not there" in answers[4][1]
    assert json.loads(answers[5][1]) == {"error": "a tensor is missing"}
    assert 'weight_broadcast.type = \\"filesystem\\"' in answers[6][1]


def test_lora_broadcast_becomes_adapter_version(found: Any) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    names = [f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"]
    assert found["served"][1:] == [["r-step_3-1700000000", "a", names, 8]]
    assert "/broadcasts/step_4/STABLE is not there" in found["relayed"][10][1]
