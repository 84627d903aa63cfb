"""Causal attention inside the documents of a packed micro-batch, by flash attention on GPUs.

Semantics, for a query i of head n that sees the keys J(i) = {j <= i, j > i - window}:

    p[i, j] = exp(s[i, j]) / (exp(sink[n]) + sum over J(i) of exp(s[i, j]))

The sink's own share is dropped, so a row of p sums to less than 1. From attention without sinks,
whose logarithm of the sum of exponentials is lse, it follows as

    out * sigmoid(lse - sink),    lse' = log(exp(lse) + exp(sink))

and the way back is that of attention without sinks, given this output and lse': it computes
p = exp(s - lse') and ds = p (dp - sum(dout * out)), which is the gradient of p above.

`torch.nn.attention.varlen` takes as many key-value heads as query heads before torch 2.12, so keys
and values would be repeated; the operators below it take groups.

Shapes: T query rows (local ones), K key rows in span order, N query heads, G key-value heads, D
head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.ops.frozen import flash4
from tlora_megatron.ops.frozen.attention_plan import classes_of
from tlora_megatron.ops.frozen.exact_attention import (
    BackwardCalls,
    backward_calls,
    backward_in_calls,
)
from tlora_megatron.ops.frozen.parts import Vjp, vjp_by_autograd
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import MicroBatchView


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """The keys that a query sees, and what takes a share of its softmax beside them."""

    window: int | None = None
    """Keys, its own included; None = all up to its own."""
    sinks_N: Tensor | None = None
    """A logit of each query head, in any dtype; None = there are none."""


WHOLE = Sight()
"""All keys up to the query's own, and nothing beside them."""


def attend_in_sight(
    q_TND: Tensor, k_KGD: Tensor, v_KGD: Tensor, scale: float, sight: Sight
) -> Tensor:
    """The definition for one document: attention `[T, N, D]`, differentiable; stores its scores.

    The last query sees the last key, as far as the window lets it.
    """
    rows, keys, groups = len(q_TND), len(k_KGD), k_KGD.shape[1]
    q_GRTD = q_TND.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    scores_GRTK = q_GRTD @ k_KGD.permute(1, 2, 0)[:, None] * scale
    seen_TK = torch.ones(rows, keys, dtype=torch.bool, device=q_TND.device).tril(keys - rows)
    if sight.window is not None:
        seen_TK = seen_TK.triu(keys - rows - sight.window + 1)
    scores_GRTK = scores_GRTK.masked_fill(~seen_TK, float("-inf"))
    if sight.sinks_N is None:
        shares_GRTK = scores_GRTK.softmax(-1)
    else:
        sinks_GR11 = sight.sinks_N.to(scores_GRTK.dtype).view(groups, -1, 1, 1)
        beside = sinks_GR11.expand(*scores_GRTK.shape[:3], 1)
        shares_GRTK = torch.cat([scores_GRTK, beside], dim=-1).softmax(-1)[..., :-1]
    out_GRTD = shares_GRTK @ v_KGD.transpose(0, 1)[:, None]
    return out_GRTD.permute(2, 0, 1, 3).flatten(1, 2)


def with_sinks(out_TND: Tensor, lse_NT: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and the logarithm of the sum `[N, T]` with sinks, from those without.

    Given to attention's way back without sinks, they give the gradients with them.
    """
    sinks_N1 = sinks_N.to(lse_NT.dtype)[:, None]
    shares_NT = torch.sigmoid(lse_NT - sinks_N1)
    out = (out_TND * shares_NT.T[..., None]).to(out_TND.dtype)
    return out, torch.logaddexp(lse_NT, sinks_N1)


class CumulativeLengths(NamedTuple):
    """Begins of the spans' rows, int32 `[spans + 1]`, and the longest span."""

    queries: torch.Tensor
    keys: torch.Tensor
    max_queries: int
    max_keys: int
    backward_calls: BackwardCalls | None = None
    """Of torch's kernels; None = one call for all spans, in the fastest way."""
    is_exact: bool = False
    """A span's bits must not depend on the spans beside it."""


class Flash(NamedTuple):
    """Flash attention over spans of rows: bf16 or fp16 on CUDA, D a multiple of 8."""

    lengths: CumulativeLengths
    scale: float
    sight: Sight = WHOLE

    def forward(
        self, q_TND: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns what backward needs; the output is the fourth.

        It is queries, keys, values, the output, a number a query and head, and the state of a
        random generator that draws nothing. Output and number are those with sinks, if there are
        any.
        """
        out_TND, lse_NT, *random_state = torch.ops.aten._flash_attention_forward(
            q_TND,
            k_KGD,
            v_KGD,
            *self.lengths[:4],
            0.0,  # dropout
            True,  # causal
            False,  # return_debug_mask
            scale=self.scale,
            **self._window,
        )
        if self.sight.sinks_N is not None:
            out_TND, lse_NT = with_sinks(out_TND, lse_NT, self.sight.sinks_N)
        return q_TND, k_KGD, v_KGD, out_TND, lse_NT, *random_state[:2]

    def backward(
        self, dout_TND: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, keys and values."""
        *tensors, seed, offset = saved

        def kernel(
            dout: torch.Tensor, own: Sequence[torch.Tensor], *lengths: torch.Tensor | int
        ) -> tuple[torch.Tensor, ...]:
            return torch.ops.aten._flash_attention_backward(
                dout,
                *own,
                *lengths,
                0.0,  # dropout
                True,  # causal
                seed,
                offset,
                scale=self.scale,
                **self._window,
            )

        calls = self.lengths.backward_calls
        if calls is None:
            return kernel(dout_TND, tensors, *self.lengths[:4])
        return backward_in_calls(
            dout_TND,
            tensors,
            calls,
            lambda dout, own, begins, longest: kernel(dout, own, begins, begins, longest, longest),
        )

    def by_flash4(
        self, q_TND: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor
    ) -> torch.Tensor:
        """Returns attention `[T, N, D]`, differentiable, where `flash4` takes the queries."""
        begins, longest = self.lengths[:2], (self.lengths.max_queries, self.lengths.max_keys)
        return flash4.attend(
            q_TND,
            k_KGD,
            v_KGD,
            begins,
            longest,
            self.scale,
            self.sight.window,
            self.sight.sinks_N,
            is_exact=self.lengths.is_exact,
        )

    @property
    def _window(self) -> dict[str, int]:
        """The kernels' arguments: keys before a query's own, and behind it."""
        if self.sight.window is None:
            return {}
        return {"window_size_left": self.sight.window - 1, "window_size_right": 0}


def varlen_attention(
    q_TND: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor, flash: Flash
) -> torch.Tensor:
    """Returns attention `[T, N, D]`; a span's last query sees all keys, the one before all but one.

    The queries' gradients are added up by atomics, unless the lengths are exact, or
    `torch.use_deterministic_algorithms(True)` asks for the same bits every time: with torch's
    kernels that costs the backward 1.7x on ragged packed rows (H200, docs/measurements,
    frozen_parts).
    """
    if flash4.takes(q_TND, is_exact=flash.lengths.is_exact):
        return flash.by_flash4(q_TND, k_KGD, v_KGD)
    return _VarlenAttention.apply(q_TND, k_KGD, v_KGD, flash)


class _VarlenAttention(torch.autograd.Function):
    """Saves queries, keys, values, the output and a number a query and head."""

    @staticmethod
    def forward(
        ctx: Any, q_TND: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor, flash: Flash
    ) -> torch.Tensor:
        saved = flash.forward(q_TND, k_KGD, v_KGD)
        ctx.save_for_backward(*saved)
        ctx.flash = flash
        return saved[3]

    @staticmethod
    def backward(ctx: Any, dout_TND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.flash.backward(dout_TND, ctx.saved_tensors), None


def attend_documents(
    q_TND: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    micro_batch: MicroBatchView,
    scale: float,
    sight: Sight = WHOLE,
) -> torch.Tensor:
    """Returns attention `[T, N, D]` in which every query sees its own document up to itself.

    No score matrix is stored on CUDA in bf16 and fp16 (flash attention, head dimensions in eights);
    all else runs `scaled_dot_product_attention` a span.

    Args:
        k_KGD: in span order, as v; the local rows without context parallelism.
        sight: a window and sinks, if there are any.
    """
    if not runs_flash(q_TND):
        return attend_spans(q_TND, k_KGD, v_KGD, micro_batch, scale, sight)
    flash = Flash(_lengths(micro_batch, q_TND, k_KGD.shape[1]), scale, sight)
    return varlen_attention(q_TND, k_KGD, v_KGD, flash)


def attend_documents_vjp(
    q_TND: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    micro_batch: MicroBatchView,
    scale: float,
    sight: Sight = WHOLE,
) -> tuple[torch.Tensor, Vjp]:
    """Returns `attend_documents` and its vector-Jacobian product."""
    if runs_flash(q_TND):
        flash = Flash(_lengths(micro_batch, q_TND, k_KGD.shape[1]), scale, sight)
        if flash4.takes(q_TND, is_exact=flash.lengths.is_exact):
            return vjp_by_autograd(flash.by_flash4, q_TND, k_KGD, v_KGD)
        saved = flash.forward(q_TND, k_KGD, v_KGD)
        return saved[3], lambda dout_TND: flash.backward(dout_TND, saved)
    return vjp_by_autograd(
        lambda q, k, v: attend_spans(q, k, v, micro_batch, scale, sight), q_TND, k_KGD, v_KGD
    )


def runs_flash(q_TND: torch.Tensor) -> bool:
    """Returns True if flash attention takes such heads."""
    return q_TND.is_cuda and q_TND.dtype != torch.float32 and q_TND.shape[-1] % 8 == 0


def attend_spans(
    q_TND: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    micro_batch: MicroBatchView,
    scale: float,
    sight: Sight = WHOLE,
) -> torch.Tensor:
    """`attend_documents`, a call a span; any device and dtype."""
    spans = micro_batch.attention
    parts = zip(
        q_TND.split(spans.q_lens), k_KGD.split(spans.k_lens), v_KGD.split(spans.k_lens), strict=True
    )
    if sight is not WHOLE:
        return torch.cat([attend_in_sight(q, k, v, scale, sight) for q, k, v in parts])
    return torch.cat([_attend_one_span(q, k, v, scale) for q, k, v in parts])


def _attend_one_span(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    rows, keys = len(q), len(k)
    mask = None
    if rows < keys:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _lengths(micro_batch: MicroBatchView, q_TND: torch.Tensor, key_heads: int) -> CumulativeLengths:
    heads = (q_TND.shape[1], key_heads)
    return micro_batch.cached(
        f"attention.cumulative of {heads}", lambda: _cumulative_lengths(micro_batch, heads, q_TND)
    )


def _cumulative_lengths(
    micro_batch: MicroBatchView, heads: tuple[int, int], q_TND: torch.Tensor
) -> CumulativeLengths:
    device, is_exact = q_TND.device, micro_batch.exactness is not None
    spans = micro_batch.attention
    queries, keys = (
        to_device(torch.tensor((0, *lens)).cumsum(0).to(torch.int32), device)
        for lens in (spans.q_lens, spans.k_lens)
    )
    lengths = CumulativeLengths(
        queries, keys, max(spans.q_lens), max(spans.k_lens), is_exact=is_exact
    )
    if not is_exact or flash4.takes(q_TND, is_exact=True):
        return lengths
    calls = _backward_calls(micro_batch, heads, device)
    # Where all documents have one token the kernel would turn groups of heads into rows.
    longest = max(2, lengths.max_queries)
    return CumulativeLengths(queries, keys, longest, longest, calls, is_exact)


def _backward_calls(
    micro_batch: MicroBatchView, heads: tuple[int, int], device: torch.device
) -> BackwardCalls:
    exactness = micro_batch.exactness
    assert exactness is not None
    assert micro_batch.cp_size == 1, "context parallelism cuts documents by row number"
    documents = [piece.document for piece in micro_batch.pieces]
    return backward_calls(
        [document.length for document in documents],
        [document.slot == micro_batch.num_slots for document in documents],
        heads[0],
        classes_of(
            *heads,
            torch.cuda.get_device_properties(device).multi_processor_count,
            exactness.short_document,
            exactness.long_document,
        ),
        device,
        micro_batch.num_tokens,
    )
