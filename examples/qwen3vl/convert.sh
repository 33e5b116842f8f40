# Sourced by convert_*.sh, which set HF_DIR, MM_DIR, TP, EP, LLM_PP and VIT_PP; the environment may override any of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

COMMAND=${1:-hf_to_mm}
shift || true
SAVE_HF_DIR=${SAVE_HF_DIR:-$MM_DIR-hf}
ARGS=(
    --cfg.mm_dir "$MM_DIR" --cfg.hf_config.hf_dir "$HF_DIR"
    --cfg.parallel_config.tp_size "$TP" --cfg.parallel_config.ep_size "$EP"
    --cfg.parallel_config.llm_pp_layers "$LLM_PP" --cfg.parallel_config.vit_pp_layers "$VIT_PP"
)
[[ $COMMAND == mm_to_hf ]] && ARGS+=(--cfg.save_hf_dir "$SAVE_HF_DIR")
mm-convert Qwen3VLConverter "$COMMAND" "${ARGS[@]}" "$@"
