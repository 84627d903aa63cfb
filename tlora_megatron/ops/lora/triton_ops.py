"""The multi-adapter linear with Triton kernels for the rank part and cuBLAS for the base.

Launches: forward s, rank part of y, base GEMM; backward dS with dB, rank part of dx, base GEMM, dA.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.ops.lora.linear_ops import BoundLinear, KernelLinear, SiteFactors
from tlora_megatron.ops.lora.rank_places import RankPlaces, cached_places, plan_places
from tlora_megatron.ops.lora.tiling import KernelConfig, kernel_config
from tlora_megatron.ops.lora.triton_backward import backward_up
from tlora_megatron.ops.lora.triton_down import down
from tlora_megatron.ops.lora.triton_parts import gather
from tlora_megatron.ops.lora.triton_sums import backward_down
from tlora_megatron.ops.lora.triton_up import up, up_dropped, up_onto
from tlora_megatron.ops.row_groups import RowGroups


class TritonOps:
    """`LinearOps` in fp16 or bf16 on any GPU that Triton knows.

    Args:
        graph_safe: tables, buffers and grids by capacity, so that `plan_tensors.update_plans` can
            change the segments of a captured graph.
        config: blocks; None = those for the run's budget of rows.
    """

    name = "triton"

    def __init__(self, *, graph_safe: bool = False, config: KernelConfig | None = None) -> None:
        self._graph_safe = graph_safe
        self._config = config

    def bind(self, factors: SiteFactors, rows: RowGroups) -> TritonLinear:
        """Returns the linear of these factors over these rows."""
        config = self._config or kernel_config(rows.row_budget)
        return TritonLinear(factors, rows, config, graph_safe=self._graph_safe)


class TritonLinear(KernelLinear):
    """`BoundLinear` with Triton kernels; see there for what the methods return."""

    __slots__ = ("config",)

    def __init__(
        self, factors: SiteFactors, rows: RowGroups, config: KernelConfig, *, graph_safe: bool
    ) -> None:
        super().__init__(factors, rows, graph_safe=graph_safe)
        self.config = config

    def down(self, x_TK: Tensor, window: tuple[int, int] | None = None) -> Tensor:
        return down(x_TK, self, self.config.down, window)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, s: Tensor) -> Tensor:
        if not self.plan.num_chunks and self.rows.exactness is None:
            return F.linear(x_TK, weight_NK, bias_N)
        y_TN = up(s, bias_N, len(weight_NK), self, self.config.up)
        # The base GEMM adds onto the rank part: a pass over [T, N] less than the reverse.
        return y_TN.addmm_(x_TK, weight_NK.t())

    def rank_part(self, s: Tensor, bias_N: Tensor | None, num_columns: int) -> Tensor:
        return up(s, bias_N, num_columns, self, self.config.up)

    def up(self, s: Tensor, base_WN: Tensor, window: tuple[int, int]) -> Tensor:
        return up_onto(s, base_WN.contiguous(), window, self, self.config.up)

    def branch_dgrad(self, ds: Tensor, window: tuple[int, int]) -> Tensor:
        return up_dropped(ds, window, self, self.config.up)

    def rank_places(self, parts: int = 1) -> RankPlaces:
        """Returns places in row form, and in chunks."""
        rows, plan = self.rows, self.plan
        build = plan_places(rows, plan)
        return cached_places(rows, plan.layout, parts, plan.device, "triton", build, gather)

    def backward_up(self, dy_TN: Tensor, s: Tensor) -> Tensor:
        """Accumulates dB and returns dS."""
        return backward_up(dy_TN, s, self, self.config.backward_up)

    def dgrad(self, dy_TN: Tensor, ds: Tensor, weight_NK: Tensor) -> Tensor:
        if not len(ds) and self.rows.exactness is None:
            return dy_TN @ weight_NK
        return self.branch_dgrad(ds, (0, len(dy_TN))).addmm_(dy_TN, weight_NK)

    def backward_down(
        self,
        x_TK: Tensor,
        dy_TN: Tensor,
        s: Tensor,
        ds: Tensor,
        window: tuple[int, int],
        up: BoundLinear | None = None,
    ) -> None:
        """Accumulates dA; `backward_up` has accumulated dB."""
        backward_down(x_TK, ds, window, self, self.config.backward_down)
