#!/usr/bin/env bash
# Trains the jobs of configs/megatron/jobs.yaml together on Llama-3.1-8B, on one node; every GPU holds the model.
#
# usage: HF_MODEL=~/models/Llama-3.1-8B MEGATRON_LM=~/Megatron-LM scripts/megatron/finetune_llama3_8b.sh
#        TP=2 JOBS=my_jobs.yaml ... scripts/megatron/finetune_llama3_8b.sh --recompute-granularity selective
# All variables and DRY_RUN=1: scripts/megatron/finetune.sh
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/finetune.sh" "$@"
