#!/usr/bin/env bash
# Trains four LoRA jobs together on the small base of configs/quickstart.yaml, then proves each exported adapter by
# loading it with Hugging Face PEFT and generating. Without a GPU: two processes, tensor parallel. With one GPU: one
# process in bf16. With more: two processes in bf16.
#
# usage: scripts/quickstart.sh [--keep] [tlora train arguments]
#        scripts/quickstart.sh --live [--steps N] [--port P] [--stay]
#   --live   serves the base and lets two clients train on it at once, OpenAI's and Tinker's, as PyPI has them; prints
#            the address of the service's page, and asks both adapters afterwards
#   --keep   continue or show what lies in runs/quickstart; without it that folder is moved to runs/quickstart.old
#            (which is deleted first) and training starts anew
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == --live ]]; then
  shift
  python=$(scripts/setup_env.sh train serve openai tinker)
  export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  exec "$python" scripts/quickstart_live.py "$@"
fi
keep=""
if [[ ${1:-} == --keep ]]; then keep=yes; shift; fi
out=runs/quickstart

python=$(scripts/setup_env.sh train verify)
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if [[ -z $keep && -e $out ]]; then
  rm -rf "$out.old"
  mv "$out" "$out.old"
  echo "moved the earlier $out to $out.old"
fi

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
case $gpus in
  0) layout=(--nproc 2) ;;
  1) layout=(--nproc 1 --set parallel.tp_size=1 --set base_model.dtype=bfloat16) ;;
  *) layout=(--nproc 2 --set base_model.dtype=bfloat16) ;;
esac

echo "+ tlora train configs/quickstart.yaml ${layout[*]} --output-dir $out $*"
"$python" -m tlora_megatron.cli train configs/quickstart.yaml "${layout[@]}" --output-dir "$out" "$@"
echo "+ python scripts/verify_adapters.py $out"
"$python" scripts/verify_adapters.py "$out"
