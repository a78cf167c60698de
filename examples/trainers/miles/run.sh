#!/bin/bash
# Train Qwen3-4B with miles on a polarnode node; docs/trainers/miles.md. Run it in miles' own container, with `pip install polarnode`.
# MILES is miles' checkout; MODELS, NODE, GPUS, ENGINES and POLARNODE_TOKEN are those of slime/run.sh.
set -euo pipefail

TP=${TP:-1} # of the node, which has one engine: polarnode --gpus 0-1 --tp 2 is TP=2
SLIME=${MILES:-/root/miles} exec "$(dirname "$0")/../slime/run.sh" \
   --rollout-external \
   --rollout-num-gpus "$TP" \
   --rollout-num-gpus-per-engine "$TP" \
   "$@"
