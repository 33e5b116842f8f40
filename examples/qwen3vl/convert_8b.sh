#!/bin/bash
# Qwen3-VL-8B: TP 1 x PP 4. First argument: hf_to_mm (the default) or mm_to_hf; mm-convert's options can follow.
HF_DIR=${HF_DIR:-ckpt/hf_path/Qwen3-VL-8B-Instruct}
MM_DIR=${MM_DIR:-ckpt/mm_path/Qwen3-VL-8B-Instruct}
TP=${TP:-1} EP=${EP:-1} LLM_PP=${LLM_PP:-[6,10,10,10]} VIT_PP=${VIT_PP:-[27,0,0,0]}
source "$(dirname "${BASH_SOURCE[0]}")/convert.sh"
