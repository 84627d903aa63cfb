#!/usr/bin/env bash
# Sets up the environment, then runs lint, types and the tests; every stage runs even if an earlier one failed.
#
# usage: scripts/test.sh [quick] [pytest arguments]
#   quick    lint, types and tests/unit without the slow ones
#   -k NAME  and the like go to pytest; a stage in which they select nothing is passed over
# About 20 minutes on two cores, quick about one. Tests of GPUs run where there are GPUs.
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
failed=() began=$SECONDS log=$(mktemp)

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

# Pytest runs in the background: timeout takes it out of the terminal's reach, and bash would see to Ctrl-C only when
# a command in the foreground has ended.
begin_pytest() {  # begin_pytest SECONDS ARGUMENT...: a deadlocked collective ends the stage instead of hanging it
  timeout --kill-after=20 "$1" "$python" -m pytest -q "${@:2}" ${select[@]+"${select[@]}"} &
}

run_pytest() {
  begin_pytest "$@"
  wait $!
}

stop() {
  local left
  left=$(jobs -pr)
  [[ -n $left ]] && kill $left
  rm -f "$log"
}
trap stop EXIT
trap 'exit 130' INT TERM

tests() {  # tests SECONDS FOLDER
  stage "$2" run_pytest "$@"
}

# Tests of one process each: every second file of them runs meanwhile.
half() {  # half COMMAND 0|1
  local files=(tests/unit/test_*.py) mine=() i
  for ((i = $2; i < ${#files[@]}; i += 2)); do mine+=("${files[i]}"); done
  # Longer than the 600 s that the interpreting process of test_triton_kernels.py may take.
  "$1" 900 -o cache_dir=".pytest_cache/$2" "${mine[@]}"
}

other_half() {
  local status
  wait "$other"
  status=$?
  cat "$log"
  return $status
}

unit_tests() {
  half begin_pytest 1 >"$log" 2>&1
  other=$!
  stage "tests/unit, one half" half run_pytest 0
  stage "tests/unit, the other half" other_half
}

stage "ruff check" "$python" -m ruff check .
stage "ruff format" "$python" -m ruff format --check .
stage "mypy" "$python" -m mypy
unit_tests
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
