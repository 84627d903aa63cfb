"""The products of adapters whose outer factor all routed experts of a layer share, in torch.

    y_e += u B_es,    u = scaling_s * x A_s^T                          gate and up, or both in one
    y   += s B_s,     s = scaling_s * sum over e of h_e A_es^T         down

The shared factor multiplies each row of the micro-batch once, so that rows of rank columns travel
to the experts and back, not rows of features. The way back is the mirror image:

    dB_es += u^T dy_e,  du = scaling_s * sum over e of dy_e B_es^T,  dA_s += du^T x,  dx += du A_s
    dA_es += ds^T h_e,  ds = scaling_s * dy B_s^T,  dB_s += s^T dy,  dh_e += ds A_es

All of it is three operations on runs of rows, `shrink`, `expand` and `add_gradients`, with the
shared factors or with those of the experts; on GPUs in half precision each is a launch. A run of
the micro-batch's own rows has expert 0 and reads the shared factor. Sums over rows are fp32;
nothing waits for the device but torch's products, once, for the runs of experts.

Shapes: L experts of a rank, or 1 for what they share; Q rows, C features, R rank columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRun, ExpertRuns
from tlora_megatron.ops.experts.choice import runs_kernels
from tlora_megatron.ops.experts.factors import OuterFactors, OuterSide, OuterTarget
from tlora_megatron.ops.lora.torch_ops import accumulate


def shrink(x_QC: Tensor, runs: ExpertRuns, side: OuterSide, width: int) -> Tensor:
    """Returns `x w^T` of each run's rows, `[Q, width]`; zeros elsewhere."""
    if runs_kernels(x_QC):
        return _kernels().shrink(x_QC, runs, side, width)
    s_QR = x_QC.new_zeros(len(x_QC), width)
    for run, target in _walk(runs, side):
        rows = slice(run.begin, run.end)
        s_QR[rows, target.ranks] = x_QC[rows, target.columns] @ target.weight[run.expert].t()
    return s_QR


def expand(s_QR: Tensor, y_QC: Tensor, runs: ExpertRuns, side: OuterSide) -> None:
    """Adds `s w` to y in the rows of each run."""
    if runs_kernels(y_QC):
        _kernels().expand(s_QR, y_QC, runs, side)
        return
    for run, target in _walk(runs, side):
        rows = slice(run.begin, run.end)
        y_QC[rows, target.columns].addmm_(s_QR[rows, target.ranks], target.weight[run.expert])


def add_gradients(s_QR: Tensor, x_QC: Tensor, runs: ExpertRuns, side: OuterSide) -> None:
    """Adds `s^T x` of each run's rows to the gradients of its factors, in ascending order."""
    if runs_kernels(x_QC):
        _kernels().add_gradients(s_QR, x_QC, runs, side)
        return
    for run, target in _walk(runs, side):
        rows = slice(run.begin, run.end)
        accumulate(target.grad[run.expert], s_QR[rows, target.ranks], x_QC[rows, target.columns])


def scale(s_QR: Tensor, runs: ExpertRuns, factors: OuterFactors) -> Tensor:
    """Multiplies the rows of each run by their adapter's scaling, in place, and returns them.

    Rows of other adapters and of none must be zeros.
    """
    if runs_kernels(s_QR):
        return _kernels().scale(s_QR, runs, factors.scaling)
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


def _kernels() -> Any:
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.experts import triton_rows

    return triton_rows


def _walk(runs: ExpertRuns, side: OuterSide) -> Iterator[tuple[ExpertRun, OuterTarget]]:
    return ((run, target) for run in runs.of_adapters for target in side.targets[run.slot])
