"""The parts of a decoding step: by Triton's kernels on GPUs, elsewhere by their definitions."""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.ops.decoding import (
    KeySpans,
    SlotPlaces,
    SlotRuns,
    add_up_reference,
    attend_cached_reference,
    down_reference,
)
from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.lora.linear_ops import BoundLinear, LinearOps, SiteFactors


def attend_cached(
    q_TND: Tensor, k_CGD: Tensor, v_CGD: Tensor, spans: KeySpans, scale: float
) -> Tensor:
    """Returns attention `[T, N, D]` of each row to its own rows of a cache."""
    if not runs_triton(q_TND):
        return attend_cached_reference(q_TND, k_CGD, v_CGD, spans, scale)
    from tlora_megatron.ops.decoding_triton import launch_attention

    return launch_attention(q_TND.contiguous(), k_CGD, v_CGD, spans, scale)


class DecodingOps:
    """`LinearOps` that compute `SlotRuns` here, and other rows by other ones."""

    def __init__(self, others: LinearOps) -> None:
        self.name = others.name
        self._others = others

    def bind(self, factors: SiteFactors, rows: Any) -> BoundLinear:
        """Returns the linear of these factors over these rows."""
        if isinstance(rows, SlotRuns):
            return _DecodingLinear(factors, cast(Any, rows))
        return self._others.bind(factors, rows)


class _DecodingLinear(BoundLinear):
    """The base by a library's GEMM, the branch by kernels that read its factors once a run."""

    __slots__ = ()
    rows: Any

    def down(self, x_TK: Tensor, window: tuple[int, int] | None = None) -> Tensor:
        """Returns s as partial sums `[P, T, R]`, fp32."""
        if not self.factors.cached(SlotPlaces).width:  # no adapter is here
            return x_TK.new_empty(1, len(x_TK), 0)
        if not runs_triton(x_TK):
            return down_reference(x_TK, self.factors, self.rows)
        from tlora_megatron.ops.decoding_triton import launch_down

        return launch_down(x_TK.contiguous(), self.factors, self.rows)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, s: Tensor) -> Tensor:
        return self._add_up(F.linear(x_TK, weight_NK, bias_N), s)

    def rank_part(self, s: Tensor, bias_N: Tensor | None, num_columns: int) -> Tensor:
        y_TN = self.factors.lora_a.new_zeros(s.shape[1], num_columns)
        return self._add_up(y_TN if bias_N is None else y_TN + bias_N, s)

    def _add_up(self, y_TN: Tensor, s: Tensor) -> Tensor:
        if not s.numel():
            return y_TN
        if not runs_triton(y_TN):
            add_up_reference(y_TN, s, self.factors, self.rows)
            return y_TN
        from tlora_megatron.ops.decoding_triton import launch_up

        launch_up(y_TN, s, self.factors, self.rows)
        return y_TN

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a step of decoding must be of one process, and forward alone")

    up = branch_dgrad = rank_places = backward_up = dgrad = backward_down = _refuse
