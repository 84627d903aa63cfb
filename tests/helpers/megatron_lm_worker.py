"""Runs a script of a Megatron-LM checkout on this machine's GPU, or without one on the CPU.

`megatron_lm_worker.py SCRIPT ARGS` does what `tlora_megatron.launch` does, with what
`megatron_lm_cpu` adds for tests. Nothing is compiled in the checkout: the trainer would build the
index of pre-training data, which jobs do not read.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from tests.helpers import megatron_lm_cpu
from tlora_megatron import launch

_install_hooks = launch.install


def _install() -> None:
    _install_hooks()
    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._compile_dependencies = lambda *_: None
    megatron_lm_cpu.change_trainer()


if __name__ == "__main__":
    megatron_lm_cpu.prepare()
    launch.install = _install
    launch.main([*([] if torch.cuda.is_available() else ["--cpu"]), *sys.argv[1:]])
