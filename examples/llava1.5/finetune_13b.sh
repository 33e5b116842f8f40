#!/bin/bash
# LLaVA-1.5-13B: 8 devices, TP 1 x PP 2 x DP 4, global batch 128, as in LLaVA's own instruction tuning.
EXAMPLE=examples/llava1.5
MODEL=${MODEL:-$EXAMPLE/model_13b.json}
HF_DIR=${HF_DIR:-ckpt/hf_path/llava-1.5-13b-hf}
TP=${TP:-1} PP=${PP:-2} GRAD_ACC_STEP=${GRAD_ACC_STEP:-32} DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune.sh"
