"""Batches of sessions of several rows in verl 0.9.1's own batch, advantage and loss (verl_batch_program.py),
and which of verl's settings are refused for them.
"""

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
from plugin_kit import run_program
from trainers_kit import group_of, one_row, session_of_two_rows, session_without_rows
from trainers_program import ORACLES

from polarnode.core.errors import Refused
from polarnode.integrations import verl_algorithms as algorithms
from polarnode.integrations.verl_algorithms import check_algorithm, rows_per_prompt
from polarnode.trainers import verl

SHIPPED = Path(__file__).parents[2] / "examples" / "trainers" / "verl" / "train.sh"
# four prompts of four samples: sixteen sessions of one to four rows
PROMPTS = [
    [[1, 1.0], [2, 0.0], [3, 0.5], [4, 0.25]],
    [[4, 1.0], [1, 0.0], [1, 0.0], [2, 0.0]],
    [[3, 0.25], [4, 0.25], [2, 0.25], [1, 0.25]],
    [[2, 0.0], [3, 1.0], [4, 1.0], [3, 0.0]],
]


def batch(prompts: list[Any], mini: int) -> Any:
    return run_program("verl_batch_program.py", stdin={"prompts": prompts, "mini": mini})


def shipped(name: str) -> int:
    """A number of the shipped train.sh."""
    [line] = [each for each in SHIPPED.read_text().splitlines() if f"{name}=" in each]
    return int(line.split("=")[1].split()[0])


@pytest.fixture(scope="module")
def roomy() -> Any:
    """With the headroom of the shipped file."""
    prompts = shipped("data.train_batch_size")
    return batch(PROMPTS, len(PROMPTS) * shipped("actor.ppo_mini_batch_size") // prompts)


def close(theirs: dict[str, list[float]], ours: dict[str, list[float]]) -> bool:
    assert theirs.keys() >= ours.keys()
    return all(theirs[key] == pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in ours.items())


def test_all_session_rows_take_one_step(roomy: Any) -> None:
    assert roomy["rows"] == sum(rows for prompt in PROMPTS for rows, _ in prompt) == 40
    assert roomy["real"] == [40]
    assert roomy["said"] == []


def test_token_weights_match_our_arithmetic(roomy: Any) -> None:
    """1 over the trained tokens of the batch; a mean over sequences of sums has the same for every token."""
    assert close(roomy["verl"]["token-mean"], roomy["ours"]["token-mean"])
    alike = {key: [1 / roomy["size"]] * len(row) for key, row in roomy["ours"]["token-mean"].items()}
    assert close(roomy["verl"]["seq-mean-token-sum"], alike)


def test_advantages_are_of_sessions(roomy: Any) -> None:
    assert close(roomy["verl"]["advantages"], roomy["ours"]["advantages"])
    assert len(roomy["ours"]["advantages"]) == 40


def test_batch_without_room_is_reported() -> None:
    """Mini-batches of the batch's prompts, as train.sh had them: more rows than sessions are another step."""
    found = batch(PROMPTS, len(PROMPTS))
    assert found["real"] == [16, 16, 8]
    [said] = found["said"]
    assert said.startswith("step 9: 4 prompts of this process have 18 rows so far")
    assert "has room for 16 of them" in said
    assert "Raise actor.ppo_mini_batch_size" in said


def test_lone_survivor_is_not_trained() -> None:
    """verl's advantage of the only row of a prompt is its reward."""
    prompts = [[[1, None], [1, None], [2, 1.0], [1, None]], [[1, 1.0], [1, 0.0], [1, None], [1, None]]]
    found = batch(prompts, 8)
    assert found["rows"] == 4
    assert found["verl"]["advantages"]["u0_2_0"] == []  # no token of it is left in the mask
    assert found["verl"]["advantages"]["u0_2_1"] == []
    assert [round(found["verl"]["advantages"][f"u1_{place}_0"][0], 3) for place in (0, 1)] == [0.707, -0.707]
    assert any("one session of 4 is left" in each for each in found["said"])


def test_own_rows_mask_lone_survivor() -> None:
    group = group_of(session_of_two_rows(), lost=[session_without_rows(sample_index=1)])
    rows = verl.transfer_group(group, uid="u", global_steps=1)["rows"]
    assert [sum(row["fields"]["response_mask"]) for row in rows] == [0, 0]
    found = verl.data_proto(group, pad_token_id=0)["batch"]
    assert not sum(map(sum, found["response_mask"]))
    both = group_of(
        one_row(), session_of_two_rows(sample_index=1), lost=[session_without_rows(sample_index=2)]
    )
    assert sum(map(sum, verl.data_proto(both, pad_token_id=0)["batch"]["response_mask"])) == 8


# ── settings ──────────────────────────────────────────────────────────────────


def config(path: str, value: Any) -> dict[str, Any]:
    """A configuration with one setting."""
    *parents, last = path.split(".")
    found: dict[str, Any] = {last: value}
    for name in reversed(parents):
        found = {name: found}
    return found


def registered(decorator: str) -> set[str]:
    """The names under which verl registers functions of one kind."""
    tree = ast.parse((ORACLES / "verl/trainer/ppo/core_algos.py").read_text())
    [kinds] = [each for each in tree.body if getattr(each, "name", "") == "AdvantageEstimator"]
    assert isinstance(kinds, ast.ClassDef)
    values = {
        each.targets[0].id: each.value.value  # type: ignore[attr-defined]
        for each in kinds.body
        if isinstance(each, ast.Assign)
    }
    found = set()
    for function in tree.body:
        for each in getattr(function, "decorator_list", []):
            if isinstance(each, ast.Call) and getattr(each.func, "id", "") == decorator:
                [name] = each.args
                found.add(name.value if isinstance(name, ast.Constant) else values[name.attr])  # type: ignore[attr-defined]
    return found


def test_every_verl_estimator_is_classified() -> None:
    judged = algorithms.COMPARES_SESSIONS | algorithms.WEIGHS_TOKENS | set(algorithms.COMPARES_ROWS)
    assert registered("register_adv_est") == judged
    for name in judged - set(algorithms.COMPARES_ROWS):
        check_algorithm(config("algorithm.adv_estimator", name))


def test_every_verl_loss_is_classified() -> None:
    assert registered("register_policy_loss") == {*algorithms.TOKEN_LOSSES, *algorithms.ROW_LOSSES}
    path = "actor_rollout_ref.actor.policy_loss.loss_mode"
    for name in algorithms.TOKEN_LOSSES:
        check_algorithm(config(path, name))


@pytest.mark.parametrize("name", algorithms.COMPARES_ROWS)
def test_row_estimators_are_refused(name: str) -> None:
    with pytest.raises(Refused, match=rf"adv_estimator={name} .*use grpo, which compares sessions"):
        check_algorithm(config("algorithm.adv_estimator", name))


@pytest.mark.parametrize("name", algorithms.ROW_LOSSES)
def test_row_losses_are_refused(name: str) -> None:
    with pytest.raises(Refused, match=rf"loss_mode={name} .*such as vanilla"):
        check_algorithm(config("actor_rollout_ref.actor.policy_loss.loss_mode", name))


def test_mean_over_rows_is_refused() -> None:
    with pytest.raises(Refused, match="four rows weighs four times"):
        check_algorithm(config("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-mean"))
    for mean in algorithms.TOKEN_MEANS:
        check_algorithm(config("actor_rollout_ref.actor.loss_agg_mode", mean))


def test_kl_in_reward_is_refused() -> None:
    """A penalty of the KL of the last row alone is refused."""
    with pytest.raises(Refused, match="KL of their last row: use actor"):
        check_algorithm({"algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True}})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("reward.custom_reward_function.path", "/rewards.py"),
        ("custom_reward_function.path", "/rewards.py"),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable", True),
        ("reward.reward_manager.name", "dapo"),
        ("reward.reward_model.enable", True),
    ],
)
def test_unused_reward_settings_are_refused(path: str, value: Any) -> None:
    with pytest.raises(Refused, match=rf"{path}={value} would do nothing.*(evaluator)"):
        check_algorithm(config(path, value))
    # verl scores the samples of other agent loops
    beside = config("actor_rollout_ref.rollout.agent.default_agent_loop", "single_turn_agent")
    check_algorithm(config(path, value) | beside)


def test_foreign_estimator_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_algorithm(config("algorithm.adv_estimator", "mine"))
    assert "mine is not verl's own" in caplog.text


@pytest.mark.parametrize(("prompts", "mini", "room"), [(16, 64, 32.0), (16, 16, 8.0), (64, 16, 8.0)])
def test_room_follows_requested_steps(prompts: int, mini: int, room: float) -> None:
    found = {
        "data": {"train_batch_size": prompts},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": mini}, "rollout": {"n": 8}},
    }
    assert rows_per_prompt(found) == room
    assert rows_per_prompt({}) is None
