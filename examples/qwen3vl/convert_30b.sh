#!/bin/bash
# Qwen3-VL-30B-A3B: TP 2 x PP 4 x EP 2. First argument: hf_to_mm (the default) or mm_to_hf; mm-convert's options can follow.
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen3-VL-30B-A3B-Instruct}
MM_DIR=${MM_DIR:-ckpt/mm_path/Qwen3-VL-30B-A3B-Instruct}
TP=${TP:-2} EP=${EP:-2} LLM_PP=${LLM_PP:-[6,14,14,14]} VIT_PP=${VIT_PP:-[27,0,0,0]}
source "$(dirname "${BASH_SOURCE[0]}")/convert.sh"
