#!/bin/bash
# Qwen3-VL-8B: 8 devices, TP 1 x PP 4 x DP 2, global batch 192.
EXAMPLE=examples/qwen3vl
MODEL=${MODEL:-$EXAMPLE/model_8b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen3-VL-8B-Instruct}
TP=${TP:-1} PP=${PP:-4} GRAD_ACC_STEP=${GRAD_ACC_STEP:-96} DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
