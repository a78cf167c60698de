"""Checks which of verl's settings are right for sessions of several rows, and which have no effect with a
node.

This module is pure and does not import verl. It was written after verl 0.9.1: verl/trainer/ppo/core_algos.py,
verl/trainer/ppo/v1/utils.py, verl/experimental/agent_loop/agent_loop.py. V1 compares the sessions of a prompt
only for `grpo`, by the last row of each; every other estimator gets the rows, so that a session of three rows
is three samples to it.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from polarnode.core.errors import Refused

log = logging.getLogger(__name__)

NAME: Final = "polarnode"  # the name of the agent loop and of the rollout backend

# `grpo` compares sessions. `opo` weighs rewards by length, and the rows of a session are together as long as
# the session. `gae` and `reinforce_plus_plus` do not compare the samples of a prompt; they weigh tokens.
COMPARES_SESSIONS: Final = frozenset({"grpo", "opo"})
WEIGHS_TOKENS: Final = frozenset({"gae", "reinforce_plus_plus"})
# The reasons against all other estimators: what they do with the rows of a session.
COMPARES_ROWS: Final[Mapping[str, str]] = {
    "grpo_vectorized": "takes the mean and the spread of rows",
    "grpo_passk": "compares the best two rows, which may be of one session",
    "gdpo": "takes the mean and the spread of rows for each reward",
    "rloo": "leaves one row out, not one session",
    "rloo_vectorized": "leaves one row out, not one session",
    "reinforce_plus_plus_baseline": "subtracts the mean of rows",
    "gpg": "subtracts the mean of rows",
    "remax": "needs a greedy sample of each prompt, which V1 does not take",
    "optimal_token_baseline": "compares the tokens of rows at one position",
    "tir_optimal_token_baseline": "compares the tokens of rows at one position",
}
# Loss modes whose terms are tokens, whatever row the tokens are in.
TOKEN_LOSSES: Final = (
    "vanilla", "dppo_tv", "dppo_kl", "gpg", "clip_cov", "kl_cov", "dro", "cispo", "bypass_mode",
)  # fmt: skip
ROW_LOSSES: Final[Mapping[str, str]] = {
    "gspo": "takes one probability ratio for each row",
    "sapo": "is a mean over rows, whatever loss_agg_mode is",
    "geo_mean": "is a mean over rows, padding included",
}
TOKEN_MEANS: Final = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
ROW_MEANS: Final = frozenset({"seq-mean-token-mean"})
# What to use in verl in place of a task's settings of whole groups, because here each sample is a task of its
# own.
OWN_GROUPS: Final[Mapping[str, str]] = {
    "drop_uniform_reward": "set algorithm.filter_groups.enable=True with metric=score",
    "early_stop_min": "set actor_rollout_ref.rollout.n to the samples wanted; verl waits for all of them",
    "min_usable": "set trainer.v1.sampler.sync_refill_failed_groups=True; a lone sample is never trained",
}
EVALUATOR: Final = "say in the evaluator of the task what a session is worth"
# verl's settings of rewards, each older name after the newer one, and what to use in their place.
IGNORED_REWARD_SETTINGS: Final[Mapping[str, str]] = {
    "reward.custom_reward_function.path": EVALUATOR,
    "custom_reward_function.path": EVALUATOR,
    "reward.reward_kwargs.overlong_buffer_cfg.enable": EVALUATOR,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": EVALUATOR,
    "reward.reward_manager.module.path": EVALUATOR,
    "reward.reward_manager.name": EVALUATOR,
    "reward_model.reward_manager": EVALUATOR,
    "reward.reward_model.enable": 'name the evaluator "judge" in the task',
    "reward_model.enable": 'name the evaluator "judge" in the task',
    "reward.sandbox_fusion.url": EVALUATOR,
    "sandbox_fusion.url": EVALUATOR,
}


def check_algorithm(config: Any) -> None:
    """Raise Refused for a setting of verl's whole configuration that would count a session once for each of
    its rows, or that does nothing because the node has the reward already.
    """
    _check_estimator(config)
    _check_loss(_found(config, "actor_rollout_ref", "actor") or {})
    _check_rewards(config)


def compares_samples(config: Any) -> bool:
    """Whether the samples of a prompt are each other's baseline."""
    return _found(config, "algorithm", "adv_estimator") not in WEIGHS_TOKENS


def rows_per_prompt(config: Any) -> float | None:
    """The average number of rows that each prompt of a batch may have before there is one more optimizer step
    than the configuration asks for; None if the configuration does not say.
    """
    prompts = _found(config, "data", "train_batch_size")
    mini = _found(config, "actor_rollout_ref", "actor", "ppo_mini_batch_size")
    samples = _found(config, "actor_rollout_ref", "rollout", "n")
    if not prompts or not mini or not samples:
        return None
    steps = max(1, -(-int(prompts) // int(mini)))
    return float(steps * int(mini) * int(samples) / int(prompts))


def _check_estimator(config: Any) -> None:
    name = _found(config, "algorithm", "adv_estimator")
    name = getattr(name, "value", name)  # it may be a member of verl's own enumeration
    if name in COMPARES_ROWS:
        raise Refused(
            f"algorithm.adv_estimator={name} {COMPARES_ROWS[name]}, and a session may have several: use grpo,"
            " which compares sessions (opo weighs them by length; gae and reinforce_plus_plus compare none)",
            path="$.algorithm.adv_estimator",
        )
    if name is not None and name not in COMPARES_SESSIONS | WEIGHS_TOKENS:
        log.warning(
            "algorithm.adv_estimator=%s is not verl's own: verl gives it rows, and a session of three rows is"
            " three samples to it",
            name,
        )
    if name in COMPARES_SESSIONS and _found(config, "algorithm", "use_kl_in_reward"):
        raise Refused(
            "algorithm.use_kl_in_reward takes the KL from the reward of each row, so sessions are compared by"
            " the KL of their last row: use actor.use_kl_loss",
            path="$.algorithm.use_kl_in_reward",
        )
    if _found(config, "algorithm", "use_pf_ppo"):
        raise Refused(
            "algorithm.use_pf_ppo draws rows again by their score, and a session may have several: leave it"
            " out",
            path="$.algorithm.use_pf_ppo",
        )


def _check_loss(actor: Any) -> None:
    mode = _found(actor, "policy_loss", "loss_mode")
    if mode in ROW_LOSSES:
        raise Refused(
            f"actor.policy_loss.loss_mode={mode} {ROW_LOSSES[mode]}, so a session of four rows weighs four"
            f" times as much as one of one: use one that weighs tokens, such as {', '.join(TOKEN_LOSSES)}",
            path="$.actor_rollout_ref.actor.policy_loss.loss_mode",
        )
    mean = _found(actor, "loss_agg_mode")
    if mean in ROW_MEANS:
        raise Refused(
            f"actor.loss_agg_mode={mean} is a mean over rows, so a session of four rows weighs four times as"
            f" much as one of one: use one that weighs tokens: {', '.join(TOKEN_MEANS)}",
            path="$.actor_rollout_ref.actor.loss_agg_mode",
        )


def _check_rewards(config: Any) -> None:
    if (_found(config, "actor_rollout_ref", "rollout", "agent", "default_agent_loop") or NAME) != NAME:
        return  # other samples belong to another agent loop, and verl scores them
    for path, instead in IGNORED_REWARD_SETTINGS.items():
        value = _found(config, *path.split("."))
        if value and value != "naive":  # "naive" is verl's default manager
            raise Refused(
                f"{path}={value} would do nothing: the node scores every session, and verl computes no reward"
                f" where there is one: leave it out, and {instead}",
                path=f"$.{path}",
            )


def _found(value: Any, *names: str) -> Any:
    """The value under these names of a configuration; None if one of them is missing."""
    for name in names:
        if value is None:
            return None
        value = value.get(name) if hasattr(value, "get") else getattr(value, name, None)
    return value
