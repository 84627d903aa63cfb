"""Adapters whose outer factor all routed experts share, around one call of a layer's experts.

The shared factor multiplies a rank's own rows, before they go to their experts or after they have
come back. Between there and here rank columns travel the way that the rows do; their sums over a
row's experts are the combine's, in fp32 by ascending expert. What tensor parallelism makes partial
(columns of s where experts are cut, rows of x where each rank sends its own) is summed where the
rows' results are, and gradients of shared factors once an optimizer step.

Shapes: T rows here, R = T K of them at all experts, Q rows at those of this rank, H hidden
features, N and K features inside an expert, C rank columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns
from tlora_megatron.ops.experts.factors import OuterFactors
from tlora_megatron.ops.experts.outer import add_gradients, expand, scale, shrink
from tlora_megatron.ops.experts.rows import ExpertRows
from tlora_megatron.parallel.expert_exchange import Journey


class FirstSaved(NamedTuple):
    """What backward of the first linear needs."""

    x_TH: Tensor
    u_QC: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OuterCall:
    """The adapters' part of one call; every rank of the exchange makes the same of its methods."""

    first: OuterFactors | None
    """Those on gate and up; None = no adapter has some."""
    second: OuterFactors | None
    """Those on down."""
    rows: ExpertRows
    journey: Journey
    tokens: ExpertRuns
    """The adapters' rows here."""

    def add_to_first(self, x_TH: Tensor, y_QN: Tensor) -> FirstSaved | None:
        """Adds to the first linear's output; collective where experts are on several ranks."""
        if self.first is None:
            return None
        u_TC = shrink(x_TH, self.tokens, self.first.shared, self.first.width)
        u_QC = self._there(scale(u_TC, self.tokens, self.first))
        expand(u_QC, y_QN, self.journey.runs, self.first.own)
        return FirstSaved(x_TH, u_QC)

    def first_back(self, dy_QN: Tensor, dx_TH: Tensor, saved: FirstSaved | None) -> None:
        """Adds to dx of the rows here, and to gradients; collective likewise."""
        if self.first is None:
            return
        assert saved is not None, "from `add_to_first`"
        runs, own, shared = self.journey.runs, self.first.own, self.first.shared
        add_gradients(saved.u_QC, dy_QN, runs, own)
        du_QC = shrink(dy_QN, runs, own, self.first.width)
        du_TC = scale(self._back(du_QC), self.tokens, self.first)
        add_gradients(du_TC, saved.x_TH, self.tokens, shared)
        expand(du_TC, dx_TH, self.tokens, shared)

    def sum_second(self, h_QK: Tensor) -> Tensor | None:
        """Returns s, scaled, summed over each row's experts; collective likewise."""
        if self.second is None:
            return None
        s_QC = shrink(h_QK, self.journey.runs, self.second.own, self.second.width)
        return scale(self._back(s_QC), self.tokens, self.second)

    def add_to_second(self, s_TC: Tensor | None, y_TH: Tensor) -> None:
        """Adds to the experts' summed output.

        Args:
            s_TC: from `sum_second`.
        """
        if self.second is not None and s_TC is not None:
            expand(s_TC, y_TH, self.tokens, self.second.shared)

    def second_back(
        self, dy_TH: Tensor, dh_QK: Tensor, h_QK: Callable[[], Tensor], s_TC: Tensor | None
    ) -> None:
        """Adds to dh of the experts' rows, and to gradients; collective.

        Args:
            h_QK: returns what `sum_second` was given.
            s_TC: from there.
        """
        if self.second is None:
            return
        assert s_TC is not None, "from `sum_second`"
        runs, own, shared = self.journey.runs, self.second.own, self.second.shared
        add_gradients(s_TC, dy_TH, self.tokens, shared)
        ds_TC = shrink(dy_TH, self.tokens, shared, self.second.width)
        ds_QC = self._there(scale(ds_TC, self.tokens, self.second))
        add_gradients(ds_QC, h_QK(), runs, own)
        expand(ds_QC, dh_QK, runs, own)

    def _there(self, columns_TC: Tensor) -> Tensor:
        return self.journey.there(self.rows.spread(columns_TC))

    def _back(self, columns_QC: Tensor) -> Tensor:
        return self.rows.sum(self.journey.back(columns_QC))
