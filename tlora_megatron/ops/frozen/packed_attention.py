"""Causal attention inside the documents of a packed micro-batch.

Shapes: T local rows, K key rows in span order, N query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tlora_megatron.ops.frozen.exact_attention import BackwardCalls, backward_calls, classes_on
from tlora_megatron.ops.frozen.parts import Vjp, vjp_by_autograd
from tlora_megatron.ops.frozen.varlen_attention import (
    WHOLE,
    CumulativeLengths,
    Sight,
    attend_in_sight,
    varlen_attention,
    varlen_attention_vjp,
)
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import MicroBatchView


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
    attend = attend_varlen if runs_flash(q_TND) else attend_spans
    return attend(q_TND, k_KGD, v_KGD, micro_batch, scale, sight)


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
        lengths = _lengths(micro_batch, q_TND, k_KGD.shape[1])
        return varlen_attention_vjp(q_TND, k_KGD, v_KGD, lengths, scale, sight)

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


def attend_varlen(
    q_TND: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    micro_batch: MicroBatchView,
    scale: float,
    sight: Sight = WHOLE,
) -> torch.Tensor:
    """`attend_documents` in one flash-attention kernel."""
    lengths = _lengths(micro_batch, q_TND, k_KGD.shape[1])
    return varlen_attention(q_TND, k_KGD, v_KGD, lengths, scale, sight)


def _lengths(micro_batch: MicroBatchView, q_TND: torch.Tensor, key_heads: int) -> CumulativeLengths:
    heads, device = (q_TND.shape[1], key_heads), q_TND.device
    return micro_batch.cached(
        f"attention.cumulative of {heads}", lambda: _cumulative_lengths(micro_batch, heads, device)
    )


def _cumulative_lengths(
    micro_batch: MicroBatchView, heads: tuple[int, int], device: torch.device
) -> CumulativeLengths:
    spans = micro_batch.attention
    queries, keys = (
        to_device(torch.tensor((0, *lens)).cumsum(0).to(torch.int32), device)
        for lens in (spans.q_lens, spans.k_lens)
    )
    lengths = CumulativeLengths(queries, keys, max(spans.q_lens), max(spans.k_lens))
    if micro_batch.exactness is None:
        return lengths
    calls = _backward_calls(micro_batch, heads, device)
    # Where all documents have one token the kernel would turn groups of heads into rows.
    longest = max(2, lengths.max_queries)
    return CumulativeLengths(queries, keys, longest, longest, calls)


def _backward_calls(
    micro_batch: MicroBatchView, heads: tuple[int, int], device: torch.device
) -> BackwardCalls:
    assert micro_batch.exactness is not None
    assert micro_batch.cp_size == 1, "context parallelism cuts documents by row number"
    documents = [piece.document for piece in micro_batch.pieces]
    return backward_calls(
        [document.length for document in documents],
        [document.slot == micro_batch.num_slots for document in documents],
        heads[0],
        classes_on(*heads, micro_batch.exactness, device),
        device,
        micro_batch.num_tokens,
    )
