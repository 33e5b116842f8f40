#!/bin/bash
# LLaVA-1.5-7B: 8 devices, TP 1 x PP 1 x DP 8, global batch 128, as in LLaVA's own instruction tuning.
EXAMPLE=examples/llava1.5
MODEL=${MODEL:-$EXAMPLE/model_7b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/llava-1.5-7b-hf}
TP=${TP:-1} PP=${PP:-1} GRAD_ACC_STEP=${GRAD_ACC_STEP:-16} DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
