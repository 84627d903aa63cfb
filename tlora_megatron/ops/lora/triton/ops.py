"""`LinearOps` with Triton kernels for the rank part and cuBLAS for the base.

Launches: forward s, rank part of y, base GEMM; backward dS with dB, rank part of dx, base GEMM, dA.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.linear_ops import PairLinear
from tlora_megatron.ops.lora.plan_tensors import PlanTensors, plan_tensors
from tlora_megatron.ops.lora.rank_form import is_flat
from tlora_megatron.ops.lora.rank_places import RankPlaces, cached_places, plan_places
from tlora_megatron.ops.lora.site_tables import SiteTableCache
from tlora_megatron.ops.lora.triton.backward import backward_up
from tlora_megatron.ops.lora.triton.config import KernelConfig, kernel_config
from tlora_megatron.ops.lora.triton.down import down
from tlora_megatron.ops.lora.triton.gather import gather
from tlora_megatron.ops.lora.triton.sums import backward_down
from tlora_megatron.ops.lora.triton.up import up, up_dropped, up_onto
from tlora_megatron.ops.routing.row_groups import RowGroups


class TritonOps:
    """The multi-adapter linear in fp16 or bf16 on any GPU that Triton knows; see `LinearOps`.

    Args:
        graph_safe: tables, buffers and grids by capacity, so that `plan_tensors.update_plans` can
            change the segments of a captured graph.
        config: blocks; None = those tuned for the GPU.
    """

    name = "triton"

    def __init__(self, *, graph_safe: bool = False, config: KernelConfig | None = None) -> None:
        self.graph_safe = graph_safe
        self.tables = SiteTableCache()
        self._config = config

    def bind(self, factors: SiteFactors, rows: RowGroups) -> PairLinear:
        """Returns the linear of these factors over these rows."""
        return PairLinear(self, factors, rows)

    def plan(self, factors: SiteFactors, rows: RowGroups) -> PlanTensors:
        """Work lists on the device of the factors."""
        device = factors.lora_a.device
        return plan_tensors(rows, factors.layout, device, graph_safe=self.graph_safe)

    def config(self, factors: SiteFactors, rows: RowGroups) -> KernelConfig:
        """Blocks for this linear and budget of rows."""
        if self._config is not None:
            return self._config
        depth = factors.lora_a.shape[1]
        columns = factors.columns[0]
        gpu = gpu_name(factors.lora_a.device)
        return kernel_config(gpu, rows.row_budget, depth, columns.groups * columns.stride)

    def down(self, x_TK: torch.Tensor, factors: SiteFactors, rows: RowGroups) -> torch.Tensor:
        """Returns s, all that a forward GEMM needs besides the factors."""
        return down(x_TK, factors, rows, self.plan(factors, rows), self.config(factors, rows).down)

    def forward(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns y `[T, N]` and s."""
        s = self.down(x_TK, factors, rows)
        return self.linear(x_TK, weight_NK, bias_N, s, factors, rows), s

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        s: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> torch.Tensor:
        """Returns y `[T, N]`."""
        plan = self.plan(factors, rows)
        if not plan.num_chunks:
            return F.linear(x_TK, weight_NK, bias_N)
        blocks, tables = self.config(factors, rows).up, self.tables[factors]
        y_TN = up(s, bias_N, len(weight_NK), factors, tables, plan, blocks)
        # The base GEMM adds onto the rank part: a pass over [T, N] less than the reverse.
        return y_TN.addmm_(x_TK, weight_NK.t())

    def up(
        self,
        s: torch.Tensor,
        base_WN: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
        window: tuple[int, int],
    ) -> torch.Tensor:
        """Returns `base + s B^T` of a window of rows."""
        plan = self.plan(factors, rows)
        if not plan.num_chunks:
            return base_WN.clone()
        blocks, tables = self.config(factors, rows).up, self.tables[factors]
        return up_onto(s, base_WN.contiguous(), factors, tables, plan, blocks, window)

    def branch_dgrad(
        self,
        ds: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
        window: tuple[int, int],
    ) -> torch.Tensor:
        """Returns `drop(dS A)` of a window of rows."""
        plan = self.plan(factors, rows)
        if not plan.num_chunks:
            return ds.new_zeros(window[1] - window[0], factors.lora_a.shape[1])
        blocks, scaled = self.config(factors, rows).up, is_flat(ds)
        return up_dropped(ds, factors, rows, plan, blocks, window, scaled=scaled)

    def rank_places(self, factors: SiteFactors, rows: RowGroups, parts: int = 1) -> RankPlaces:
        """Places in row form, and in chunks."""
        plan = self.plan(factors, rows)
        build = plan_places(rows, plan)
        return cached_places(rows, plan.layout, parts, plan.device, "triton", build, gather)

    def backward_up(
        self, dy_TN: torch.Tensor, s: torch.Tensor, factors: SiteFactors, rows: RowGroups
    ) -> torch.Tensor:
        """Accumulates dB and returns dS."""
        plan, config = self.plan(factors, rows), self.config(factors, rows)
        return backward_up(dy_TN, s, factors, self.tables[factors], plan, config.backward_up)

    def dgrad(
        self,
        dy_TN: torch.Tensor,
        ds: torch.Tensor,
        weight_NK: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> torch.Tensor:
        """Returns dx `[T, K]`."""
        if not len(ds):
            return dy_TN @ weight_NK
        return self.branch_dgrad(ds, factors, rows, (0, len(dy_TN))).addmm_(dy_TN, weight_NK)

    def backward_down(
        self,
        x_TK: torch.Tensor,
        dy_TN: torch.Tensor,
        s: torch.Tensor,
        ds: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
        window: tuple[int, int],
        up_factors: SiteFactors | None = None,
    ) -> None:
        """Accumulates dA over the rows `window[0]:window[1]`, which are all that x holds."""
        plan, config = self.plan(factors, rows), self.config(factors, rows)
        tables = self.tables[factors]
        backward_down(x_TK, ds, factors, tables, rows, window, plan, config.backward_down)


@functools.cache
def gpu_name(device: torch.device) -> str:
    """Name of a device, as in the table of block sizes; empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
