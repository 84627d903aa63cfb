#!/usr/bin/env bash
# Trains the jobs of configs/megatron/jobs.yaml together on Llama-3.1-70B, on two nodes of eight GPUs or more: tensor
# parallel inside a node, data parallel across. Run it on every node; HF_MODEL, CHECKPOINT, JOBS, their data and
# OUT must lie where all nodes see them.
#
# usage, on every node N from 0:
#   NODE_RANK=N NNODES=2 RDZV_ENDPOINT=first-node:29500 HF_MODEL=/shared/Llama-3.1-70B MEGATRON_LM=/shared/Megatron-LM \
#     scripts/megatron/finetune_llama3_70b_multinode.sh
# PP=2 cuts the layers across nodes instead. All variables and DRY_RUN=1: scripts/megatron/finetune.sh
set -euo pipefail
: "${RDZV_ENDPOINT:?must be HOST:PORT of one of the nodes}"
export RDZV_ENDPOINT NNODES=${NNODES:-2} TP=${TP:-8} SEQ_LENGTH=${SEQ_LENGTH:-4096}
exec "$(dirname "${BASH_SOURCE[0]}")/finetune.sh" "$@"
