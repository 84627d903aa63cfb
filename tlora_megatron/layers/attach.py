"""Turns existing parallel linears into multi-adapter ones, in place.

A module keeps its parameters, state-dict keys, hooks and `isinstance` answers: only its class is
replaced by a subclass made from it, and its branch hangs on it outside module registration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import AdapterBranch, MultiLoRALinear, TensorParallel
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.segments import current_micro_batch


class MultiAdapter:
    """What every kind of multi-adapter linear is."""

    tlora_branch: AdapterBranch


class MultiAdapterMixin(MultiAdapter):
    """Overrides the GEMM of Megatron's Column- and RowParallelLinear; their reductions stay theirs.

    Relies on `_forward_impl(input, weight, *, bias, allreduce_dgrad, sequence_parallel, tp_group,
    ...)`, which both classes call with keywords in megatron-core 0.16 to 0.19.
    """

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        view = current_micro_batch()
        if view is None or self.tlora_branch.factors is None:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        tp = TensorParallel(
            group=kwargs.get("tp_group"),
            gather_input=kwargs["sequence_parallel"],
            reduce_dgrad=kwargs["allreduce_dgrad"],
        )
        return MultiLoRALinear.apply(input, weight, kwargs.get("bias"), self.tlora_branch, view, tp)


@functools.cache
def _multi_adapter_class(mixin: Any, base: Any) -> type[nn.Module]:
    return type(f"MultiLoRA{base.__name__}", (mixin, base), {"__module__": __name__})


def make_multi_adapter(module: nn.Module, mixin: type[MultiAdapter] = MultiAdapterMixin) -> None:
    """Turns a linear into a multi-adapter one, in place; one that is one already stays as it is."""
    if not isinstance(module, MultiAdapter):
        parts: list[Any] = [mixin, type(module)]
        module.__class__ = _multi_adapter_class(*parts)


def attach(linears: Iterable[tuple[Site, nn.Module]], bank: AdapterBank) -> None:
    """Gives every linear its branch; attaching the same linear again replaces its branch.

    What is not a multi-adapter linear yet is taken for one of Megatron's.
    """
    for site, module in linears:
        make_multi_adapter(module)
        object.__setattr__(module, "tlora_branch", AdapterBranch(bank, site))
