"""Linears of routed experts, computed by what is fastest here.

On Hopper in bfloat16 one GEMM of our own computes base and adapters. Elsewhere the base's products
are `ops.experts.branch`, with the adapters' added by Triton kernels on GPUs, by torch on others.

Shapes: L experts, Q rows, K features in, N features out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import (
    ExpertFactors,
    ExpertOps,
    ExpertRuns,
    PlacedRows,
    TorchExpertOps,
    expert_dgrads,
    expert_products,
)
from tlora_megatron.ops.lora.kernel_choice import forced_kernels, kernel_choice, runs_triton

InputSums = Callable[[PlacedRows], None]


def expert_linear(
    x_QK: Tensor,
    weight_LNK: Tensor,
    runs: ExpertRuns,
    factors: ExpertFactors | None,
    source: PlacedRows | None = None,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns `x W_e^T` with the adapters' outputs `[Q, N]`, and what their backward needs.

    Args:
        source: what x was spread from, which takes adapters less time to read.
    """
    whole, x = _cuda_ops(x_QK, weight_LNK), _read_at(source, x_QK)
    if whole is not None:
        return whole.product(x_QK, x, weight_LNK, runs, factors)
    y_QN = expert_products(x_QK, weight_LNK, runs.counts_L)
    return y_QN, () if factors is None else expert_ops(x_QK).forward(x, y_QN, runs, factors)


def expert_linear_dgrad(
    dy_QN: Tensor,
    weight_LNK: Tensor,
    saved: Sequence[Tensor],
    runs: ExpertRuns,
    factors: ExpertFactors | None,
    source: PlacedRows | None = None,
) -> tuple[Tensor, InputSums | None]:
    """Returns dx `[Q, K]`, and adds to gradients of B.

    The second value is None without adapters, else to be called with what `expert_linear` was
    given: it adds to gradients of A.

    Args:
        saved: from `expert_linear`.
        source: what dy was spread from.
    """
    whole, dy = _cuda_ops(dy_QN, weight_LNK), _read_at(source, dy_QN)
    if factors is not None and not saved:
        factors = None
    if whole is not None:
        dx_QK, ds = whole.dgrad(dy_QN, dy, weight_LNK, saved, runs, factors)
    else:
        dx_QK, ds = expert_dgrads(dy_QN, weight_LNK, runs.counts_L), ()
        if factors is not None:
            ds = expert_ops(dy_QN).input_backward(dy, dx_QK, saved, runs, factors)
    if factors is None:
        return dx_QK, None
    given, ops = factors, expert_ops(dy_QN) if whole is None else whole
    return dx_QK, lambda x: ops.input_sums(ds, x, runs, given)


def expert_ops(x: Tensor) -> ExpertOps:
    """Returns kernels where a GPU computes in half precision, else torch's products."""
    return _triton_ops() if runs_kernels(x) else _TORCH


def runs_kernels(x: Tensor) -> bool:
    """Returns True if Triton kernels compute what rows in x's dtype, on its device, ask of them."""
    return x.dtype in (torch.bfloat16, torch.float16) and runs_triton(x) and len(x) > 0


def _read_at(source: PlacedRows | None, rows_QK: Tensor) -> PlacedRows:
    """Where adapters read rows: torch would spread them once more."""
    return source if source is not None and runs_kernels(rows_QK) else PlacedRows(rows_QK)


_TORCH = TorchExpertOps()


@functools.cache
def _triton_ops() -> Any:
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.experts.triton_products import TritonExpertOps

    return TritonExpertOps()


def _cuda_ops(x: Tensor, weight: Tensor) -> Any:
    """The ops of Hopper; None where they do not run, or do not take a linear."""
    if not x.is_cuda or not _has_cuda_kernels(x.device, x.dtype, forced_kernels()):
        return None
    ops = _made_cuda_ops()
    return ops if ops.takes(x, weight) else None


@functools.cache
def _has_cuda_kernels(device: torch.device, dtype: torch.dtype, forced: str | None) -> bool:
    return kernel_choice(device, dtype).name == "cuda"


@functools.cache
def _made_cuda_ops() -> Any:
    from tlora_megatron.ops.experts.cuda import CudaExpertOps

    return CudaExpertOps(_triton_ops())
