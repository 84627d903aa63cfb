"""One rank of a life of the script: `worker.py pretrain_gpt.py ARGS`.

Does what `-m tlora_megatron.launch` does. `turns.Turns` stands between the trainer and the session,
and measures. Nothing is compiled in the checkout.
"""

from __future__ import annotations

import importlib
import sys
import typing
from typing import Any

import torch

import scripts.bench.flag_speed.cases  # noqa: F401 - a checkout has a folder `scripts` too
from tlora_megatron import launch


def _install() -> None:
    _install_hooks()
    from scripts.bench.flag_speed.turns import Turns
    from tlora_megatron.integrations.megatron_lm.session import Session

    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._compile_dependencies = lambda *_: None
    turns = Turns()
    train_step = Session.train_step

    def measured(session: Any, run_step: Any) -> Any:
        return turns.iteration(session, lambda: train_step(session, run_step))

    Session.train_step = measured  # type: ignore[method-assign]


_install_hooks = launch.install

if __name__ == "__main__":
    if not hasattr(typing, "override"):  # from Python 3.12 on, which newer checkouts ask for
        typing.override = lambda method: method
    launch.install = _install
    launch.main([*([] if torch.cuda.is_available() else ["--cpu"]), *sys.argv[1:]])
