"""Multi-adapter versions of `nn.Linear` and of AutoTP's linears.

Under ZeRO-3 a module's own hooks gather its weight before forward and before backward. What is
saved for backward is the parameter, not its data, so backward reads the gathered weight again.

Shapes: T rows, K features in, N features out, as this rank holds them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from torch import nn

from tlora_megatron.layers.attach import make_multi_adapter
from tlora_megatron.layers.linear import MultiLoRALinear, TensorParallel
from tlora_megatron.layers.multi_adapter import MultiAdapter
from tlora_megatron.ops.routing.segments import current_micro_batch


class _PlainMixin(MultiAdapter):
    """Overrides the forward of a whole linear: `[1, T, K]` to `[1, T, N]`, no collective."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = current_micro_batch()
        if view is None or self.tlora_branch.factors is None:
            return super().forward(x)  # type: ignore[misc]
        tp = TensorParallel(group=None, gather_input=False, reduce_dgrad=False)
        y = MultiLoRALinear.apply(x, self.weight, self.bias, self.tlora_branch, view, tp)
        return y.view(*x.shape[:-1], -1)


class _ColumnMixin(MultiAdapter):
    """Overrides AutoTP's column-parallel linear: x whole, y the rank's columns, dx all-reduced."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    mp_group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = current_micro_batch()
        if view is None or self.tlora_branch.factors is None:
            return super().forward(x)  # type: ignore[misc]
        tp = TensorParallel(group=self.mp_group, gather_input=False, reduce_dgrad=True)
        y = MultiLoRALinear.apply(x, self.weight, self.bias, self.tlora_branch, view, tp)
        return y.view(*x.shape[:-1], -1)


class _RowMixin(MultiAdapter):
    """Overrides AutoTP's row-parallel linear: x the rank's features, y all-reduced with the branch
    in it; no collective in backward."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    mp_group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = current_micro_batch()
        if view is None or self.tlora_branch.factors is None:
            return super().forward(x)  # type: ignore[misc]
        tp = TensorParallel(group=None, gather_input=False, reduce_dgrad=False)
        y = MultiLoRALinear.apply(x, self.weight, None, self.tlora_branch, view, tp)
        y = _ReduceForward.apply(y.view(*x.shape[:-1], -1), self.mp_group)
        return y if self.bias is None else y + self.bias


class _ReduceForward(torch.autograd.Function):
    """Sums over a group in forward; backward passes on.

    AutoTP's own loses the sum where its input is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        y = y.contiguous()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


_MIXINS: dict[type[nn.Module], type[MultiAdapter]] = {
    nn.Linear: _PlainMixin,
    LinearLayer: _ColumnMixin,
    LinearAllreduce: _RowMixin,
}


def prepare_linear(module: nn.Module) -> None:
    """Turns a linear that may carry adapters into a multi-adapter one, in place."""
    if not isinstance(module, MultiAdapter):
        make_multi_adapter(module, _MIXINS[type(module)])
