"""Chooses what computes adapters on routed experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertFactors, ExpertRuns, TorchExpertOps
from tlora_megatron.ops.lora.kernel_choice import runs_triton


class ExpertOps(Protocol):
    """Computes adapters at one linear of the routed experts; `TorchExpertOps` defines what."""

    def forward(
        self, x_QK: Tensor, y_QN: Tensor, runs: ExpertRuns, factors: ExpertFactors
    ) -> Sequence[Tensor]:
        """Adds the adapters' outputs to y; returns what `backward` needs."""
        ...

    def backward(
        self,
        dy_QN: Tensor,
        dx_QK: Tensor,
        x_QK: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        factors: ExpertFactors,
    ) -> None:
        """Adds to dx and to the factors' gradients."""
        ...


def expert_ops(x: Tensor) -> ExpertOps:
    """Returns kernels where a GPU computes in half precision, else torch's products."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return _triton_ops() if half and runs_triton(x) else _TORCH


_TORCH = TorchExpertOps()


@functools.cache
def _triton_ops() -> ExpertOps:
    # Not at the top: triton is only there on machines with a GPU.
    from tlora_megatron.ops.experts.triton.ops import TritonExpertOps

    return TritonExpertOps()
