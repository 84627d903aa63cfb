"""Parallel linears of Megatron's that hold FP8 codes in the place of their weight.

`weight` is then a uint8 parameter that no `module.bfloat16()` converts, and `weight_scale` an fp32
buffer that it does not touch. Both lie in the state dict, and go where the module goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tlora_megatron.layers.linear import LinearLayout, frozen_linear
from tlora_megatron.ops.quantised.rows import GROUP
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.ops.quantised.weight_codes import Kind

_HELD = "tlora_codes"
_SCALE = "weight_scale"


def held_codes(linear: Any) -> QuantWeight | None:
    """Returns the codes and scales of a linear; None where it has a weight."""
    return linear.__dict__.get(_HELD)


class QuantisedLinearMixin(nn.Module):
    """A Column- or RowParallelLinear over codes; beneath a multi-adapter class, or without one.

    Relies on the same as `layers.multi_adapter.MegatronLinearMixin`.
    """

    def _forward_impl(
        self, input: Tensor, weight: Tensor, *, bias: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Does what Megatron's does with a frozen weight, collectives included."""
        layout = LinearLayout(
            group=kwargs.get("tp_group"),
            sequence_parallel=kwargs["sequence_parallel"],
            reduces_dgrad=kwargs["allreduce_dgrad"],
        )
        return frozen_linear(input, held_codes(self) or weight, bias, layout)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves codes and scales, but leaves the scales in fp32."""
        scales = self._buffers.pop(_SCALE)
        try:
            super()._apply(fn, recurse)
        finally:
            assert isinstance(scales, Tensor), "a quantised linear has scales"
            weight: Any = self.weight
            self._buffers[_SCALE] = scales.to(weight.device)
            _hold(self)
        return self


def quantise_in_place(linear: Any, kind: Kind, device: torch.device) -> None:
    """Gives a linear room for codes and scales in the place of its weight; nothing is set yet.

    Args:
        linear: with a weight on any device, also the meta device.
    """
    num_rows, num_columns = linear.weight.shape
    blocks = (-(-num_rows // GROUP), -(-num_columns // GROUP))
    attributes = linear.weight.__dict__
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=device)
    shape = (num_rows,) if kind == "channel" else blocks
    linear.weight = nn.Parameter(codes, requires_grad=False)
    linear.weight.__dict__.update(attributes)  # Megatron's notes about sharding
    linear.register_buffer(_SCALE, torch.empty(shape, dtype=torch.float32, device=device))
    base: Any = type(linear)
    linear.__class__ = _quantised_class(base)
    _hold(linear)


def quantised_linears(module: nn.Module) -> Iterator[tuple[str, QuantWeight]]:
    """Yields the name and the codes of every quantised linear below a module."""
    for name, linear in module.named_modules():
        if isinstance(linear, QuantisedLinearMixin):
            yield name, linear.__dict__[_HELD]


def _hold(linear: Any) -> None:
    """Makes the value that computes with the tensors; no attribute that torch would register."""
    held = QuantWeight(linear.weight.data, linear._buffers[_SCALE])
    object.__setattr__(linear, _HELD, held)


@functools.cache
def _quantised_class(base: Any) -> type[nn.Module]:
    return type(f"Quantised{base.__name__}", (QuantisedLinearMixin, base), {"__module__": __name__})
