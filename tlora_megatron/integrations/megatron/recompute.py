"""Lets routing survive activation checkpointing.

A region that is recomputed runs again during some other micro-batch's turn (always so under a
pipeline), when the bound micro-batch is another one or none. So the micro-batch is captured where
the region is checkpointed and restored where it is recomputed.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.tensor_parallel import random

from tlora_megatron.ops.routing import bind_current

_MARK = "_tlora_captures_routing"


def install() -> None:
    """Wraps Megatron's two checkpointing primitives, once a process.

    Covers `tensor_parallel.checkpoint` (full recompute) and `CheckpointWithoutOutput` (selective)
    at all call sites, and Transformer Engine's checkpoint, which Megatron takes under FP8.
    """
    _install_in_transformer_engine()
    if getattr(random, _MARK, False):
        return
    setattr(random, _MARK, True)
    forward = random.CheckpointFunction.forward

    def bound_forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, bind_current(run_function), *args)

    random.CheckpointFunction.forward = staticmethod(bound_forward)
    checkpoint = random.CheckpointWithoutOutput.checkpoint

    def bound_checkpoint(self: Any, run_function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self, bind_current(run_function), *args, **kwargs)

    random.CheckpointWithoutOutput.checkpoint = bound_checkpoint


def _install_in_transformer_engine() -> None:
    """Wraps the function that `te_checkpoint` imports whenever it is called."""
    try:
        distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    except ImportError:
        return
    if getattr(distributed, _MARK, False):
        return
    setattr(distributed, _MARK, True)
    checkpoint = distributed.checkpoint

    def bound_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(bind_current(function), *args, **kwargs)

    distributed.checkpoint = bound_checkpoint
