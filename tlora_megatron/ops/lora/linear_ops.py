"""The interface of the multi-adapter linear, which torch, Triton and CUDA implement.

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

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from tlora_megatron.ops.lora.factors import SiteFactors
from tlora_megatron.ops.lora.rank_places import RankPlaces
from tlora_megatron.ops.routing.row_groups import RowGroups


class LinearOps(Protocol):
    """One way to compute the multi-adapter linear."""

    name: str

    def bind(self, factors: SiteFactors, rows: RowGroups) -> BoundLinear:
        """Returns the linear of these factors over these rows; costs next to nothing.

        A forward and its backward should share one: what both need is looked up once.
        """
        ...


class BoundLinear(ABC):
    """One multi-adapter linear over the rows of one micro-batch.

    It holds the rows, so nothing that the rows cache may hold it.
    """

    __slots__ = ("factors", "rows")

    def __init__(self, factors: SiteFactors, rows: RowGroups) -> None:
        self.factors = factors
        self.rows = rows

    def forward(
        self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns y `[T, N]` and s."""
        s = self.down(x_TK)
        return self.linear(x_TK, weight_NK, bias_N, s), s

    @abstractmethod
    def down(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Returns s alone, where ranks exchange it before `linear` or `up`."""

    @abstractmethod
    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        s: torch.Tensor,
    ) -> torch.Tensor:
        """Returns y `[T, N]` from s: what `forward` does after `down`."""

    @abstractmethod
    def up(self, s: torch.Tensor, base_WN: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
        """Returns `base + s B^T` of the rows `window[0]:window[1]`, in the dtype of the base.

        For a base that is computed elsewhere (`layers.black_box`); so is `branch_dgrad`.
        """

    @abstractmethod
    def branch_dgrad(self, ds: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
        """Returns `drop(dS A)` of the rows `window[0]:window[1]`, 0 in those without an adapter."""

    @abstractmethod
    def rank_places(self, parts: int = 1) -> RankPlaces:
        """Returns where the s of `down`, and the dS of `backward_up`, hold their values.

        Args:
            parts: ranks that share the rank rows of every adapter.
        """

    @abstractmethod
    def backward_up(self, dy_TN: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Returns dS, and may accumulate dB: otherwise `backward_down` does."""

    @abstractmethod
    def dgrad(self, dy_TN: torch.Tensor, ds: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Returns dx `[T, K]`."""

    @abstractmethod
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
