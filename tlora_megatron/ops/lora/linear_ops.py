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

A base that quantises (`ops.quantised`) multiplies rounded rows in place of x and dy in the base's
two products, and nothing else changes: s, dS, dA and dB are made of x and dy as they are.

Shapes: T rows, K features in, N features out; x, dy and W are contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

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


class FrozenBase(Protocol):
    """A frozen linear without bias whose products another library computes."""

    @property
    def num_columns(self) -> int:
        """N."""
        ...

    def forward(self, x_TK: Tensor, onto_TN: Tensor | None) -> Tensor:
        """Returns `x W^T` `[T, N]`; added to `onto_TN`, in place, where there is one."""
        ...

    def dgrad(self, dy_TN: Tensor, onto_TK: Tensor | None) -> Tensor:
        """Returns `dy W` `[T, K]`; added to `onto_TK`, in place, where there is one."""
        ...


Base = Tensor | FrozenBase
"""The base of a linear: its weight `[N, K]`, or what computes with it."""


def base_product(base: Base, x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Returns `x W^T + b` `[T, N]`, without adapters."""
    y_TN = x_TK.matmul(base.t()) if isinstance(base, Tensor) else base.forward(x_TK, None)
    return y_TN if bias_N is None else y_TN + bias_N


def base_dgrad(base: Base, dy_TN: Tensor) -> Tensor:
    """Returns `dy W` `[T, K]`, without adapters."""
    return dy_TN.matmul(base) if isinstance(base, Tensor) else base.dgrad(dy_TN, None)


class BoundLinear(ABC):
    """One multi-adapter linear over the rows of one micro-batch.

    It holds the rows, so nothing that the rows cache may hold it.
    """

    __slots__ = ("factors", "rows")

    def __init__(self, factors: SiteFactors, rows: RowGroups) -> None:
        self.factors = factors
        self.rows = rows

    def forward(
        self, x_TK: torch.Tensor, base: Base, bias_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns y `[T, N]` and s."""
        s = self.down(x_TK)
        return self.product(x_TK, base, bias_N, s), s

    def product(
        self, x_TK: torch.Tensor, base: Base, bias_N: torch.Tensor | None, s: torch.Tensor
    ) -> torch.Tensor:
        """Returns y `[T, N]` from s, of any base."""
        if isinstance(base, Tensor):
            return self.linear(x_TK, base, bias_N, s)
        if not s.numel():
            return base_product(base, x_TK, bias_N)
        return base.forward(x_TK, self.rank_part(s, bias_N, base.num_columns))

    def product_dgrad(self, dy_TN: torch.Tensor, ds: torch.Tensor, base: Base) -> torch.Tensor:
        """Returns dx `[T, K]`, of any base."""
        if isinstance(base, Tensor):
            return self.dgrad(dy_TN, ds, base)
        onto_TK = self.branch_dgrad(ds, (0, len(dy_TN))) if ds.numel() else None
        return base.dgrad(dy_TN, onto_TK)

    @abstractmethod
    def down(self, x_TK: torch.Tensor, window: tuple[int, int] | None = None) -> torch.Tensor:
        """Returns s alone, where ranks exchange it before `linear` or `up`.

        Args:
            window: x holds the rows `window[0]:window[1]` alone, and s is 0 in the others: sums of
                s over windows are s, to the bit. None = x holds all rows.
        """

    @abstractmethod
    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        s: torch.Tensor,
    ) -> torch.Tensor:
        """Returns y `[T, N]` from s: what `forward` does after `down`, of a base's weight."""

    @abstractmethod
    def rank_part(
        self, s: torch.Tensor, bias_N: torch.Tensor | None, num_columns: int
    ) -> torch.Tensor:
        """Returns `b + s B^T` `[T, N]`, for a base that adds its product to it."""

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
