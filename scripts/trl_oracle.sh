#!/usr/bin/env bash
# Makes an interpreter with TRL, for the tests marked trl and those of tests/distributed/test_preference.py that train with it:
#   scripts/trl_oracle.sh DIR    then run with TRL_PYTHON=DIR/bin/python
# It sees what this interpreter has (PYTHON, python by default), beneath what is installed for it.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python}
"$python" -m venv --without-pip "$folder"
purelib='import sysconfig; print(sysconfig.get_paths()["purelib"])'
"$python" -c "$purelib" > "$("$folder/bin/python" -c "$purelib")/below.pth"
"$python" -m pip --python "$folder/bin/python" install --quiet --no-deps trl==1.16.0 datasets dill multiprocess pandas pyarrow xxhash
