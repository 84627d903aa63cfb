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
from tlora_megatron.layers.linear import computes_base, multi_lora_linear
from tlora_megatron.layers.linear_layout import LinearLayout
from tlora_megatron.layers.multi_adapter import MultiAdapter
from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.routing import current_micro_batch


class _LinearMixin(MultiAdapter):
    """The part that the mixins have in common: this rank's GEMM."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Returns this rank's GEMM with the adapters in it; None where there are none."""
        view = current_micro_batch()
        if view is None:
            return None
        gemm = self.tlora_adapters.gemm
        if gemm is None or not computes_base(gemm, view):
            return None
        return multi_lora_linear(x, self.weight, bias, gemm, view)


class PlainLinearMixin(_LinearMixin):
    """Overrides the forward of a whole linear: `[1, T, K]` to `[1, T, N]`, no collective."""

    def adapter_layout(self, site: Site) -> LinearLayout:
        """Returns the layout of one rank."""
        return LinearLayout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x, self.bias)
        return super().forward(x) if product is None else product  # type: ignore[misc]


class ColumnLinearMixin(PlainLinearMixin):
    """Overrides AutoTP's column-parallel linear: x whole, y the rank's columns, dx all-reduced."""

    mp_group: dist.ProcessGroup

    def adapter_layout(self, site: Site) -> LinearLayout:
        """Returns the layout over AutoTP's group."""
        return LinearLayout(
            kind="column", group=self.mp_group, tp_size=site.tp_size, reduces_dgrad=True
        )


class RowLinearMixin(_LinearMixin):
    """Overrides AutoTP's row-parallel linear: x the rank's features, y all-reduced with the branch
    in it; no collective in backward."""

    mp_group: dist.ProcessGroup

    def adapter_layout(self, site: Site) -> LinearLayout:
        """Returns the layout over AutoTP's group."""
        return LinearLayout(kind="row", group=self.mp_group, tp_size=site.tp_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x, None)
        if product is None:
            return super().forward(x)  # type: ignore[misc]
        y: torch.Tensor = _ReduceForward.apply(product, self.mp_group)
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
    nn.Linear: PlainLinearMixin,
    LinearLayer: ColumnLinearMixin,
    LinearAllreduce: RowLinearMixin,
}


def prepare_linear(module: nn.Module) -> None:
    """Turns a linear that may carry adapters into a multi-adapter one, in place."""
    if not isinstance(module, MultiAdapter):
        make_multi_adapter(module, _MIXINS[type(module)])
