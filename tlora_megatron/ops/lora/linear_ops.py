"""What a multi-adapter linear computes, whoever computes it: torch, Triton or CUDA.

Semantics, for a row t of slot i with drop(x) recomputed wherever it is named:

    s[t]  = scaling_i * drop(x[t]) A_i^T
    y[t]  = x[t] W^T + b + s[t] B_i^T
    dS[t] = scaling_i * dy[t] B_i
    dB_i += sum over rows t of i: dy[t]^T s[t]
    dA_i += sum over rows t of i: dS[t]^T drop(x[t])
    dx[t] = dy[t] W + drop(dS[t] A_i)

Rows of the null slot have no adapter: y = x W^T + b. Sums are in fp32, in a fixed order that
depends on the slot's own rows alone. `s` and `dS` are opaque tensors, linear in x and dy: only the
same implementation reads them, and a sum of dS over ranks is a sum of tensors. Nothing here waits
for the device.

Shapes: T rows, K features in, N features out; x, dy and W are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.rank_places import RankPlaces
from tlora_megatron.ops.routing.row_groups import RowGroups


class BoundLinear(Protocol):
    """One multi-adapter linear over the rows of one micro-batch."""

    @property
    def factors(self) -> SiteFactors:
        """The linear's adapter weights and gradients."""
        ...

    @property
    def rows(self) -> RowGroups:
        """The micro-batch's rows, grouped by adapter."""
        ...

    def forward(
        self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns y `[T, N]` and s."""
        ...

    def down(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Returns s alone, where ranks exchange it before `linear` or `up`."""
        ...

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        s: torch.Tensor,
    ) -> torch.Tensor:
        """Returns y `[T, N]` from s: what `forward` does after `down`."""
        ...

    def up(self, s: torch.Tensor, base_WN: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
        """Returns `base + s B^T` of the rows `window[0]:window[1]`, in the dtype of the base.

        For a base that is computed elsewhere (`layers.black_box`); so is `branch_dgrad`.
        """
        ...

    def branch_dgrad(self, ds: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
        """Returns `drop(dS A)` of the rows `window[0]:window[1]`, 0 in those without an adapter."""
        ...

    def rank_places(self, parts: int = 1) -> RankPlaces:
        """Returns where the s of `down`, and the dS of `backward_up`, hold their values.

        Args:
            parts: ranks that share the rank rows of every adapter.
        """
        ...

    def backward_up(self, dy_TN: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Returns dS, and may accumulate dB: otherwise `backward_down` does."""
        ...

    def dgrad(self, dy_TN: torch.Tensor, ds: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Returns dx `[T, K]`."""
        ...

    def backward_down(
        self,
        x_TK: torch.Tensor,
        dy_TN: torch.Tensor,
        s: torch.Tensor,
        ds: torch.Tensor,
        window: tuple[int, int],
        up: BoundLinear | None = None,
    ) -> None:
        """Accumulates dA over the rows `window[0]:window[1]`, which are all that x holds.

        It also accumulates dB over all rows if `backward_up` did not. Both methods must be called
        once, in this order.

        Args:
            up: the value whose `backward_up` returned dS, if it was another than this one.
        """
        ...


class LinearOps(Protocol):
    """One way to compute the multi-adapter linear."""

    name: str

    def bind(self, factors: SiteFactors, rows: RowGroups) -> BoundLinear:
        """Returns the linear of these factors over these rows; costs next to nothing."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PairLinear:
    """A `BoundLinear` that calls the methods of an implementation with the pair."""

    ops: PairOps
    factors: SiteFactors
    rows: RowGroups

    def forward(
        self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns y `[T, N]` and s."""
        return self.ops.forward(x_TK, weight_NK, bias_N, self.factors, self.rows)

    def down(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Returns s."""
        return self.ops.down(x_TK, self.factors, self.rows)

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        s: torch.Tensor,
    ) -> torch.Tensor:
        """Returns y `[T, N]`."""
        return self.ops.linear(x_TK, weight_NK, bias_N, s, self.factors, self.rows)

    def up(self, s: torch.Tensor, base_WN: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
        """Returns `base + s B^T` of a window of rows."""
        return self.ops.up(s, base_WN, self.factors, self.rows, window)

    def branch_dgrad(self, ds: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
        """Returns `drop(dS A)` of a window of rows."""
        return self.ops.branch_dgrad(ds, self.factors, self.rows, window)

    def rank_places(self, parts: int = 1) -> RankPlaces:
        """Returns where s and dS hold their values."""
        return self.ops.rank_places(self.factors, self.rows, parts)

    def backward_up(self, dy_TN: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Returns dS."""
        return self.ops.backward_up(dy_TN, s, self.factors, self.rows)

    def dgrad(self, dy_TN: torch.Tensor, ds: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Returns dx `[T, K]`."""
        return self.ops.dgrad(dy_TN, ds, weight_NK, self.factors, self.rows)

    def backward_down(
        self,
        x_TK: torch.Tensor,
        dy_TN: torch.Tensor,
        s: torch.Tensor,
        ds: torch.Tensor,
        window: tuple[int, int],
        up: BoundLinear | None = None,
    ) -> None:
        """Accumulates the gradients that are still missing."""
        up_factors = None if up is None else up.factors
        self.ops.backward_down(x_TK, dy_TN, s, ds, self.factors, self.rows, window, up_factors)


class PairOps(Protocol):
    """The methods that `PairLinear` calls."""

    def forward(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns y `[T, N]` and s."""
        ...

    def down(self, x_TK: torch.Tensor, factors: SiteFactors, rows: RowGroups) -> torch.Tensor:
        """Returns s alone, where ranks exchange it before `linear` or `up`."""
        ...

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        s: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> torch.Tensor:
        """Returns y `[T, N]` from s: what `forward` does after `down`."""
        ...

    def up(
        self,
        s: torch.Tensor,
        base_WN: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
        window: tuple[int, int],
    ) -> torch.Tensor:
        """Returns `base + s B^T` of the rows `window[0]:window[1]`, in the dtype of the base.

        For a base that is computed elsewhere (`layers.black_box`); so is `branch_dgrad`.
        """
        ...

    def branch_dgrad(
        self,
        ds: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
        window: tuple[int, int],
    ) -> torch.Tensor:
        """Returns `drop(dS A)` of the rows `window[0]:window[1]`, 0 in those without an adapter."""
        ...

    def rank_places(self, factors: SiteFactors, rows: RowGroups, parts: int = 1) -> RankPlaces:
        """Where the s of `down`, and the dS that `backward_up` makes of it, hold their values.

        Args:
            parts: ranks that share the rank rows of every adapter.
        """
        ...

    def backward_up(
        self, dy_TN: torch.Tensor, s: torch.Tensor, factors: SiteFactors, rows: RowGroups
    ) -> torch.Tensor:
        """Returns dS, and may accumulate dB: otherwise `backward_down` does."""
        ...

    def dgrad(
        self,
        dy_TN: torch.Tensor,
        ds: torch.Tensor,
        weight_NK: torch.Tensor,
        factors: SiteFactors,
        rows: RowGroups,
    ) -> torch.Tensor:
        """Returns dx `[T, K]`."""
        ...

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
        """Accumulates dA over the rows `window[0]:window[1]`, which are all that x holds.

        And dB over all rows, if `backward_up` did not: both are called once, in this order.

        Args:
            up_factors: those that `backward_up` was given, if others than these.
        """
        ...
