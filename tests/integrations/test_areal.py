"""AReaL's plug-in in AReaL's own code: areal 1.0.4 finds the workflow by its import path, runs it alone and in
its own group, and its actor trains what the workflow gives (tests/kits/areal_program.py).
"""

import math
from typing import Any

import pytest
from plugin_kit import run_program

# of the sessions that are usable, in the program's order: row by row the trained tokens
ONE = [[20, 21, 22, 23, 24], [20, 21], [40], [20, 21, 22, 23], [24, 25, 26]]
TWO = [[20, 21], *([30 + turn, 40 + turn, 50 + turn] for turn in range(1, 5)), [20, 21], [40]]


@pytest.fixture(scope="module")
def found() -> Any:
    return run_program("areal_program.py")


def test_row_is_task_with_trainer_sampling(found: Any) -> None:
    assert set(map(tuple, found["tasks"])) == {(4, 0.5, 0.0)}


def test_wrong_settings_are_named(found: Any) -> None:
    assert found["refusals"] == ["$.samples", "$.estimator", "$.adress"]


def test_lost_or_empty_sessions_are_rejected(found: Any) -> None:
    """What is lost, dropped or empty is rejected, and never a reward of 0."""
    assert found["none"] == ["dropped", "lost", "nothing"]


def test_rewards_are_compared_by_session(found: Any) -> None:
    """Rewards 1, 0 and 1/4 of sessions with one row, two and two; then 1 and 1/2, of which one lineage got 0."""
    told = [set(row) for row in found["advantages"]]
    assert all(len(each) == 1 for each in told)
    values = [each.pop() for each in told]
    mean, spread = 1.25 / 3, 0.520416
    one = [(reward - mean) / spread for reward in (1, 0, 0, 0.25, 0.25)]
    two = [(reward - 0.75) / 0.353553 for reward in (1, 1, 1, 1, 1, 0.5, 0)]
    assert values == pytest.approx(one + two, abs=1e-4)
    assert [len(row) for row in found["advantages"]] == [len(row) for row in ONE + TWO]


def test_actor_trains_each_token_once(found: Any) -> None:
    """The actor moves each sampled token once, and nothing else."""
    expected = sorted(token for row in ONE + TWO for token in row)
    batches = found["batches"]
    assert len(batches) == 2
    assert sorted(token for batch in batches for token in batch["tokens"]) == expected
    assert sorted(token for batch in batches for token in batch["moved"]) == expected
    assert sum(batch["weight"] for batch in batches) == len(expected)
    assert [batch["moved_untrained"] for batch in batches] == [0, 0]


def test_actor_distils_from_teacher_logprobs(found: Any) -> None:
    """`grpo_loss_fn`: with rl_loss_weight 0 each token's gradient is in proportion to its teacher's logprob less
    its own, which is -log(128) here.
    """
    told = {
        token: (teacher, up)
        for batch in found["distilled"]
        for token, teacher, up in zip(batch["tokens"], batch["teacher"], batch["up"], strict=True)
    }
    said = {22: -1.25, 23: -1.375, 24: -1.5, 40: -1.25}
    assert {token: told[token][0] for token in said} == said
    steps = [told[token][1] / (told[token][0] + math.log(128)) for token in (22, 23, 24)]
    assert steps == pytest.approx([steps[0]] * 3)
    assert steps[0] > 0


def test_versions_are_areal_numbers(found: Any) -> None:
    """The node served "7" at 100 and "8" at 101; tokens of weights that nobody named are as old as their episode."""
    assert found["versions"][0] == [-1, -1, -1, 100, 100, -1, -1, 100, 101, 101]
    assert found["versions"][3][:8] == [-1, -1, -1, 100, 100, -1, 100, 100]


def test_evaluation_logs_unchanged_session_rewards(found: Any) -> None:
    """An evaluation gives rewards as they are, and logs them by session."""
    assert found["eval"] == [1.0, 0.0, 0.0, 0.25, 0.25]
    rollout, evaluation = found["rewards"]
    assert [value for key, value in evaluation.items() if key.endswith("reward")] == [[1.0, 0.0, 0.25]]
    assert [len(value) for key, value in rollout.items() if key.endswith("reward")] == [15]


def test_areal_group_accepts_rollouts(found: Any) -> None:
    assert found["grouped"] == 2 * len(ONE)
