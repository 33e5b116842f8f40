# Sourced by the finetune_*.sh of every example, which set EXAMPLE (their folder), MODEL, HF_DIR, TP, PP, GRAD_ACC_STEP, DEVICES_PER_NODE and
# NNODES; the environment may override any of them but EXAMPLE, and give CP (ranks that share the tokens of a sample).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CUDA_DEVICE_MAX_CONNECTIONS=1
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
MBS=${MBS:-1}
CP=${CP:-1}
DATA=${DATA:-$EXAMPLE/data.json}
TOOLS=${TOOLS:-$EXAMPLE/tools.json}
LOAD=${LOAD:-$HF_DIR}
SAVE=${SAVE:-save_dir}

WORLD_SIZE=$((DEVICES_PER_NODE * NNODES))
if ((WORLD_SIZE % (TP * CP * PP))); then
    echo "$WORLD_SIZE devices cannot be split into TP $TP x CP $CP x PP $PP; change DEVICES_PER_NODE, NNODES, TP, CP or PP" >&2
    exit 2
fi
DP=$((WORLD_SIZE / (TP * CP * PP)))
GBS=$((MBS * GRAD_ACC_STEP * DP))

ARGS=(
    --mm-model "$MODEL" --mm-data "$DATA" --mm-tool "$TOOLS"
    --tensor-model-parallel-size "$TP" --context-parallel-size "$CP" --pipeline-model-parallel-size "$PP"
    --micro-batch-size "$MBS" --global-batch-size "$GBS" --seq-length 1024
    --train-iters 10000 --lr 1.0e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0 --clip-grad 0.0 --adam-beta1 0.9 --adam-beta2 0.999
    --seed 42 --bf16 --use-distributed-optimizer --distributed-timeout-minutes 20 --num-workers 8
    --load "$LOAD" --save "$SAVE" --save-interval 10000 --log-interval 1 --log-tps
    "$@"
)
# The same checks that training makes, before any device is taken.
WORLD_SIZE=$WORLD_SIZE tangram check "${ARGS[@]}"
[[ ${CHECK_ONLY:-0} == 1 ]] && exit 0
mkdir -p logs
torchrun --nproc_per_node "$DEVICES_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
    pretrain_vlm.py "${ARGS[@]}" 2>&1 | tee "logs/train_$(date +%Y%m%d_%H%M%S).log"
