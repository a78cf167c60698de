#!/usr/bin/env bash
# GRPO of verl's V1 trainer on a polarnode: docs/trainers/verl.md. Further arguments are verl's own.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${POLARNODE_TOKEN:?the token of the node}" # from the environment: command lines are visible to others
model=${MODEL:?the folder of the checkpoint that the node serves}

exec python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.bypass_mode=True \
  data.train_files="$PWD/train.parquet" \
  data.val_files="$PWD/val.parquet" \
  data.train_batch_size=16 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.external_lib=polarnode.integrations.verl \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  actor_rollout_ref.rollout.name=polarnode \
  actor_rollout_ref.rollout.agent.default_agent_loop=polarnode \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.temperature=0.7 \
  actor_rollout_ref.rollout.val_kwargs.n=2 \
  +actor_rollout_ref.rollout.engine_kwargs.polarnode.url="${POLARNODE_URL:-http://127.0.0.1:8080}" \
  +actor_rollout_ref.rollout.engine_kwargs.polarnode.task="$here/task.toml" \
  +actor_rollout_ref.rollout.engine_kwargs.polarnode.run=grpo-1 \
  +actor_rollout_ref.rollout.engine_kwargs.polarnode.folder="$PWD/weights" \
  trainer.v1.trainer_mode=sync \
  trainer.v1.sampler.sync_refill_failed_groups=True \
  trainer.n_gpus_per_node="${GPUS:-1}" \
  trainer.logger=console \
  trainer.total_epochs=1 \
  "$@"
