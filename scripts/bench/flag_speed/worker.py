"""One rank of a life of the script: `worker.py pretrain_gpt.py ARGS`.

Does what `-m tlora_megatron.launch` does. `turns.Turns` stands between the trainer and the session,
and measures. Nothing is compiled in the checkout.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def _start_on_cpu() -> None:
    from tests.helpers import megatron_lm_cpu

    sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])
    megatron_lm_cpu.install()


def _install() -> None:
    from scripts.bench.flag_speed.turns import Turns
    from tlora_megatron.integrations.megatron_lm.session import Session

    _install_hooks()
    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._compile_dependencies = lambda *_: None
    turns = Turns()
    train_step = Session.train_step

    def measured(session: Any, run_step: Any) -> Any:
        return turns.iteration(session, lambda: train_step(session, run_step))

    Session.train_step = measured  # type: ignore[method-assign]


if __name__ == "__main__":
    import torch

    if not torch.cuda.is_available():
        _start_on_cpu()
    from tlora_megatron import launch

    _install_hooks = launch.install
    launch.install = _install
    launch.main()
