#!/bin/bash
# LLaVA-1.5-7B: Hugging Face weights to an mp_rank directory. The environment may override any variable; further options can follow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
HF_DIR=${HF_DIR:-ckpt/hf_path/llava-1.5-7b-hf}
MM_DIR=${MM_DIR:-ckpt/mm_path/llava-1.5-7b}
TP=${TP:-1} LLM_PP=${LLM_PP:-[32]} VIT_PP=${VIT_PP:-[24]}
mm-convert LlavaConverter hf_to_mm --cfg.mm_dir "$MM_DIR" --cfg.hf_config.hf_dir "$HF_DIR" \
    --cfg.parallel_config.tp_size "$TP" --cfg.parallel_config.llm_pp_layers "$LLM_PP" --cfg.parallel_config.vit_pp_layers "$VIT_PP" "$@"
