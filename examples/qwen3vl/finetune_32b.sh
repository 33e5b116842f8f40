#!/bin/bash
# Qwen3-VL-32B: 2 nodes of 8 devices, TP 2 x PP 8 x DP 1, global batch 96. Set NODE_RANK and MASTER_ADDR on each node.
EXAMPLE=examples/qwen3vl
MODEL=${MODEL:-$EXAMPLE/model_32b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen3-VL-32B-Instruct}
TP=${TP:-2} PP=${PP:-8} GRAD_ACC_STEP=${GRAD_ACC_STEP:-96} DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NNODES=${NNODES:-2}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
