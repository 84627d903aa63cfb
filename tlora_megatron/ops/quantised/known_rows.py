"""A quantised weight together with the rows that it multiplies next.

Under sequence parallelism a linear has its own rows of x, and the codes of all ranks' rows: the
product is of those.

Shapes: T rows of the micro-batch, W of them on this rank, K features in, N features out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tlora_megatron.ops.quantised.rows import QuantRows
from tlora_megatron.ops.quantised.weight import QuantWeight

if TYPE_CHECKING:
    from tlora_megatron.ops.lora.cuda.calls import RankPart


@dataclass(frozen=True, slots=True, eq=False)
class KnownRows:
    """A base whose forward product is of given rows; a `FrozenBase`, with ranks as its weight.

    Of the x that its methods get, dtype and device count alone.
    """

    weight: QuantWeight
    rows: QuantRows
    """Those of x, as the weight's `rows_of` makes them."""

    @property
    def num_columns(self) -> int:
        """N."""
        return self.weight.num_columns

    def forward(self, x_WK: Tensor, onto_TN: Tensor | None = None) -> Tensor:
        """Returns the product `[T, N]`; added to `onto_TN`, in place, where there is one."""
        if onto_TN is None and self.takes_ranks(x_WK):
            return self.ranked_product(x_WK, None, None)
        return self.weight.product_of(self.rows, x_WK.dtype, onto_TN)

    def dgrad(self, dy_TN: Tensor, onto_TK: Tensor | None = None) -> Tensor:
        """Returns `dy W` `[T, K]`; added to `onto_TK`, in place, where there is one."""
        return self.weight.dgrad(dy_TN, onto_TK)

    def takes_ranks(self, x: Tensor) -> bool:
        """True if Hopper's GEMM of codes computes products of rows like x, adapters included."""
        return self.weight.takes_ranks(x)

    def prepare(self, x_WK: Tensor) -> None:
        """Does nothing: the codes are there."""

    def ranked_product(self, x_WK: Tensor, bias_N: Tensor | None, rank: RankPart | None) -> Tensor:
        """Returns the product `+ b + rank part` `[T, N]`; if `takes_ranks`."""
        from tlora_megatron.ops.quantised.cuda_products import product_of

        return product_of(self.rows, self.weight, x_WK.dtype, bias_N, rank)

    def ranked_dgrad(self, dy_TN: Tensor, rank: RankPart | None) -> Tensor:
        """Returns `dy W + mask(rank part)` `[T, K]`; if `takes_ranks`."""
        return self.weight.ranked_dgrad(dy_TN, rank)
