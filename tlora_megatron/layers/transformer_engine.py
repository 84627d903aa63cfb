"""Adapters on Transformer Engine's linears, whose product is computed here.

The module keeps weight, names and checkpoints, and its `forward` stays Transformer Engine's, with
the adapters around it. `product_vjp` computes the product alone from the weight: the norm that a
`TELayerNormColumnParallelLinear` begins with is its caller's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.linear import LinearLayout
from tlora_megatron.layers.multi_adapter import (
    BlackBoxMixin,
    LinearAdapters,
    product_adapters,
    product_vjp,
)
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.te_fp8 import computes_fp8, is_plain, te_base
from tlora_megatron.ops.frozen.parts import Vjp
from tlora_megatron.ops.quantised.rows import ONE_SCALE, OneScale
from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.lanes import Lane

_PACKAGE = __name__.partition(".")[0]
_BASES = {
    "TELayerNormColumnParallelLinear": "column",
    "TEColumnParallelLinear": "column",
    "TERowParallelLinear": "row",
}
"""Megatron's wrappers, by name: Transformer Engine may not be installed. Their `parallel_mode`."""


class TEProductMixin(BlackBoxMixin):
    """Adds the product without autograd to what `BlackBoxMixin` does.

    Inside an autocast to FP8 the base's GEMMs are Transformer Engine's (`layers.te_fp8`),
    otherwise ours. Relies on what `why_not_te_product` has seen: weights of the activations' dtype,
    and no communication inside the GEMMs.
    """

    config: Any
    """Megatron's `TransformerConfig`."""
    tlora_product: LinearAdapters
    """The adapters where the GEMM is ours; `tlora_adapters` has them where it is not."""

    def adapter_layout(self, site: Site) -> LinearLayout:
        """Returns how Transformer Engine made this linear parallel."""
        layout = super().adapter_layout(site)
        is_whole = site.kind == "column" and layout.tp_size > 1 and not layout.sequence_parallel
        return replace(layout, reduces_dgrad=is_whole)

    def bind_adapters(self, bank: AdapterBank, site: Site) -> None:
        """Makes a bank's adapters at a site this linear's, for both ways."""
        super().bind_adapters(bank, site)
        adapters = product_adapters(bank, site, self.adapter_layout(site))
        object.__setattr__(self, "tlora_product", adapters)

    def product_vjp(
        self, x: torch.Tensor, view: MicroBatchView, lane: Lane | None
    ) -> tuple[torch.Tensor, Vjp]:
        """Returns the product of `[T, K]` behind the norm, in two dimensions, and the way back."""
        linear: Any = self
        return product_vjp(te_base(linear), _bias(linear), self.tlora_product, x, view, lane)


def one_scale(linear: Any) -> OneScale | None:
    """Returns `ONE_SCALE` if the linear now quantises all its rows, which no other rank shares,
    with one scale."""
    if not (isinstance(linear, TEProductMixin) and linear.config.fp8 and computes_fp8()):
        return None
    is_alone = linear.config.fp8_recipe == "tensorwise" and not linear.config.sequence_parallel
    return ONE_SCALE if is_alone else None


def is_te_linear(linear: Any) -> bool:
    """True for Megatron's wrappers of Transformer Engine's parallel linears."""
    return _wrapper(linear) is not None


def why_not_te_product(linear: Any) -> str | None:
    """Returns why a linear of Transformer Engine must compute by itself; None if it need not."""
    name = _wrapper(linear)
    if name is None:
        return f"a {type(linear).__name__} is a linear of another kind"
    if linear.parallel_mode != _BASES[name]:
        return f"a {name} has parallel_mode {linear.parallel_mode}"
    if getattr(linear, "te_quant_params", None) is not None:
        return "a linear has quantisation settings of its own"
    in_fp8 = getattr(linear, "primary_weights_in_fp8", False) and linear.config.fp8
    if not (is_plain(linear.weight) or in_fp8):
        return f"weights are held as {type(linear.weight).__name__}"
    if linear.parallel_mode == "row" and _bias(linear) is not None:
        return "a row-parallel linear has a bias"
    if linear.te_return_bias:
        return "a bias is left to the caller"
    return None


def _wrapper(linear: Any) -> str | None:
    """The wrapper that a linear is, with or without adapters; None for classes made from one."""
    names = [c.__name__ for c in type(linear).__mro__ if c.__module__.split(".")[0] != _PACKAGE]
    return names[0] if names[0] in _BASES else None


def _bias(linear: Any) -> torch.Tensor | None:
    """Returns the bias; Transformer Engine has a tensor of length zero where there is none."""
    bias = linear.bias
    return None if bias is None or not bias.numel() else bias
