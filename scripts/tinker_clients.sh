#!/usr/bin/env bash
# Makes interpreters with other clients of Tinker's protocol, for the tests marked old_tinker and cookbook:
#   scripts/tinker_clients.sh DIR    then run with TINKER_OLD_PYTHON=DIR/old/bin/python COOKBOOK_PYTHON=DIR/cookbook/bin/python
# They see what this interpreter has (PYTHON, python by default), beneath what is installed for them.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python}
below=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

make() { # NAME PIP_ARGUMENTS...
    local name=$1
    shift
    "$python" -m venv --without-pip "$folder/$name"
    local site
    site=$("$folder/$name/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$below" > "$site/below.pth"
    "$python" -m pip --python "$folder/$name/bin/python" install --quiet "$@"
}

make old --no-deps --ignore-installed tinker==0.25.0
# It asks for a newer tml-renderers than there is, which only models of Thinking Machines need.
make cookbook --no-deps tinker-cookbook==0.6.1
"$python" -m pip --python "$folder/cookbook/bin/python" install --quiet tinker==0.38.0 aiohttp blobfile chz cloudpickle datasets \
    math-verify pillow pylatexenc pyrage sympy termcolor textarena tiktoken tml-renderers
