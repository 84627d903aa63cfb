"""The linears of routed experts and what adapters add to them, both ways: the definition in torch.

On GPUs in bfloat16 all experts are one `torch.nn.functional.grouped_mm`, which reads their numbers
of rows on the device. Elsewhere they are a loop, which reads them on the host.

    y += scaling_s * (x A_es^T) B_es        for the rows of adapter s at expert e
    dS = scaling_s * dy B_es^T;  dx += dS A_es;  dA_es += dS^T x;  dB_es += s^T dy

Every expert has factors of its own for every adapter. Rows lie expert by expert, inside an expert
adapter by adapter, so each (expert, adapter) pair is one run of rows. The loop over runs waits for
the device once, for their ends. Sums over rows are fp32.

Shapes: E or L experts, Q rows that lie expert by expert (R in the products), K features in, N
features out, R rank, S adapters and the null slot.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.ops.lora.torch_ops import accumulate

CHUNK = 16
"""Rank rows that tensor cores take at once."""


def expert_products(x_RK: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Returns `x W_e^T` `[R, N]`, each row by its own expert's weight.

    Args:
        counts_E: int64, rows of each expert; their sum is R.
    """
    return expert_dgrads(x_RK, weight_ENK.transpose(1, 2), counts_E)


def expert_dgrads(dy_RN: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Returns `dy W_e` `[R, K]`; see `expert_products`."""
    if dy_RN.is_cuda and dy_RN.dtype == torch.bfloat16 and len(dy_RN):
        return grouped_products(dy_RN, weight_ENK, counts_E)
    return looped_products(dy_RN, weight_ENK, counts_E)


def looped_products(x_RK: Tensor, weight_EKN: Tensor, counts_E: Tensor) -> Tensor:
    """The definition: one product an expert; waits for the device."""
    out_RN = x_RK.new_empty(len(x_RK), weight_EKN.shape[2])
    begin = 0
    for expert, count in enumerate(counts_E.tolist()):
        rows = slice(begin, begin + count)
        if count:
            torch.mm(x_RK[rows], weight_EKN[expert], out=out_RN[rows])
        begin += count
    return out_RN


def grouped_products(x_RK: Tensor, weight_EKN: Tensor, counts_E: Tensor) -> Tensor:
    """The same products in one call, without waiting."""
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return F.grouped_mm(x_RK.contiguous(), weight_EKN, offs=ends_E)


class ExpertRun(NamedTuple):
    """The rows of one adapter at one expert."""

    expert: int
    slot: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class ExpertRuns:
    """The rows that a rank's experts compute: a value of one layer's call."""

    counts_LS: Tensor
    """int64: rows of each adapter at each expert, the null slot last; with one column, rows of
    each expert whoever they belong to."""

    @property
    def counts_L(self) -> Tensor:
        """int64: rows of each expert."""
        return self.counts_LS.sum(1)

    @cached_property
    def of_adapters(self) -> tuple[ExpertRun, ...]:
        """The runs that have rows and an adapter; waits for the device once."""
        runs, end = [], 0
        last = self.counts_LS.shape[1] - 1
        for expert, counts in enumerate(self.counts_LS.tolist()):
            for slot, count in enumerate(counts):
                begin, end = end, end + count
                if count and slot < last:
                    runs.append(ExpertRun(expert, slot, begin, end))
        return tuple(runs)


class PlacedRows(NamedTuple):
    """Rows as experts compute them, and where they come from: kernels read them there."""

    values_TK: Tensor
    rows_Q: Tensor | None = None
    """int64: which row of `values_TK` each is; None = they are these, in this order."""

    def spread(self) -> Tensor:
        """Returns the rows `[Q, K]`."""
        return self.values_TK if self.rows_Q is None else self.values_TK[self.rows_Q]


class ExpertTarget(NamedTuple):
    """One adapter's factors of one target, for all experts of a rank."""

    columns: slice
    """Output columns that it adds to."""
    lora_a: Tensor
    """`[L, R, K]` in the compute dtype."""
    lora_b: Tensor
    """`[L, R, columns]`, likewise."""
    grad_a: Tensor
    """`[L, R, K]`, fp32."""
    grad_b: Tensor
    """`[L, R, columns]`, fp32."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertArenas:
    """The factors of all adapters at one linear, side by side, as the tensor cores read them.

    Rank columns of slot s are `positions[s]:positions[s + 1]`: those of its targets one after
    another, then zeros up to a multiple of 8. Of them a target's rows of `lora_b` are zeros outside
    its columns.
    """

    lora_a: Tensor
    """`[L, R, K]` in the compute dtype."""
    lora_b: Tensor
    """`[L, R, N]`, likewise."""
    positions: Tensor
    """int32 `[slots + 2]`; the null slot, the last one, has none."""


@dataclass(frozen=True, eq=False)
class ExpertFactors:
    """The factors of all adapters at one linear of the routed experts."""

    targets: tuple[tuple[ExpertTarget, ...], ...]
    """Those of each slot; some have none."""
    scaling: Tensor
    """fp32 `[slots]`."""
    arenas: ExpertArenas
    """What the targets' factors are views of."""


class OuterTarget(NamedTuple):
    """One factor of one adapter at one target: the shared one, or those of a rank's experts."""

    columns: slice
    """Its features, of the linear's input or output."""
    ranks: slice
    """Its columns among those that travel."""
    weight: Tensor
    """`[L, R, C]` in the compute dtype."""
    grad: Tensor
    """`[L, R, C]`, fp32."""


@dataclass(frozen=True, eq=False)
class OuterSide:
    """The factors of all adapters on one side: what their experts share, or what each has."""

    targets: tuple[tuple[OuterTarget, ...], ...]
    """Those of each slot's adapter; some have none."""


class OuterFactors(NamedTuple):
    """The factors of all adapters that share the outer one, at one linear of the routed experts."""

    shared: OuterSide
    own: OuterSide
    scaling: Tensor
    """fp32 `[slots]`."""
    width: int
    """Rank columns of a row that travels: those of the adapter that has most, in whole chunks."""


class ExpertOps(ABC):
    """Computes adapters at one linear of the routed experts; `TorchExpertOps` defines what."""

    @abstractmethod
    def forward(
        self, x: PlacedRows, y_QN: Tensor, runs: ExpertRuns, factors: ExpertFactors
    ) -> Sequence[Tensor]:
        """Adds the adapters' outputs to y; returns what the way back needs."""

    @abstractmethod
    def input_backward(
        self,
        dy: PlacedRows,
        dx_QK: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        factors: ExpertFactors,
    ) -> Sequence[Tensor]:
        """Does what of the way back needs no x: adds to dx and to gradients of B; returns dS."""

    @abstractmethod
    def input_sums(
        self, ds: Sequence[Tensor], x: PlacedRows, runs: ExpertRuns, factors: ExpertFactors
    ) -> None:
        """Does the rest of it: adds to gradients of A."""


class TorchExpertOps(ExpertOps):
    """Run by run, in ascending order, on any device; s and dS are `[rows, R]` a run and target."""

    def forward(
        self, x: PlacedRows, y_QN: Tensor, runs: ExpertRuns, factors: ExpertFactors
    ) -> Sequence[Tensor]:
        x_QK, saved = x.spread(), []
        for run, target in _walk(runs, factors):
            rows = slice(run.begin, run.end)
            s_QR = _scaled(x_QK[rows] @ target.lora_a[run.expert].t(), run, factors)
            y_QN[rows, target.columns].addmm_(s_QR, target.lora_b[run.expert])
            saved.append(s_QR)
        return saved

    def input_backward(
        self,
        dy: PlacedRows,
        dx_QK: Tensor,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        factors: ExpertFactors,
    ) -> Sequence[Tensor]:
        dy_QN, found = dy.spread(), []
        for (run, target), s_QR in zip(_walk(runs, factors), saved, strict=True):
            rows, expert = slice(run.begin, run.end), run.expert
            dy_QC = dy_QN[rows, target.columns]
            ds_QR = _scaled(dy_QC @ target.lora_b[expert].t(), run, factors)
            accumulate(target.grad_b[expert], s_QR, dy_QC)
            dx_QK[rows].addmm_(ds_QR, target.lora_a[expert])
            found.append(ds_QR)
        return found

    def input_sums(
        self, ds: Sequence[Tensor], x: PlacedRows, runs: ExpertRuns, factors: ExpertFactors
    ) -> None:
        x_QK = x.spread()
        for (run, target), ds_QR in zip(_walk(runs, factors), ds, strict=True):
            accumulate(target.grad_a[run.expert], ds_QR, x_QK[run.begin : run.end])


def _walk(runs: ExpertRuns, factors: ExpertFactors) -> Iterator[tuple[ExpertRun, ExpertTarget]]:
    return itertools.chain.from_iterable(
        ((run, target) for target in factors.targets[run.slot]) for run in runs.of_adapters
    )


def _scaled(s_QR: Tensor, run: ExpertRun, factors: ExpertFactors) -> Tensor:
    # By a tensor in fp32: a number would be rounded to the dtype of s.
    return s_QR.mul_(factors.scaling[run.slot : run.slot + 1])


def add_biases(
    y_QN: Tensor, biases_LN: Tensor, runs: ExpertRuns, weights_Q: Tensor | None
) -> Tensor:
    """Adds each row's bias to a linear's output, in place; returns it.

    Args:
        weights_Q: have multiplied the linear's input, and multiply its bias; None = nothing has.
    """
    bias_QN = _of_rows(biases_LN, runs, len(y_QN))
    if weights_Q is not None:
        bias_QN = (bias_QN * weights_Q[:, None]).to(y_QN.dtype)
    return y_QN.add_(bias_QN)


def weights_grad(dy_QN: Tensor, biases_LN: Tensor, runs: ExpertRuns) -> Tensor:
    """Returns the gradient of the weights through the biases that they multiply, fp32 `[Q]`."""
    return (dy_QN.float() * _of_rows(biases_LN, runs, len(dy_QN))).sum(-1)


def _of_rows(biases_LN: Tensor, runs: ExpertRuns, num_rows: int) -> Tensor:
    return biases_LN.repeat_interleave(runs.counts_L, dim=0, output_size=num_rows)
