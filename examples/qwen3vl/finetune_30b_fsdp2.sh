#!/bin/bash
# Qwen3-VL-30B-A3B by FSDP2: 16 devices, 2 nodes. Words that follow replace values of the run file: training.lr=2e-5
CONFIG=${CONFIG:-examples/qwen3vl/qwen3_vl_30b_fsdp2.yaml}
NNODES=${NNODES:-2}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune_fsdp2.sh"
