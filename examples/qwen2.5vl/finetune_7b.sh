#!/bin/bash
# Qwen2.5-VL-7B: 8 devices, TP 1 x PP 2 x DP 4, global batch 192.
EXAMPLE=examples/qwen2.5vl
MODEL=${MODEL:-$EXAMPLE/model_7b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen2.5-VL-7B-Instruct}
TP=${TP:-1} PP=${PP:-2} GRAD_ACC_STEP=${GRAD_ACC_STEP:-48} DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
