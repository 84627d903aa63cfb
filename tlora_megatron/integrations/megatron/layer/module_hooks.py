"""Finds hooks on modules and on saved tensors; code that calls no module's forward asks first."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as registry

_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def does_more(module: nn.Module) -> bool:
    """Returns True if calling a module does more than its class's `forward`."""
    return hangs_on(module) or hangs_on_all()


def hangs_on(module: nn.Module) -> bool:
    """Returns True if the module has hooks, another `forward` or a compiled one (`compile()`)."""
    # Spelled out: ten modules a layer are asked in each micro-batch, while a GPU may wait.
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or own.get("_compiled_call_impl")
    )


def hangs_on_all() -> bool:
    """Returns True if all modules have hooks (`register_module_forward_hook` and its like)."""
    return bool(
        registry._global_forward_hooks
        or registry._global_forward_pre_hooks
        or registry._global_backward_hooks
        or registry._global_backward_pre_hooks
    )


def packs_saved_tensors() -> bool:
    """Returns True if tensors that autograd saves go through hooks.

    That is so under `saved_tensors_hooks`, `save_on_cpu`, a checkpoint that does not re-enter, and
    Megatron's activation offloading.
    """
    return _saved_tensors_hooks(True) is not None
