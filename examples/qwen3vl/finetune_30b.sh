#!/bin/bash
# Qwen3-VL-30B-A3B: 2 nodes of 8 devices, TP 1 x PP 4 x DP 4, the 128 experts of a layer over the 4 copies, global batch 192. Set NODE_RANK and
# MASTER_ADDR on each node.
EXAMPLE=examples/qwen3vl
MODEL=${MODEL:-$EXAMPLE/model_30b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen3-VL-30B-A3B-Instruct}
TP=${TP:-1} PP=${PP:-4} EP=${EP:-4} GRAD_ACC_STEP=${GRAD_ACC_STEP:-48} DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NNODES=${NNODES:-2}
set -- --expert-model-parallel-size "$EP" --moe-token-dispatcher-type alltoall "$@"
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
