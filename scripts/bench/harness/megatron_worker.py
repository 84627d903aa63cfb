"""One rank of Megatron-LM's trainer under the flag: `megatron_worker.py pretrain_gpt.py ARGS`.

Does what `-m tlora_megatron.launch ARGS` does, but compiles nothing in the checkout: the trainer
would build the index of pre-training data, which jobs do not read. `TLORA_BENCH_ITERATION` may name
a function (`module:function`) that makes what stands between the trainer and the session: it gets
the session and what runs an iteration of it, and returns the iteration's result.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import typing
from pathlib import Path
from typing import Any

import torch

# Here already: a checkout has a folder `scripts` too.
from scripts.bench.harness.processes import ITERATION, wait_for_turn
from tlora_megatron import launch

_install_hooks = launch.install


def _install() -> None:
    """Installs the hooks, then what stands between, before anything of the trainer runs."""
    _install_hooks()
    between = os.environ.get(ITERATION)
    iteration = pkgutil.resolve_name(between)() if between else None
    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._compile_dependencies = lambda *_: None
    if iteration is not None:
        _put_between(iteration)
    importlib.import_module(Path(sys.argv[0]).stem)  # the script finds its imports done
    wait_for_turn()


def _put_between(iteration: Any) -> None:
    from tlora_megatron.integrations.megatron_lm.session import Session

    train_step = Session.train_step

    def watched(session: Any, run_step: Any) -> Any:
        return iteration(session, lambda: train_step(session, run_step))

    Session.train_step = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    if not hasattr(typing, "override"):  # from Python 3.12 on, which newer checkouts ask for
        typing.override = lambda method: method
    launch.install = _install
    has_device = torch.cuda.is_available() or "--cpu" in sys.argv
    launch.main([*([] if has_device else ["--cpu"]), *sys.argv[1:]])
