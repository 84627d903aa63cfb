"""Linears of routed experts, computed by what is fastest here, and adapters that share a factor.

On Hopper in bfloat16 one GEMM of our own computes base and adapters. Elsewhere the base's products
are `ops.experts.branch`, with the adapters' added by Triton kernels on GPUs, by torch on others.

Where experts share an adapter's outer factor (A of gate and up, B of down) it multiplies each row
of the micro-batch once, and rows of rank columns travel, not rows of features:

    y_e += u B_es,    u = scaling_s * x A_s^T                          gate and up, or both in one
    y   += s B_s,     s = scaling_s * sum over e of h_e A_es^T         down
    dB_es += u^T dy_e,  du = scaling_s * sum over e of dy_e B_es^T,  dA_s += du^T x,  dx += du A_s
    dA_es += ds^T h_e,  ds = scaling_s * dy B_s^T,  dB_s += s^T dy,  dh_e += ds A_es

All of it is `shrink`, `expand` and `add_gradients` on runs of rows; a run of the micro-batch's own
rows has expert 0 and reads the shared factor. Sums over rows are fp32; nothing waits for the device
but torch's products, once, for the runs of experts.

Shapes: L experts of a rank, or 1 for what they share; Q rows, K features in, N features out, C
features, R rank columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import (
    ExpertFactors,
    ExpertOps,
    ExpertRun,
    ExpertRuns,
    OuterFactors,
    OuterSide,
    OuterTarget,
    PlacedRows,
    TorchExpertOps,
    expert_dgrads,
    expert_products,
)
from tlora_megatron.ops.experts.rows import kernels
from tlora_megatron.ops.lora.kernel_choice import runs_cuda, runs_triton
from tlora_megatron.ops.lora.torch_ops import accumulate

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
    if not runs_kernels(x):
        return _TORCH
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.experts.triton_products import TritonExpertOps

    return TritonExpertOps()


def runs_kernels(x: Tensor) -> bool:
    """Returns True if Triton kernels compute what rows in x's dtype, on its device, ask of them."""
    return x.dtype in (torch.bfloat16, torch.float16) and runs_triton(x) and len(x) > 0


def _read_at(source: PlacedRows | None, rows_QK: Tensor) -> PlacedRows:
    """Where adapters read rows: torch would spread them once more."""
    return source if source is not None and runs_kernels(rows_QK) else PlacedRows(rows_QK)


_TORCH = TorchExpertOps()


def _cuda_ops(x: Tensor, weight: Tensor) -> Any:
    """The ops of Hopper; None where they do not run, or do not take a linear."""
    if not runs_cuda(x):
        return None
    from tlora_megatron.ops.experts.cuda import OPS

    return OPS if OPS.takes(x, weight) else None


def shrink(x_QC: Tensor, runs: ExpertRuns, side: OuterSide, width: int) -> Tensor:
    """Returns `x w^T` of each run's rows, `[Q, width]`; zeros elsewhere."""
    if runs_kernels(x_QC):
        return kernels().shrink(x_QC, runs, side, width)
    s_QR = x_QC.new_zeros(len(x_QC), width)
    for run, target in _walk(runs, side):
        rows = slice(run.begin, run.end)
        s_QR[rows, target.ranks] = x_QC[rows, target.columns] @ target.weight[run.expert].t()
    return s_QR


def expand(s_QR: Tensor, y_QC: Tensor, runs: ExpertRuns, side: OuterSide) -> None:
    """Adds `s w` to y in the rows of each run."""
    if runs_kernels(y_QC):
        kernels().expand(s_QR, y_QC, runs, side)
        return
    for run, target in _walk(runs, side):
        rows = slice(run.begin, run.end)
        y_QC[rows, target.columns].addmm_(s_QR[rows, target.ranks], target.weight[run.expert])


def add_gradients(s_QR: Tensor, x_QC: Tensor, runs: ExpertRuns, side: OuterSide) -> None:
    """Adds `s^T x` of each run's rows to the gradients of its factors, in ascending order."""
    if runs_kernels(x_QC):
        kernels().add_gradients(s_QR, x_QC, runs, side)
        return
    for run, target in _walk(runs, side):
        rows = slice(run.begin, run.end)
        accumulate(target.grad[run.expert], s_QR[rows, target.ranks], x_QC[rows, target.columns])


def scale(s_QR: Tensor, runs: ExpertRuns, factors: OuterFactors) -> Tensor:
    """Multiplies the rows of each run by their adapter's scaling, in place, and returns them.

    Rows of other adapters and of none must be zeros.
    """
    if runs_kernels(s_QR):
        return kernels().scale(s_QR, runs, factors.scaling)
    for run in runs.of_adapters:
        if factors.shared.targets[run.slot]:
            # By a tensor in fp32: a number would be rounded to the dtype of s.
            s_QR[run.begin : run.end].mul_(factors.scaling[run.slot : run.slot + 1])
    return s_QR


def token_runs(ends: tuple[int, ...], window: slice) -> ExpertRuns:
    """Returns the runs of adapters among some rows of a micro-batch, on the host.

    Args:
        ends: of each slot's rows in the micro-batch, the null slot last.
        window: the rows.
    """
    held = torch.tensor((window.start, *ends)).clamp(window.start, window.stop)
    return ExpertRuns(held.diff()[None])


def _walk(runs: ExpertRuns, side: OuterSide) -> Iterator[tuple[ExpertRun, OuterTarget]]:
    return ((run, target) for run in runs.of_adapters for target in side.targets[run.slot])
