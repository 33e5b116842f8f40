#!/bin/bash
# Qwen3-VL-8B by FSDP2: 8 devices. Words that follow replace values of the run file: training.lr=2e-5
CONFIG=${CONFIG:-examples/qwen3vl/qwen3_vl_8b_fsdp2.yaml}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune_fsdp2.sh"
