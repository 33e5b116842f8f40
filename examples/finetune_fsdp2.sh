# Sourced by the finetune*_fsdp2.sh of every example, which set CONFIG (the run file) and NNODES; the environment may override both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DEVICES_PER_NODE=${DEVICES_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
WORLD_SIZE=$((DEVICES_PER_NODE * NNODES))

# The same checks that training makes, before any device is taken.
tangram check --world-size "$WORLD_SIZE" "$CONFIG" "$@"
[[ ${CHECK_ONLY:-0} == 1 ]] && exit 0
mkdir -p logs
torchrun --nproc_per_node "$DEVICES_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
    tangram/backends/fsdp2/trainer.py "$CONFIG" "$@" 2>&1 | tee "logs/train_$(date +%Y%m%d_%H%M%S).log"
