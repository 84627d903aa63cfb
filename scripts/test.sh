#!/usr/bin/env bash
# Sets up the environment, then runs lint, types and the tests; every stage runs even if an earlier one failed.
#
# usage: scripts/test.sh [quick|all|gpu|vllm] [pytest arguments]
#   quick    lint, types and tests/unit without the slow ones
#   all      also further combinations of what is tested one by one, and what wants four cores
#   gpu      what needs one GPU, and nothing else; writes tests/gpu/last_run.json, which CI reads. Uses the
#            packages of python3 (or $TLORA_BASE_PYTHON) and wheels in .whl or ../shared/wheels; needs no network.
#            Behind the tests the smoke figures are measured, unless its first argument is --no-smoke
#   vllm     what asks the real vLLM that VLLM_COMMAND names (scripts/vllm_server.sh), and nothing else:
#            20 minutes on two cores, 10,000 samples while two servers are killed 20 times
#   -k NAME  and the like go to pytest; a stage in which they select nothing is passed over
#   TLORA_TEST_WORKERS   tests at a time; default: one a core, and one for waits, at most 8
#   TLORA_TEST_PATIENCE  factor on the limits that end what hangs; no test says anything about speed
#   TLORA_TEST_SEED      what tests draw their inputs by; default 0; "fresh" draws them anew and says how
# About 13 minutes on two idle cores, quick about one, gpu six on an H200.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=""
case ${1:-} in
  quick) quick=yes; shift ;;
  all) export TLORA_ALL_TESTS=1; shift ;;
esac

gpu_tests() {  # runs in this shell's place
  local python=${TLORA_BASE_PYTHON:-python3} packages=$PWD/build/gpu_packages wheels own=()
  if [[ ${1:-} == --no-smoke ]]; then own=(--no-smoke); shift; fi
  for wheels in .whl ../shared/wheels; do
    if compgen -G "$wheels/*.whl" >/dev/null && [[ ! -d $packages ]]; then
      "$python" -m pip install -q --no-index --no-deps --target "$packages" "$wheels"/*.whl || exit 1
    fi
  done
  export PYTHONPATH=$PWD:$packages${PYTHONPATH:+:$PYTHONPATH}
  export OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  exec "$python" -m scripts.gpu_tests ${TLORA_COMMIT:+--commit "$TLORA_COMMIT"} ${own[@]+"${own[@]}"} -- "$@"
}
if [[ ${1:-} == gpu ]]; then gpu_tests "${@:2}"; fi

select=("$@")
[[ -n $quick ]] && select+=(-m "not slow")

python=$(scripts/setup_env.sh test) || exit 1
# One thread a process: tests of several processes would otherwise fight for the cores.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE  # each process that a test starts would compile the package anew
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [[ ${1:-} == vllm ]]; then exec "$python" -m pytest -q tests/integration/test_real_vllm.py "${@:2}"; fi
cores=$(env -u OMP_NUM_THREADS nproc)  # nproc would repeat OMP_NUM_THREADS
workers=$((cores < 8 ? cores + 1 : 8))
[[ -n $quick ]] && workers=$((cores < 8 ? cores : 8))  # quick tests wait for nothing
workers=${TLORA_TEST_WORKERS:-$workers}
failed=() began=$SECONDS types=$(mktemp)

stage() {  # stage NAME COMMAND...
  local name=$1 start=$SECONDS status
  shift
  printf '\n== %s\n' "$name"
  # In the background: bash sees to Ctrl-C only when a command in the foreground has ended.
  "$@" &
  wait $!
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

stop() {
  local left
  left=$(jobs -pr)
  [[ -n $left ]] && kill $left
  rm -f "$types"
}
trap stop EXIT
trap 'exit 130' INT TERM

checked_types() {
  tail --pid="$mypy" -f /dev/null
  head -n -1 "$types"
  return "$(tail -n 1 "$types")"
}

tests() {  # tests NAME ARGUMENT...
  stage "$1" "$python" -m pytest -q --durations=25 "${@:2}" ${select[@]+"${select[@]}"}
}

# A file's tests share what its fixtures train, so a file stays with one worker.
spread=(-n "$workers" --dist loadfile --no-loadscope-reorder)
stage "ruff check" "$python" -m ruff check .
stage "ruff format" "$python" -m ruff format --check .
# Types are checked while the tests begin; what mypy says is shown behind them.
{ "$python" -m mypy; echo $?; } >"$types" 2>&1 &
mypy=$!
if [[ -n $quick ]]; then
  tests "tests/unit" "${spread[@]}" tests/unit
else
  tests "tests" "${spread[@]}" tests/unit tests/distributed tests/integration
fi
stage "mypy" checked_types
stage "record of the GPU tests" "$python" -m scripts.gpu_tests --status

printf '\n'
if ((${#failed[@]})); then
  printf 'FAILED after %d s:' $((SECONDS - began))
  printf ' [%s]' "${failed[@]}"
  printf '\n'
  exit 1
fi
printf 'all stages passed in %d s\n' $((SECONDS - began))
