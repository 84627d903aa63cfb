"""Block-diagonal adapters beside the standard ones that compute the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.linear_case import Case
from tests.helpers.tiny_models import random_factors
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.model.spec import ModelSpec


def blocks(rank: int, num_blocks: int, **changes: Any) -> LoraSpec:
    return LoraSpec(rank=rank, parametrization="block_diagonal", num_blocks=num_blocks, **changes)


def dense_factors(
    lora: LoraSpec, factors: Mapping[str, Tensor]
) -> tuple[LoraSpec, dict[str, Tensor]]:
    """The standard adapter that computes the same: zeros around the blocks."""
    if not lora.is_block_diagonal:
        return lora, dict(factors)
    dense = {}
    for name, factor in factors.items():
        target, which = name.split(".")[2:]
        is_block = which == ("lora_a" if target in ("o_proj", "down_proj") else "lora_b")
        parts = factor.chunk(lora.num_blocks)
        dense[name] = torch.block_diag(*parts) if is_block else factor
    return dataclasses.replace(lora, parametrization="standard", num_blocks=1), dense


def against_dense(
    linear: str,
    loras: Sequence[LoraSpec],
    lengths: Sequence[int],
    *,
    spec: ModelSpec,
    training: bool,
    dtype: torch.dtype = torch.float32,
    **case: Any,
) -> dict[str, tuple[Tensor, Tensor]]:
    """A linear's y, dx and gradients, and the same of the standard adapters, in one shape.

    Args:
        lengths: rows of each adapter; a few rows more have none.
        **case: device and kernels, as `Case` takes them.
    """
    dense = [dataclasses.replace(x, parametrization="standard", num_blocks=1) for x in loras]
    ours = Case(linear, dtype, spec=spec, loras=loras, **case)
    theirs = Case(linear, dtype, spec=spec, loras=dense, **case)
    for slot, lora in enumerate(loras):
        factors = random_factors(spec, lora, seed=slot)
        ours.bank.adapters[slot].slab.load(factors.__getitem__)
        theirs.bank.adapters[slot].slab.load(dense_factors(lora, factors)[1].__getitem__)
        ours.bank.refresh(slot)
        theirs.bank.refresh(slot)
    theirs.weight, theirs.bias = ours.weight, ours.bias
    num_tokens = sum(lengths) + 9
    view = ours.view(lengths, num_tokens=num_tokens, training=training)
    x, dy = (ours.draw(num_tokens, 1, n) for n in (ours.site.in_size, ours.site.out_size))
    got, expected = ours.run(x, dy, view), theirs.run(x, dy, view)
    pairs = {name: (got[name], expected[name]) for name in ("y", "dx")}
    for adapter in ours.bank.adapters:
        for factor in adapter.slab.layout.factors:
            name = f"{adapter.name}.{factor.name}"
            pairs[name] = got[name], expected[name]
            if factor.num_blocks > 1:
                pairs[name] = factor.blocks(got[name]), factor.diagonal(expected[name])
    return pairs
