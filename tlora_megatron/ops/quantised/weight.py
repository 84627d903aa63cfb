"""The products of a frozen weight in FP8, both ways from one copy of codes.

Shapes: T rows, K features in, N features out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.quantised.definition import forward_product, input_gradient
from tlora_megatron.ops.quantised.handed_rows import hand_rows
from tlora_megatron.ops.quantised.rows import QuantRows, encode_rows
from tlora_megatron.ops.quantised.weight_codes import WeightCodes

if TYPE_CHECKING:
    from tlora_megatron.ops.lora.cuda.calls import RankPart


@dataclass(frozen=True, slots=True, eq=False)
class QuantWeight(WeightCodes):
    """A weight in FP8 that computes its products by the kernels at hand; a `FrozenBase`."""

    def takes_ranks(self, x: Tensor) -> bool:
        """True if Hopper's GEMM of codes computes products of rows like x, adapters included."""
        if not x.is_cuda:
            return False
        # Not at the top: on machines without a GPU nothing of it is needed.
        from tlora_megatron.ops.quantised.cuda_products import takes

        return takes(x, self)

    def prepare(self, x_TK: Tensor) -> None:
        """Leaves the codes of x on it, for `ranked_product` to take."""
        if not x_TK.is_inference():
            hand_rows(x_TK, self.rows_of(x_TK))

    def ranked_product(self, x_TK: Tensor, bias_N: Tensor | None, rank: RankPart | None) -> Tensor:
        """Returns `x W^T + b + rank part` `[T, N]`; if `takes_ranks`."""
        from tlora_megatron.ops.quantised.cuda_products import product

        return product(x_TK, self, bias_N, rank)

    def ranked_dgrad(self, dy_TN: Tensor, rank: RankPart | None) -> Tensor:
        """Returns `dy W + mask(rank part)` `[T, K]`; if `takes_ranks`."""
        from tlora_megatron.ops.quantised.cuda_dgrad import dgrad_with_ranks

        return dgrad_with_ranks(dy_TN, self, rank)

    def forward(self, x_TK: Tensor, onto_TN: Tensor | None = None) -> Tensor:
        """Returns `x W^T` `[T, N]`; added to `onto_TN`, in place, where there is one."""
        if onto_TN is None and self.takes_ranks(x_TK):
            return self.ranked_product(x_TK, None, None)
        return self.product_of(self.rows_of(x_TK), x_TK.dtype, onto_TN)

    def product_of(self, rows: QuantRows, dtype: torch.dtype, onto_TN: Tensor | None) -> Tensor:
        """Returns the product of rows that `rows_of` has made of x in `dtype`; see `forward`."""
        if _runs_kernels(rows.codes_TK, dtype):
            # Not at the top: triton is only there on machines with a GPU.
            from tlora_megatron.ops.quantised.triton_products import launch_forward

            return launch_forward(rows, self.codes_NK, self.scales, dtype, onto_TN)
        y_TN = forward_product(rows, self.codes_NK, self.scales, dtype)
        return _rounded(y_TN, dtype, onto_TN)

    def dgrad(self, dy_TN: Tensor, onto_TK: Tensor | None = None) -> Tensor:
        """Returns `dy W` `[T, K]`; added to `onto_TK`, in place, where there is one."""
        if onto_TK is None and self.takes_ranks(dy_TN):
            return self.ranked_dgrad(dy_TN, None)
        rows = self.gradient_rows_of(dy_TN)
        if _runs_kernels(dy_TN, dy_TN.dtype):
            from tlora_megatron.ops.quantised.triton_products import launch_input_gradient

            return launch_input_gradient(rows, self.codes_NK, self.scales, dy_TN.dtype, onto_TK)
        dx_TK = input_gradient(rows, self.codes_NK, self.scales, dy_TN.dtype)
        return _rounded(dx_TK, dy_TN.dtype, onto_TK)


def encode_weight(w_NK: Tensor) -> QuantWeight:
    """Quantises a weight with a scale for each output channel.

    Args:
        w_NK: with whole rows: a part of them, as tensor parallelism cuts row-parallel linears,
            would get other scales.
    """
    rows = encode_rows(w_NK)
    return QuantWeight(rows.codes_TK, rows.scales)


def _runs_kernels(x: Tensor, dtype: torch.dtype) -> bool:
    """Returns True for rows on GPUs, unless their products are to be in fp64."""
    return runs_triton(x) and dtype != torch.float64


def _rounded(wide: Tensor, dtype: torch.dtype, onto: Tensor | None) -> Tensor:
    return wide.to(dtype) if onto is None else onto.copy_(wide + onto)
