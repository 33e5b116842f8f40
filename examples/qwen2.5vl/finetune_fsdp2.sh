#!/bin/bash
# Qwen2.5-VL-3B by FSDP2: 8 devices. Words that follow replace values of the run file: training.lr=2e-5
CONFIG=${CONFIG:-examples/qwen2.5vl/qwen2_5_vl_3b_fsdp2.yaml}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune_fsdp2.sh"
