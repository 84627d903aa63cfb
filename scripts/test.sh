#!/usr/bin/env bash
# Sets up the environment, then runs lint, types and the tests; every stage runs even if an earlier one failed.
#
# usage: scripts/test.sh [quick] [pytest arguments]
#   quick    lint, types and tests/unit without the slow ones
#   -k NAME  and the like go to pytest; a stage in which they select nothing is passed over
# About 20 minutes on two cores. Tests of GPUs run where there are GPUs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=""
if [[ ${1:-} == quick ]]; then quick=yes; shift; fi
select=("$@")
[[ -n $quick ]] && select+=(-m "not slow")

python=$(scripts/setup_env.sh test) || exit 1
# One thread a process: two-process tests on two cores would otherwise fight for them.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=() began=$SECONDS

stage() {  # stage NAME COMMAND...
  local name=$1 start=$SECONDS status
  shift
  printf '\n== %s\n' "$name"
  "$@"
  status=$?
  # 5: pytest found nothing to run, which is right when the caller narrowed the selection
  if [[ $status == 5 && ${#select[@]} -gt 0 ]]; then status=0; fi
  if [[ $status == 0 ]]; then
    printf '== %s: ok, %d s\n' "$name" $((SECONDS - start))
  else
    printf '== %s: FAILED (exit status %d), %d s\n' "$name" $status $((SECONDS - start))
    failed+=("$name")
  fi
}

tests() {  # tests SECONDS FOLDER: a deadlocked collective ends the stage instead of hanging it
  stage "$2" timeout --kill-after=20 "$1" "$python" -m pytest -q "$2" ${select[@]+"${select[@]}"}
}

stage "ruff check" "$python" -m ruff check .
stage "ruff format" "$python" -m ruff format --check .
stage "mypy" "$python" -m mypy
tests 900 tests/unit  # longer than the 600 s that its interpreting process may take
if [[ -z $quick ]]; then
  tests 1500 tests/distributed
  tests 900 tests/integration
  if command -v nvidia-smi >/dev/null 2>&1; then tests 900 tests/gpu; fi
fi

printf '\n'
if ((${#failed[@]})); then
  printf 'FAILED after %d s:' $((SECONDS - began))
  printf ' [%s]' "${failed[@]}"
  printf '\n'
  exit 1
fi
printf 'all stages passed in %d s\n' $((SECONDS - began))
