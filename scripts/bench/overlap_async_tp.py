"""PyTorch's async tensor-parallel operators in the place of a frozen decoder's linears.

They fuse a GEMM with the gathering before or the scattering behind it, so they need sequence
parallelism, and have no place for adapters: the base alone is timed, beside Megatron's frozen path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class GatherLinear(torch.autograd.Function):
    """`y = gather(x) W^T`, x `[T / n, 1, K]`, y `[T, 1, N / n]`; dx is scattered as it is made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor, group: str) -> torch.Tensor:
        ctx.save_for_backward(weight_NK)
        ctx.group = group
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        _, (y_TN,) = fused(x.flatten(0, -2), [weight_NK.t()], 0, group)
        return y_TN.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight_NK,) = ctx.saved_tensors
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        dx = fused(dy.flatten(0, -2).contiguous(), weight_NK, "sum", 0, ctx.group)
        return dx.unsqueeze(1), None, None


class LinearScatter(torch.autograd.Function):
    """`y = scatter(x W^T)`, x `[T, 1, K / n]`, y `[T / n, 1, N]`; dy is gathered as it is read."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor, group: str) -> torch.Tensor:
        ctx.save_for_backward(weight_NK)
        ctx.group = group
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        y = fused(x.flatten(0, -2).contiguous(), weight_NK.t(), "sum", 0, group)
        return y.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight_NK,) = ctx.saved_tensors
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        _, (dx_TK,) = fused(dy.flatten(0, -2).contiguous(), [weight_NK], 0, ctx.group)
        return dx_TK.unsqueeze(1), None, None


@contextlib.contextmanager
def async_tp(linears: list[tuple[Any, Any]], group: dist.ProcessGroup) -> Iterator[None]:
    """Has the decoder's linears (site, module) run so."""
    name = group.group_name
    if hasattr(torch.distributed, "_symmetric_memory"):
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(name)

    def forward_of(site: Any, module: Any) -> Any:
        function = GatherLinear if site.kind == "column" else LinearScatter
        return lambda x, *_, **__: (function.apply(x, module.weight, name), None)

    with contextlib.ExitStack() as patches:
        for site, module in linears:
            patches.enter_context(mock.patch.object(module, "forward", forward_of(site, module)))
        yield
