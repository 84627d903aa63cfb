"""An attention implementation for transformers that stays inside packed documents.

No mask is made and none is looked at: transformers' own packing by position_ids is silently lost to
an `attention_mask` of ones or a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from tlora_megatron.ops.frozen.packed_attention import attend_documents
from tlora_megatron.ops.routing import current_micro_batch

NAME = "tlora_packed"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of other attention implementations that this one does not support."""


def register() -> None:
    """Registers the implementation with transformers; without a mask function no mask is made."""
    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends within documents.

    Args:
        query: `[1, N, T, D]`, rotated.
        key: `[1, G, T, D]`, as `value`.
        attention_mask: None, since this implementation asks for none.

    Returns:
        `[1, T, N, D]`.
    """
    micro_batch = current_micro_batch()
    if micro_batch is None:
        raise RuntimeError(
            "a micro-batch must be bound by use_micro_batch, got none; for anything but training "
            'set the model back with set_attn_implementation("sdpa")'
        )
    if dropout:
        raise ValueError(f"attention dropout must be 0 in a frozen backbone, got {dropout}")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None in packed attention, got {type(module).__name__}"
            )
    q_TND, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_documents(q_TND, k_TGD, v_TGD, micro_batch, scale)[None], None
