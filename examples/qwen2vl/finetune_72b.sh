#!/bin/bash
# Qwen2-VL-72B: 4 nodes of 16 devices, TP 2 x PP 8 x DP 4, global batch 384. Set NODE_RANK and MASTER_ADDR on each node.
EXAMPLE=examples/qwen2vl
MODEL=${MODEL:-$EXAMPLE/model_72b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen2-VL-72B-Instruct}
TP=${TP:-2} PP=${PP:-8} GRAD_ACC_STEP=${GRAD_ACC_STEP:-96} DEVICES_PER_NODE=${DEVICES_PER_NODE:-16}
NNODES=${NNODES:-4}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
