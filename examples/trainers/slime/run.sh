#!/bin/bash
# Train Qwen3-4B with slime on a polarnode node; docs/trainers/slime.md. Run it in slime's own container, with `pip install polarnode`.
# SLIME is slime's checkout, MODELS holds Qwen3-4B and its Megatron checkpoint Qwen3-4B_torch_dist, as slime's quick start makes them.
# Arguments are added to slime's. miles/run.sh calls this for miles, whose arguments are the same but for three.
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
SLIME=${SLIME:-/root/slime}
MODELS=${MODELS:-/root}
GPUS=${GPUS:-8}        # of the actor; the node's GPUs are its own
NODE=${NODE:?the address of the node as host:port, such as 10.0.0.7:8080}
ENGINES=${ENGINES:-$NODE} # what slime updates: the node, or the SGLang servers that the node samples from, with spaces between them

# slime has no place for the node's token: its HTTP client reads it from a netrc file
export NETRC=${NETRC:-$HOME/.netrc-polarnode}
(umask 077 && echo "machine ${NODE%:*} login slime password ${POLARNODE_TOKEN:?the token of the node}" > "$NETRC")

if [ -f "$SLIME/scripts/models/qwen3-4B.sh" ]; then
   source "$SLIME/scripts/models/qwen3-4B.sh" # MODEL_ARGS
else # miles
   MODEL_ARGS=($(python3 -c 'import runpy, sys; print(runpy.run_path(sys.argv[1])["model_args"]())' "$SLIME/scripts/models/qwen3-4B.py"))
fi

POLARNODE_ARGS=(
   --rollout-function-path polarnode.integrations.slime.generate_rollout
   --custom-reward-post-process-path polarnode.integrations.slime.reward_post_process
   --rollout-external-engine-addrs $ENGINES # slime's weight updates go there, over NCCL
)
ROLLOUT_ARGS=(
   --prompt-data "$HERE/tasks.jsonl"
   --input-key prompt
   --metadata-key metadata
   --rollout-shuffle
   --num-rollout 100
   --rollout-batch-size 16
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-temperature 1
   --rollout-max-response-len 32768
)
TRAIN_ARGS=(
   --hf-checkpoint "$MODELS/Qwen3-4B"
   --ref-load "$MODELS/Qwen3-4B_torch_dist"
   --save "$MODELS/Qwen3-4B_polarnode"
   --save-interval 20
   --actor-num-nodes 1
   --actor-num-gpus-per-node "$GPUS"
   --tensor-model-parallel-size 2
   --sequence-parallel
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
   --balance-data
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis # weigh tokens by the logprobs that the node recorded
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)

ENVIRONMENT=$(cat <<JSON
{"env_vars": {
  "PYTHONPATH": "/root/Megatron-LM/:$SLIME",
  "CUDA_DEVICE_MAX_CONNECTIONS": "1",
  "NETRC": "$NETRC",
  "POLARNODE_URL": "http://$NODE",
  "POLARNODE_TOKEN": "$POLARNODE_TOKEN",
  "POLARNODE_TASK": "$HERE/task.toml",
  "POLARNODE_RUN": "${POLARNODE_RUN:-qwen3-4b}"
}}
JSON
)

cd "$SLIME"
ray start --head --num-gpus "$GPUS" --disable-usage-stats
ray job submit --runtime-env-json="$ENVIRONMENT" -- python3 train.py \
   "${POLARNODE_ARGS[@]}" "${MODEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${TRAIN_ARGS[@]}" "$@"
