#!/usr/bin/env bash
# Trains many LoRA jobs on one frozen model with Megatron-LM's own pretrain_gpt.py, from Hugging Face weights:
# converts them once (tlora convert), then starts this node's ranks with torchrun. The scripts beside this one
# set its variables for a model; on several nodes every node runs the same command.
#
# usage: HF_MODEL=DIR MEGATRON_LM=DIR [VARIABLE=VALUE]... scripts/megatron/finetune.sh [MEGATRON ARGUMENTS]
#   arguments go to pretrain_gpt.py behind all others, so that they win: --recompute-granularity selective, ...
#   relative paths start at this repository
#
#   HF_MODEL         Hugging Face model: config.json, safetensors, tokenizer
#   MEGATRON_LM      Megatron-LM checkout, core_v0.16.1 to main
#   CHECKPOINT       where the converted model lies or is written       checkpoints/NAME OF HF_MODEL
#   JOBS             configuration of the jobs                          configs/megatron/jobs.yaml
#   OUT              results; the same folder again continues           runs/NAME OF HF_MODEL
#   TP PP CP         tensor, pipeline, context parallel sizes           1 1 1
#   TRANSFORMER_IMPL transformer_engine, or local, which needs none     local
#   SEQ_LENGTH       tokens of a packed micro-batch                     8192
#   MICRO_BATCHES    micro-batches an iteration and data-parallel rank  4
#   TRAIN_ITERS      the most iterations; jobs end by themselves before 100000
#   SAVE_INTERVAL    iterations between the jobs' checkpoints           100
#   GPUS_PER_NODE    ranks of this node                                 its GPUs
#   NNODES           nodes; over 1 also RDZV_ENDPOINT                   1
#   RDZV_ENDPOINT    HOST:PORT of one of the nodes, free there
#   RDZV_ID          name of this run, the same on all nodes            finetune
#   NODE_RANK        the node with 0 converts, the others wait          SLURM_NODEID, or 0
#   MAX_RESTARTS     times that torchrun restarts all ranks             0
#   DRY_RUN=1        print the commands, a word a line, and run none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

: "${HF_MODEL:?must name a Hugging Face model directory}" "${MEGATRON_LM:?must name a Megatron-LM checkout}"
name=$(basename "$HF_MODEL")
checkpoint=${CHECKPOINT:-checkpoints/$name} jobs=${JOBS:-configs/megatron/jobs.yaml} out=${OUT:-runs/$name}
tp=${TP:-1} pp=${PP:-1} cp=${CP:-1} nnodes=${NNODES:-1} node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# torchrun passes SIGUSR1 on (SLURM's --signal), waits until the jobs are saved (torch 2.12 and later; 30 s before), and
# leaves no empty folders in /tmp.
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240} PET_LOG_DIR=${PET_LOG_DIR:-/dev/null}
# Megatron-LM asks for it with TP or CP over 1; with nano-batches the launcher takes 32 in its place.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

for path in "$HF_MODEL/config.json" "$MEGATRON_LM/pretrain_gpt.py" "$jobs"; do
  [[ -f $path ]] || { echo "error: $path must be an existing file" >&2; exit 2; }
done

gpus=${GPUS_PER_NODE:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
((gpus > 0)) || { echo "error: GPUS_PER_NODE must be at least 1, got $gpus" >&2; exit 2; }
world=$((nnodes * gpus)) model=$((tp * pp * cp)) dp=$((nnodes * gpus / (tp * pp * cp)))
((dp * model == world)) || { echo "error: NNODES * GPUS_PER_NODE must be a multiple of TP * PP * CP = $model, got $world" >&2; exit 2; }

# The tracker comes with the complete checkpoint, in one rename.
is_converted() { [[ -f $checkpoint/latest_checkpointed_iteration.txt ]]; }
convert=("$python" -m tlora_megatron.cli convert "$HF_MODEL" "$checkpoint")
if [[ -n ${DRY_RUN:-} ]]; then
  is_converted || printf '%s\n' "${convert[@]}" ""
elif ! is_converted && ((node_rank == 0)); then
  "${convert[@]}"
fi
if [[ -n ${DRY_RUN:-} ]] && ! is_converted; then
  words=$("${convert[@]}" --dry-run --json | "$python" -c 'import json, sys; print(*json.load(sys.stdin)["flags"], sep="\n")')
else
  for ((waited = 0; waited < 7200; waited += 10)); do
    is_converted && break
    echo "waiting for node 0 to convert $HF_MODEL"
    sleep 10
  done
  words=$(<"$checkpoint/model_flags.txt")
fi
mapfile -t model_flags <<<"$words"

agent=(--nnodes "$nnodes" --nproc-per-node "$gpus" --max-restarts "${MAX_RESTARTS:-0}")
if ((nnodes == 1)); then
  agent+=(--standalone)
else
  : "${RDZV_ENDPOINT:?must be HOST:PORT of one of the nodes, for NNODES over 1}"
  agent+=(--rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-finetune}")
fi

training=(
  --load "$checkpoint" --exit-on-missing-checkpoint --save "$out" --save-interval "${SAVE_INTERVAL:-100}" --bf16
  --tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp" --context-parallel-size "$cp"
  --seq-length "${SEQ_LENGTH:-8192}" --micro-batch-size 1
  --global-batch-size "$((dp * ${MICRO_BATCHES:-4}))" --train-iters "${TRAIN_ITERS:-100000}"
  --transformer-impl "${TRANSFORMER_IMPL:-local}" --log-interval 1 --eval-iters 0
)
((tp > 1)) && training+=(--sequence-parallel)
if [[ ${TRANSFORMER_IMPL:-local} == local ]]; then
  # These belong to Transformer Engine or apex.
  training+=(--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion)
fi

command=(
  "$python" -m torch.distributed.run "${agent[@]}" -m tlora_megatron.launch "$MEGATRON_LM/pretrain_gpt.py"
  "${model_flags[@]}" "${training[@]}" --tlora-config "$jobs" "$@"
)
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%s\n' "${command[@]}"
else
  exec "${command[@]}"
fi
