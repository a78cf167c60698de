#!/usr/bin/env bash
# GRPO of SkyRL on a polarnode: docs/trainers/skyrl.md. Further arguments are SkyRL's own.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${POLARNODE_TOKEN:?the token of the node}" # from the environment: command lines are visible to others
model=${MODEL:?the folder of the checkpoint that the node serves}

exec python3 -m skyrl.train.entrypoints.main_base \
  trainer.override_entrypoint=polarnode.integrations.skyrl \
  polarnode.url="${POLARNODE_URL:-http://127.0.0.1:8080}" \
  polarnode.task="$here/task.toml" \
  polarnode.run=grpo-1 \
  polarnode.folder="$PWD/weights" \
  data.train_data="['$PWD/train.parquet']" \
  data.val_data="['$PWD/val.parquet']" \
  environment.env_class=none \
  generator.step_wise_trajectories=true \
  generator.n_samples_per_prompt=8 \
  generator.sampling_params.temperature=1.0 \
  generator.sampling_params.max_generate_length=4096 \
  generator.batched=false \
  trainer.policy.model.path="$model" \
  trainer.placement.colocate_all=false \
  trainer.placement.policy_num_gpus_per_node="${GPUS:-1}" \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=false \
  trainer.train_batch_size=16 \
  trainer.policy_mini_batch_size=16 \
  trainer.max_prompt_length=8192 \
  trainer.epochs=1 \
  trainer.eval_before_train=false \
  trainer.eval_interval=10 \
  trainer.ckpt_interval=0 \
  trainer.logger=console \
  "$@"
