"""The multi-adapter linear with the CUDA kernels of `csrc/`, for Hopper GPUs.

Launches: forward s and the rank-extended GEMM; backward dS, the GEMM again, dA with dB. `up`,
`rank_part` and `branch_dgrad`, for a base that is computed elsewhere, are Triton's kernels. Linears
that the kernels do not support (sizes that are no multiple of 8, fused outputs that are not laid
out in 64s) go to another implementation.

Tiles, runs and parts decide orders of summation. They follow from the run's budget of rows and the
linear's sizes, so that a job's bits do not depend on what else is packed. For the same reason no
GEMM here is cuBLAS's, which chooses by the number of rows.
"""

from __future__ import annotations

import functools
from typing import Protocol, cast

from torch import Tensor

from tlora_megatron.ops.lora.cuda_arguments import Arenas, gemm_tile, is_supported
from tlora_megatron.ops.lora.cuda_calls import (
    Dropout,
    RankPart,
    SumOperands,
    form_places,
    gemm,
    multiprocessors,
    rank_form,
    rank_rows,
    rank_sums,
)
from tlora_megatron.ops.lora.cuda_work_items import (
    DOWN,
    ROW_PARTS,
    UP,
    row_items,
    sum_inputs,
    sum_items,
    sum_sizes,
)
from tlora_megatron.ops.lora.linear_ops import (
    Base,
    BoundLinear,
    FrozenBase,
    KernelLinear,
    LinearOps,
    SiteFactors,
)
from tlora_megatron.ops.lora.rank_places import RankPlaces, cached_places
from tlora_megatron.ops.lora.triton_ops import up, up_dropped, up_onto
from tlora_megatron.ops.lora.triton_parts import gather
from tlora_megatron.ops.lora.triton_work_items import UpConfig
from tlora_megatron.ops.routing import RowGroups

UP_BLOCKS = UpConfig()
"""Of Triton's kernels for `up` and `branch_dgrad`."""
_BLOCKS = 2
"""Blocks of the rank-sized kernels that a multiprocessor holds."""


class RankedBase(FrozenBase, Protocol):
    """A base whose own CUDA kernels may take the adapters' products in."""

    def takes_ranks(self, x: Tensor) -> bool:
        """True if they do for rows like x: a tensor of activations, or of their gradients."""
        ...

    def prepare(self, x_TK: Tensor) -> None:
        """Makes what `ranked_product` reads of x, before s: so its kernel may overlap that of s."""
        ...

    def ranked_product(self, x_TK: Tensor, bias_N: Tensor | None, rank: RankPart | None) -> Tensor:
        """Returns `x W^T + b + rank part` `[T, N]`."""
        ...

    def ranked_dgrad(self, dy_TN: Tensor, rank: RankPart | None) -> Tensor:
        """Returns `dy W + mask(rank part)` `[T, K]`."""
        ...


def _ranked(base: Base, rows: Tensor) -> RankedBase | None:
    """The base, where its own kernels take the adapters' products in for such rows.

    Asked by name: `isinstance` with a protocol takes longer than a launch.
    """
    if isinstance(base, Tensor) or not hasattr(base, "takes_ranks"):
        return None
    ranked = cast(RankedBase, base)
    return ranked if ranked.takes_ranks(rows) else None


class CudaSite:
    """Operands that all launches of one linear share: `factors.cached(CudaSite)`.

    They hold as long as the factors stay where they are.
    """

    def __init__(self, factors: SiteFactors) -> None:
        self.is_supported = is_supported(factors)
        """True if these kernels can compute the linear; if not, ask for nothing below."""
        self.sizes = sum_sizes(factors.columns, factors.size_in, factors.size_out)
        self._lora_a, self._lora_b, self._columns = factors.lora_a, factors.lora_b, factors.columns

    @functools.cached_property
    def a(self) -> Arenas:
        """The arena of `lora_a`."""
        return Arenas((self._lora_a,), ())

    @functools.cached_property
    def b(self) -> Arenas:
        """The arenas of `lora_b`."""
        return Arenas(self._lora_b, self._columns)


class CudaOps:
    """`LinearOps` in bf16 on a Hopper GPU.

    Args:
        fallback: computes the linears that the CUDA kernels do not support.
    """

    name = "cuda"

    def __init__(self, fallback: LinearOps) -> None:
        self._fallback = fallback

    def bind(self, factors: SiteFactors, rows: RowGroups) -> BoundLinear:
        """Returns the linear of these factors over these rows."""
        site = factors.cached(CudaSite)
        if not site.is_supported:
            return self._fallback.bind(factors, rows)
        return CudaLinear(factors, rows, site)


class CudaLinear(KernelLinear):
    """`BoundLinear` with CUDA kernels; see there for what the methods return.

    s and dS are flat (`RankForm`). dS has the `1 / (1 - p)` of dropout: its readers apply no more
    than masks.
    """

    __slots__ = ("_dgrad_dropout", "_dropout", "_form", "_site")

    def __init__(self, factors: SiteFactors, rows: RowGroups, site: CudaSite) -> None:
        super().__init__(factors, rows)
        self._site = site
        self._form = rank_form(self.plan)
        self._dropout = self._mask() if factors.uses_dropout(rows) else None
        self._dgrad_dropout = self._dropout
        if rows.exactness is not None and rows.dropout_keys:
            # With masks the GEMM adds the rank part before the base, without them behind it: a
            # neighbour's dropout must not decide.
            self._dgrad_dropout = self._mask()

    def _mask(self) -> Dropout:
        return Dropout(
            probability=self.factors.dropout,
            row_keys=self.rows.row_keys(self.plan.device),
            row_slots=self.plan["row_slots"],
            key=self.factors.dropout_key,
            first_column=self.factors.first_column,
        )

    def forward(self, x_TK: Tensor, base: Base, bias_N: Tensor | None) -> tuple[Tensor, Tensor]:
        # Copies must come before the kernel of s: the GEMM overlaps the kernel before it.
        x_TK = x_TK.contiguous()
        if isinstance(base, Tensor):
            base = base.contiguous()
        elif ranked := _ranked(base, x_TK):
            ranked.prepare(x_TK)
        return super().forward(x_TK, base, bias_N)

    def product(self, x_TK: Tensor, base: Base, bias_N: Tensor | None, s: Tensor) -> Tensor:
        if (ranked := _ranked(base, x_TK)) is None:
            return super().product(x_TK, base, bias_N, s)
        rank = self._rank_part(s, self._site.b, "chunk_b", None)
        return ranked.ranked_product(x_TK, bias_N, rank)

    def product_dgrad(self, dy_TN: Tensor, ds: Tensor, base: Base) -> Tensor:
        if (ranked := _ranked(base, dy_TN)) is None:
            return super().product_dgrad(dy_TN, ds, base)
        rank = self._rank_part(ds, self._site.a, "chunk_a", self._dgrad_dropout)
        return ranked.ranked_dgrad(dy_TN, rank)

    def down(self, x_TK: Tensor, window: tuple[int, int] | None = None) -> Tensor:
        return self._rank_rows(x_TK.contiguous(), self._site.a, masked=True, window=window)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, s: Tensor) -> Tensor:
        rank = self._rank_part(s, self._site.b, "chunk_b", None)
        return self._gemm(x_TK, weight_NK, len(weight_NK), rank, bias_N, transposed=True)

    def rank_part(self, s: Tensor, bias_N: Tensor | None, num_columns: int) -> Tensor:
        return up(s, bias_N, num_columns, self, UP_BLOCKS)

    def up(self, s: Tensor, base_WN: Tensor, window: tuple[int, int]) -> Tensor:
        return up_onto(s, base_WN.contiguous(), window, self, UP_BLOCKS)

    def branch_dgrad(self, ds: Tensor, window: tuple[int, int]) -> Tensor:
        return up_dropped(ds, window, self, UP_BLOCKS, scaled=True)

    def rank_places(self, parts: int = 1) -> RankPlaces:
        """Returns places among the rows of `RankForm`, and in its chunks."""
        rows, plan = self.rows, self.plan
        build = functools.partial(form_places, rows, plan)
        return cached_places(rows, plan.layout, parts, plan.device, "cuda", build, gather)

    def backward_up(self, dy_TN: Tensor, s: Tensor) -> Tensor:
        return self._rank_rows(dy_TN.contiguous(), self._site.b, masked=False)

    def dgrad(self, dy_TN: Tensor, ds: Tensor, weight_NK: Tensor) -> Tensor:
        rank = self._rank_part(ds, self._site.a, "chunk_a", self._dgrad_dropout)
        return self._gemm(dy_TN, weight_NK, weight_NK.shape[1], rank, None, transposed=False)

    def _gemm(
        self,
        x_TK: Tensor,
        weight: Tensor,
        num_columns: int,
        rank: RankPart | None,
        bias_N: Tensor | None,
        *,
        transposed: bool,
    ) -> Tensor:
        # A copy made here would be the previous kernel.
        overlaps = x_TK.is_contiguous() and weight.is_contiguous()
        x_TK, weight = x_TK.contiguous(), weight.contiguous()
        out_TN = x_TK.new_empty(len(x_TK), num_columns)
        clusters = multiprocessors(x_TK.device) // 2
        gemm(
            x_TK,
            weight,
            out_TN,
            gemm_tile(self.rows.row_budget, num_columns, clusters),
            transposed=transposed,
            overlaps_previous_kernel=overlaps,
            bias_N=bias_N,
            rank=rank,
        )
        return out_TN

    def backward_down(
        self,
        x_TK: Tensor,
        dy_TN: Tensor,
        s: Tensor,
        ds: Tensor,
        window: tuple[int, int],
        up: BoundLinear | None = None,
    ) -> None:
        """Accumulates dA and dB."""
        if up is None:
            self._sum(x_TK, dy_TN, s, ds, window, (DOWN, UP))
            return
        assert isinstance(up, CudaLinear), "the same kernels must take both factors of a linear"
        # What is not read must have the factors' form all the same.
        self._sum(x_TK, dy_TN, ds, ds, window, (DOWN,))
        up._sum(x_TK, dy_TN, s, s, window, (UP,))

    def _rank_part(
        self, flat: Tensor, arenas: Arenas, chunk_rows: str, dropout: Dropout | None
    ) -> RankPart | None:
        """Returns what a GEMM adds to the base; None where no row has an adapter.

        Args:
            chunk_rows: the plan's table of the chunks' rows in the arenas.
        """
        if not self.plan.num_chunks:
            return None
        return RankPart(
            flat=flat,
            form=self._form,
            factors=arenas,
            num_targets=len(self.factors.lora_b),
            tile_chunks=self.plan["tile_chunks"],
            chunk_rows=self.plan[chunk_rows],
            dropout=dropout,
        )

    def _rank_rows(
        self, in_TK: Tensor, arenas: Arenas, *, masked: bool, window: tuple[int, int] | None = None
    ) -> Tensor:
        """Returns s of a masked x and `lora_a`, or dS of dy and `lora_b`."""
        new = in_TK.new_empty if window is None else in_TK.new_zeros
        flat = new(self._form.numel)
        work = self.plan.work_items(
            ("rows", masked, window),
            lambda plan: row_items(plan, per_target=not masked, window=window),
        )
        if not work.count:
            return flat
        rank_rows(
            in_TK,
            arenas,
            flat,
            self._form,
            work,
            chunks=self.plan["chunks"],
            scaling=self.factors.scaling,
            parts=ROW_PARTS,
            dropout=self._dropout,
            masked=masked,
            first_row=0 if window is None else window[0],
        )
        return flat

    def _sum(
        self,
        x_TK: Tensor,
        dy_TN: Tensor,
        s: Tensor,
        ds: Tensor,
        window: tuple[int, int],
        kinds: tuple[int, ...],
    ) -> None:
        """Accumulates dA, dB or both."""
        sizes, budget, device = self._site.sizes, self.rows.row_budget, dy_TN.device
        exactness = self.rows.exactness
        blocks = multiprocessors(device) if exactness is None else exactness.multiprocessors
        work = self.plan.work_items(
            (sizes, window, blocks, kinds),
            lambda plan: sum_items(
                plan, sum_inputs(sizes, budget, plan.num_rows, window, blocks, kinds)
            ),
        )
        if not work.count:
            return
        rank_sums(
            SumOperands(x_TK.contiguous(), window[0], ds, dy_TN.contiguous(), s),
            self._form,
            work,
            self.tables,
            blocks=min(work.count, _BLOCKS * multiprocessors(device)),
            # dS was computed since dy and s were written. A copy made here is not.
            overlaps_previous_kernel=dy_TN.is_contiguous(),
            dropout=self._dropout,
        )
