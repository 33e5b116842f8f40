#!/bin/bash
# Qwen3-VL-4B: 8 devices, TP 1 x PP 2 x DP 4, global batch 192.
EXAMPLE=examples/qwen3vl
MODEL=${MODEL:-$EXAMPLE/model_4b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen3-VL-4B-Instruct}
TP=${TP:-1} PP=${PP:-2} GRAD_ACC_STEP=${GRAD_ACC_STEP:-48} DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
