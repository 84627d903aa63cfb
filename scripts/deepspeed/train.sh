#!/usr/bin/env bash
# Trains two LoRA jobs together on the quickstart's base under DeepSpeed: ZeRO-3 over two processes, on GPUs or CPUs.
#
# usage: scripts/deepspeed/train.sh [CONFIG [arguments of tlora_megatron.deepspeed]]
#   CONFIG   a DeepSpeed JSON with a tlora section; configs/deepspeed/zero3.json by default
#   NPROC    processes on this machine; 2 by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
config=${1:-configs/deepspeed/zero3.json}
shift || true

python=$(scripts/setup_env.sh train deepspeed)
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

"$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-2}" \
  -m tlora_megatron.deepspeed --deepspeed_config "$config" "$@"
