#!/bin/bash
# LLaVA-1.5-7B by FSDP2: 8 devices. Words that follow replace values of the run file: training.lr=2e-5
CONFIG=${CONFIG:-examples/llava1.5/llava1_5_7b_fsdp2.yaml}
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../finetune_fsdp2.sh"
