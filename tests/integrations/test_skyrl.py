"""SkyRL's plug-in, run in SkyRL 0.3.0's own classes and functions (skyrl_program.py)."""

from typing import Any

import pytest
from plugin_kit import run_program


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("skyrl") / "weights"
    found: dict[str, Any] = run_program("skyrl_program.py", folder)
    return found


def test_prompt_trajectories_are_one_task(made: dict[str, Any]) -> None:
    assert made["step_wise"]["task"] == ["10", 3, 3, 0.7, 64, 0.0]


def test_lost_sessions_leave_step_wise_batch(made: dict[str, Any]) -> None:
    """A prompt of which nothing is left keeps its place, because SkyRL counts prompts; its rows are masked."""
    said = made["step_wise"]
    assert said["ids"] == ["10_0", "10_1", "10_1", "11_0", "11_0", "11_1", "11_1", "12_0", "12_1", "12_2"]
    assert said["trained"] == [5, 2, 1, 2, 3, 2, 1, 0, 0, 0]
    assert said["metrics"] == {"generate/polarnode_masked_rows": 3}


def test_session_rows_share_its_advantage(made: dict[str, Any]) -> None:
    """Rewards 1 and 0, and 0.5 and -1: two sessions a group, however many rows. A lineage's 5 is not used."""
    said = made["step_wise"]
    better, worse = [0.7071], [-0.7071]
    assert said["advantages"] == [better, worse, worse, better, better, worse, worse, [], [], []]


def test_lost_session_moves_no_baseline(made: dict[str, Any]) -> None:
    """SkyRL wants a row for each sample: one token, masked, with the mean reward of the others."""
    said = made["rows"]
    assert said["ids"] == ["10_0", "10_1", "10_2", "11_0", "11_1", "11_2"]
    assert said["rewards"] == [1.0, 0.0, 0.5, 0.5, 0.5, -1.0]
    assert said["trained"] == [5, 5, 0, 5, 5, 5]
    [first], [second] = said["advantages"][:2]
    assert first == -second > 0


def test_lone_survivor_has_advantage_zero(made: dict[str, Any]) -> None:
    """SkyRL takes the reward itself where a trajectory has no other: beside it stands a masked row of its reward."""
    lone, evaluated, row = made["lone"]
    assert lone["ids"] == ["10_0", "10_2", "10_2"]
    assert (lone["rewards"], lone["trained"]) == ([1.0, 1.0, 1.0], [0, 2, 1])
    assert lone["advantages"] == [[], [0.0], [0.0]]
    assert evaluated["ids"] == ["10_2", "10_2"]  # an evaluation counts what was scored
    assert row["advantages"] == [[], [], [0.0]]


def test_budget_ended_sessions_are_masked(made: dict[str, Any]) -> None:
    plain, masked = made["truncated"]
    assert plain["stops"] == masked["stops"] == ["stop", "length"]
    assert (plain["trained"], masked["trained"]) == ([5, 5], [5, 0])


def test_generator_settings_are_refused(made: dict[str, Any]) -> None:
    overlong, zero, replace, filtered = made["unused"]
    assert "generator.apply_overlong_filtering would do nothing" in overlong
    assert "polarnode.mask_truncated=true" in overlong
    assert "generator.zero_reward_on_non_stop would do nothing" in zero
    assert "use type=filter" in replace
    assert filtered == ""


def test_each_step_updates_node_weights(made: dict[str, Any]) -> None:
    said = made["weights"]
    assert said["exported"] == ["policy", "tokenizer"]
    _, version, _ = said["pushed"]
    assert version.startswith("r-")
    assert version.endswith("-4")
    assert said["settings"]["model"] == "/model"
    assert said["left"] == []


def test_lora_policy_becomes_named_adapter(made: dict[str, Any]) -> None:
    name, version, tensors, rank = made["weights"]["adapter"]
    assert (name, version[-2:], rank, len(tensors)) == ("r", "-4", 2, 8)
    assert all(
        each.startswith("base_model.model.model.layers.") and ".q_proj.lora_" in each for each in tensors
    )
    none, named, refused = made["adapters"]
    assert (none, named) == (None, "r")
    assert "use trainer.strategy=fsdp" in refused
