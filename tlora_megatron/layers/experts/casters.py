"""Casts master weights on routed experts into their arenas at once, where kernels do so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tlora_megatron.layers.slab import AdapterSlab, StatePlacement
from tlora_megatron.ops.lora.kernel_choice import runs_triton


class Caster(Protocol):
    """Writes one adapter's factors on routed experts into the arenas."""

    def write(self, master_N: Tensor) -> Tensor:
        """Writes master weights, rounded; returns fp32 `[]`: 0, or NaN where one is not finite."""
        ...


def expert_caster(slab: AdapterSlab, views: Sequence[Tensor]) -> Caster | None:
    """Returns the caster of an adapter; None if it has no factors on experts, or torch copies them.

    Args:
        views: of its factors in the compute dtype, in its slab's order.
    """
    layout = slab.layout
    if layout.lora.shares_outer or slab.placement != StatePlacement():
        return None
    pairs = [
        (factor.offset, view)
        for factor, view in zip(layout.factors, views, strict=True)
        if factor.experts is not None
    ]
    half = (torch.bfloat16, torch.float16)
    if not pairs or pairs[0][1].dtype not in half or not runs_triton(pairs[0][1]):
        return None
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.experts.triton_sums import CastFactor, FactorCaster

    return FactorCaster([CastFactor(*pair) for pair in pairs])
