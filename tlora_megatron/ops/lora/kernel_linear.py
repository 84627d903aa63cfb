"""The part of a bound linear that the Triton and CUDA kernels share: work lists and addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.linear_ops import BoundLinear
from tlora_megatron.ops.lora.plan_tensors import PlanTensors, plan_tensors
from tlora_megatron.ops.lora.tiling import RANK_CHUNK, rank_chunks
from tlora_megatron.ops.routing.row_groups import RowGroups


class SiteTables:
    """Addresses of one linear's weights and gradients, in tables on the device.

    They hold as long as the factors stay where they are: `factors.cached(SiteTables)`.
    """

    def __init__(self, factors: SiteFactors) -> None:
        device = factors.lora_a.device
        addresses = [b.data_ptr() for b in factors.lora_b]
        self.lora_b = torch.tensor(addresses, dtype=torch.int64, device=device)
        """int64 `[targets]`: addresses of `SiteFactors.lora_b`."""
        columns = [(c.width, c.stride, c.begin, c.size) for c in factors.columns]
        self.columns = torch.tensor(columns, dtype=torch.int32, device=device).flatten()
        """int32 `[targets * 4]`: width, stride, begin and number of columns."""
        rows_a = _gradient_rows(factors, factors.grad_a)
        rows_b = _gradient_rows(factors, factors.grad_b)
        self.grad_a = torch.from_numpy(rows_a).to(device)
        """int64 `[a_rows]`: the address of each rank row's gradient of A; 0 beyond a rank."""
        self.grad_b = torch.from_numpy(rows_b).to(device)
        """The same of B, numbered like the rows of the arena of A."""
        self.aligned_a, self.aligned_b = not (rows_a % 16).any(), not (rows_b % 16).any()
        """True if all gradients of A (of B) lie at 16 bytes."""
        self.aligned_lora_b = all(
            b.data_ptr() % 16 == 0 and b.stride(0) * b.element_size() % 16 == 0
            for b in factors.lora_b
        )


class KernelLinear(BoundLinear):
    """A `BoundLinear` whose kernels read work lists and address tables on the device."""

    __slots__ = ("plan", "tables")

    def __init__(self, factors: SiteFactors, rows: RowGroups, *, graph_safe: bool) -> None:
        super().__init__(factors, rows)
        device = factors.lora_a.device
        self.plan: PlanTensors = plan_tensors(rows, factors.layout, device, graph_safe=graph_safe)
        """Work lists of the micro-batch, shared by all linears of the layout."""
        self.tables: SiteTables = factors.cached(SiteTables)
        """Addresses of the linear's weights and gradients."""


def _gradient_rows(
    factors: SiteFactors, grads: Sequence[Sequence[torch.Tensor | None]]
) -> np.ndarray:
    rows = np.zeros(factors.layout.a_rows, dtype=np.int64)
    for slot, begins in enumerate(factors.layout.a_begin):
        for p, begin in enumerate(begins):
            rank, grad = factors.layout.ranks[slot][p], grads[slot][p]
            if grad is None:
                continue
            assert grad.stride(1) == 1, "a gradient's rows must be contiguous"
            assert rank_chunks(rank) * RANK_CHUNK >= len(grad), "a gradient must fit its chunks"
            step = grad.stride(0) * grad.element_size()
            rows[begin : begin + len(grad)] = grad.data_ptr() + step * np.arange(len(grad))
    return rows
