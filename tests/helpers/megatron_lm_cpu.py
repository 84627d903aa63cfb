"""Runs a script of a Megatron-LM checkout without CUDA: `megatron_lm_cpu.py SCRIPT ARGS`.

It is `tlora_megatron.launch --cpu` with what only tests want. The checkout is named by
MEGATRON_LM_PATH. `TLORA_PLAIN=1` runs the script as `python SCRIPT` would, with no hook;
`TLORA_KILL_AT=N` kills the processes when the trainer is about to take its N-th iteration;
`TLORA_WEIGHTS=1` draws weights that depend on their names and shapes only.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import runpy
import signal
import sys
import typing
import zlib
from pathlib import Path
from typing import Any

import torch

import tests.helpers  # noqa: F401  (here already: a checkout has a folder `tests`, too)


def main() -> None:
    prepare()
    from tlora_megatron.integrations.megatron_lm import cpu
    from tlora_megatron.launch import main as launch

    cpu.install()
    change_trainer()
    script, *words = sys.argv[1:]
    if os.environ.get("TLORA_PLAIN"):
        sys.argv = [script, *words, *cpu.FLAGS]
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
    else:
        launch(["--cpu", script, *words])


def prepare() -> None:
    if not hasattr(typing, "override"):  # from Python 3.12 on, which newer checkouts ask for
        typing.override = lambda method: method
    sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])


def change_trainer() -> None:
    training: Any = importlib.import_module("megatron.training.training")
    if os.environ.get("TLORA_WEIGHTS"):
        build = _with_named_weights(training.setup_model_and_optimizer)
        training.setup_model_and_optimizer = build
    if kill_at := int(os.environ.get("TLORA_KILL_AT") or 0):
        training.train_step = _until(kill_at, training.train_step)
        _wait_for_saves()


def _wait_for_saves() -> None:
    """Has the trainer's saves be on the disk when it goes on: what a kill leaves then repeats."""
    from tlora_megatron.integrations.megatron_lm.session import Session

    save = Session.save

    def save_and_wait(session: Session, iteration: int) -> None:
        save(session, iteration)
        session.loop.saves.drain()

    Session.save = save_and_wait


def _with_named_weights(set_up: Any) -> Any:
    @functools.wraps(set_up)
    def build(*args: Any, **kwargs: Any) -> Any:
        result = set_up(*args, **kwargs)
        with torch.no_grad():
            for name, weight in (pair for chunk in result[0] for pair in chunk.named_parameters()):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(weight.shape, generator=generator) * 0.1
                weight.copy_(noise + 1.0 if weight.dim() == 1 else noise)
        return result

    return build


def _until(count: int, train_step: Any) -> Any:
    calls = itertools.count(1)

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args, **kwargs)

    return step


if __name__ == "__main__":
    main()
