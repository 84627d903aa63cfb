#!/usr/bin/env bash
# Makes the virtual environment at ${TLORA_VENV:-./.venv} hold this project with the extras named, and prints the
# interpreter to use (the only line on stdout). Nothing is fetched when nothing is missing, so it is quick the second
# time and works without a network where all packages are there.
#
# usage: python=$(scripts/setup_env.sh EXTRA...)      extras stand in pyproject.toml
#   TLORA_VENV         the environment's folder
#   TLORA_BASE_PYTHON  interpreter it is made from; default: the first of python3, python3.13, ... that is >= 3.11
#   TLORA_TORCH        what to install as torch where there is no GPU; default torch==2.13.0. On a plain machine the
#                      default index may hold the (large) CUDA build: point pip at a CPU index to avoid it.
#   TLORA_MEGATRON     the same for megatron-core; default megatron-core==0.16.1, which does without triton
#   TLORA_TRITON       the same for triton, which the tests interpret; default triton==3.6.0
# With a GPU, a torch that the base interpreter can import already is used as it is, with its neighbours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=("$@")
venv=${TLORA_VENV:-.venv}
candidates=${TLORA_BASE_PYTHON:-python3 python3.13 python3.12 python3.11}
# Few retries, also in pip's own build environments: without a network they only cost time.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=${PIP_RETRIES:-1}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

base_python() {
  local name
  for name in $candidates; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      "$name" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  return 1
}

# A virtual environment made from another one does not see that one's packages, whatever --system-site-packages says;
# a .pth file naming the folders in which the base interpreter finds its packages does.
borrow_packages() {
  local base=$1 target
  target=$("$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$base" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$target/_base_interpreter.pth"
}

make_venv() {
  local base=$1 existed=""
  [[ -e $venv ]] && existed=yes
  say "making $venv from $base ($("$base" -V))"
  if ! "$base" -m venv "$venv" >&2; then
    [[ -n $existed ]] || rm -rf "$venv"  # half made; a folder that was there is not ours to delete
    return 1
  fi
  if has_gpu && "$base" -c 'import torch' >/dev/null 2>&1; then
    say "using the torch that $base has"
    borrow_packages "$base" "$venv/bin/python"
  fi
}

missing() { "$python" scripts/missing_requirements.py "${extras[@]}"; }

install() {
  local spec="." lacks=$1 pinned=()
  ((${#extras[@]})) && spec=".[$(IFS=,; echo "${extras[*]}")]"
  if ! has_gpu; then
    if grep -q '^torch' <<<"$lacks"; then pinned+=("${TLORA_TORCH:-torch==2.13.0}"); fi
    if grep -q '^megatron-core' <<<"$lacks"; then pinned+=("${TLORA_MEGATRON:-megatron-core==0.16.1}"); fi
    if grep -q '^triton' <<<"$lacks"; then pinned+=("${TLORA_TRITON:-triton==3.6.0}"); fi
  fi
  if ((${#pinned[@]})); then
    say "installing ${pinned[*]}"
    "$python" -m pip install -q "${pinned[@]}" >&2 || return 1
  fi
  if [[ $lacks == tlora-megatron ]] && "$python" scripts/missing_requirements.py --build-backend; then
    "$python" -m pip install -q --no-index --no-deps --no-build-isolation -e . >&2
  else
    say "installing $spec"
    "$python" -m pip install -q -e "$spec" >&2
  fi
}

if [[ -x $venv/bin/python ]]; then
  python=$venv/bin/python
else
  base=$(base_python) || die "Python must be 3.11 or newer, got none among: $candidates; name one with TLORA_BASE_PYTHON"
  if make_venv "$base"; then
    python=$venv/bin/python
  else
    say "$base cannot make virtual environments (Debian and Ubuntu: apt install python3-venv); trying it as it is"
    python=$base
  fi
fi
[[ $python == /* ]] || python=$PWD/$python

lacks=$(missing)
if [[ -n $lacks ]]; then
  install "$lacks" || say "pip could not install everything"
  lacks=$(missing)
  # The scripts put the repository on PYTHONPATH, so the project itself may stay uninstalled.
  if [[ $lacks == tlora-megatron ]]; then
    say "tlora-megatron is used from this folder without being installed: no 'tlora' command, use python -m tlora_megatron.cli"
  elif [[ -n $lacks ]]; then
    die "these packages are missing in $python: $(tr '\n' ' ' <<<"$lacks")"
  fi
fi
printf '%s\n' "$python"
