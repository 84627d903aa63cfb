"""One rank of a layout on a GPU: `worker.py SCRIPT ARGS`.

Does what `-m tlora_megatron.launch SCRIPT ARGS` does, but compiles nothing in the checkout: the
trainer would build the index of pre-training data, which jobs do not read.
"""

from __future__ import annotations

import importlib
from typing import Any

from tlora_megatron import launch


def _install() -> None:
    _install_hooks()
    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._compile_dependencies = lambda: None


_install_hooks = launch.install

if __name__ == "__main__":
    launch.install = _install
    launch.main()
