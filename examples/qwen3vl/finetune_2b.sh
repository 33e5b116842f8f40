#!/bin/bash
# Qwen3-VL-2B: 8 devices, TP 1 x PP 1 x DP 8, global batch 256.
EXAMPLE=examples/qwen3vl
MODEL=${MODEL:-$EXAMPLE/model_2b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen3-VL-2B-Instruct}
TP=${TP:-1} PP=${PP:-1} GRAD_ACC_STEP=${GRAD_ACC_STEP:-32} DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
