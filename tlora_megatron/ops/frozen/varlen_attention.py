"""Causal attention inside packed documents by torch's flash attention, without its wrappers.

`torch.nn.attention.varlen` takes as many key-value heads as query heads before torch 2.12, so keys
and values would be repeated; the operators below it take groups.

Shapes: T query rows, K key rows, N query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tlora_megatron.ops.frozen.exact_attention import BackwardCalls, backward_in_calls
from tlora_megatron.ops.frozen.frozen_parts import Vjp
from tlora_megatron.ops.frozen.sight import WHOLE, Sight, with_sinks


class CumulativeLengths(NamedTuple):
    """Begins of the spans' rows, int32 `[spans + 1]`, and the longest span."""

    queries: torch.Tensor
    keys: torch.Tensor
    max_queries: int
    max_keys: int
    backward_calls: BackwardCalls | None = None
    """None = one call for all spans, in the fastest way."""


def varlen_attention(
    q_TND: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    lengths: CumulativeLengths,
    scale: float,
    sight: Sight = WHOLE,
) -> torch.Tensor:
    """Returns attention `[T, N, D]`; a span's last query sees all keys, the one before all but one.

    bf16 or fp16 on CUDA, D a multiple of 8. The queries' gradients are added up by atomics, unless
    the lengths have calls of `exact_attention`, or `torch.use_deterministic_algorithms(True)` asks
    for the same bits every time: on ragged packed rows that costs the backward 1.7x (H200,
    docs/measurements, frozen_parts).
    """
    return _VarlenAttention.apply(q_TND, k_KGD, v_KGD, lengths, scale, sight)


def varlen_attention_vjp(
    q_TND: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    lengths: CumulativeLengths,
    scale: float,
    sight: Sight = WHOLE,
) -> tuple[torch.Tensor, Vjp]:
    """Returns `varlen_attention` and its vector-Jacobian product."""
    saved = _forward(q_TND, k_KGD, v_KGD, lengths, scale, sight)
    return saved[3], lambda dout_TND: _backward(dout_TND, saved, lengths, scale, sight)


class _VarlenAttention(torch.autograd.Function):
    """Saves queries, keys, values, the output and a number a query and head."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TND: torch.Tensor,
        k_KGD: torch.Tensor,
        v_KGD: torch.Tensor,
        lengths: CumulativeLengths,
        scale: float,
        sight: Sight,
    ) -> torch.Tensor:
        saved = _forward(q_TND, k_KGD, v_KGD, lengths, scale, sight)
        ctx.save_for_backward(*saved)
        ctx.lengths, ctx.scale, ctx.sight = lengths, scale, sight
        return saved[3]

    @staticmethod
    def backward(ctx: Any, dout_TND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = _backward(dout_TND, ctx.saved_tensors, ctx.lengths, ctx.scale, ctx.sight)
        return *grads, None, None, None


def _forward(
    q_TND: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    lengths: CumulativeLengths,
    scale: float,
    sight: Sight,
) -> tuple[torch.Tensor, ...]:
    """Returns what backward needs; the output is the fourth.

    It is queries, keys, values, the output, a number a query and head, and the state of a random
    generator that draws nothing. Output and number are those with sinks, if there are any.
    """
    out_TND, lse_NT, *random_state = torch.ops.aten._flash_attention_forward(
        q_TND,
        k_KGD,
        v_KGD,
        *lengths[:4],
        0.0,  # dropout
        True,  # causal
        False,  # return_debug_mask
        scale=scale,
        **_window(sight),
    )
    if sight.sinks_N is not None:
        out_TND, lse_NT = with_sinks(out_TND, lse_NT, sight.sinks_N)
    return q_TND, k_KGD, v_KGD, out_TND, lse_NT, *random_state[:2]


def _window(sight: Sight) -> dict[str, int]:
    """The kernels' arguments: keys before a query's own, and behind it."""
    if sight.window is None:
        return {}
    return {"window_size_left": sight.window - 1, "window_size_right": 0}


def _backward(
    dout_TND: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    lengths: CumulativeLengths,
    scale: float,
    sight: Sight,
) -> tuple[torch.Tensor, ...]:
    *tensors, seed, offset = saved
    random_state, calls = (seed, offset), lengths.backward_calls
    window = _window(sight)
    if calls is None:
        return _backward_kernel(dout_TND, tensors, lengths[:4], random_state, scale, window)

    def kernel(
        dout: torch.Tensor, own: Sequence[torch.Tensor], cumulative: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, ...]:
        begins = (cumulative, cumulative, longest, longest)
        return _backward_kernel(dout, own, begins, random_state, scale, window)

    return backward_in_calls(dout_TND, tensors, calls, kernel)


def _backward_kernel(
    dout_TND: torch.Tensor,
    saved: Sequence[torch.Tensor],
    lengths: tuple[torch.Tensor, torch.Tensor, int, int],
    random_state: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    window: dict[str, int],
) -> tuple[torch.Tensor, ...]:
    return torch.ops.aten._flash_attention_backward(
        dout_TND,
        *saved,
        *lengths,
        0.0,  # dropout
        True,  # causal
        *random_state,
        scale=scale,
        **window,
    )
