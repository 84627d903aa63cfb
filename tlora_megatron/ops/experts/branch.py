"""What adapters add to a linear of routed experts, and how it goes back: the definition in torch.

    y += scaling_s * (x A_es^T) B_es        for the rows of adapter s at expert e
    dS = scaling_s * dy B_es^T;  dx += dS A_es;  dA_es += dS^T x;  dB_es += s^T dy

Every expert has factors of its own for every adapter. Rows lie expert by expert, inside an expert
adapter by adapter, so each (expert, adapter) pair is one run of rows. The loop over runs waits for
the device once, for their ends. Sums over rows are fp32.

Shapes: L experts, Q rows, K features in, N features out, R rank, S adapters and the null slot.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from tlora_megatron.ops.lora.torch_ops import accumulate


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
    arenas: ExpertArenas | None = None
    """What the targets' factors are views of, where kernels read them so."""


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
        """Does what of `backward` needs no x: adds to dx and to gradients of B; returns dS."""

    @abstractmethod
    def input_sums(
        self, ds: Sequence[Tensor], x: PlacedRows, runs: ExpertRuns, factors: ExpertFactors
    ) -> None:
        """Does the rest of it: adds to gradients of A.

        Args:
            ds: from `input_backward`.
        """

    def backward(
        self,
        dy: PlacedRows,
        dx_QK: Tensor,
        x: PlacedRows,
        saved: Sequence[Tensor],
        runs: ExpertRuns,
        factors: ExpertFactors,
    ) -> None:
        """Adds to dx and to the factors' gradients.

        Args:
            saved: from `forward`.
        """
        self.input_sums(self.input_backward(dy, dx_QK, saved, runs, factors), x, runs, factors)


class TorchExpertOps(ExpertOps):
    """Run by run, in ascending order, on any device."""

    def forward(
        self, x: PlacedRows, y_QN: Tensor, runs: ExpertRuns, factors: ExpertFactors
    ) -> Sequence[Tensor]:
        """Adds the adapters' outputs to y; returns s `[rows, R]` of every run and target."""
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
        """Does what of `backward` needs no x: adds to dx and to gradients of B; returns dS."""
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
        """Does the rest of it: adds to gradients of A.

        Args:
            ds: from `input_backward`.
        """
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
