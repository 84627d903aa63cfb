"""One step of generation: new tokens of many sequences through the model, and their next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.integrations.megatron.generation.cached_attention import cache_keys
from tlora_megatron.integrations.megatron.generation.growing_view import Growth, growing_view
from tlora_megatron.integrations.megatron.generation.key_cache import CacheShape, KeyCache
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import use_micro_batch


class Stepper:
    """Runs a backbone that was built for training, one process, over a cache.

    Args:
        model: a `GPTModel` of `integrations.megatron.model.build_backbone`, whose linears have
            adapters; its attention is changed in place, and trains no more.
        cache_bytes: memory of the cache.
        step_tokens: the most new tokens of a step.
    """

    def __init__(self, model: Any, spec: ModelSpec, *, cache_bytes: int, step_tokens: int) -> None:
        weight = model.output_layer.weight
        self.model = model
        self.spec = spec
        self.device = weight.device
        self.step_tokens = step_tokens
        shape = CacheShape(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=weight.dtype,
        )
        self.cache = KeyCache(shape, max(1, cache_bytes // shape.row_bytes), self.device)
        cache_keys(model)

    @torch.no_grad()
    def step(self, growths: Sequence[Growth], num_slots: int) -> Tensor:
        """Computes new tokens; returns their hidden states `[T, H]`, behind the last norm.

        Args:
            growths: in ascending order of slot, not empty.
            num_slots: of the bank now.
        """
        view = growing_view(growths, self.cache, num_slots=num_slots, row_budget=self.step_tokens)
        tokens_T = torch.tensor([token for growth in growths for token in growth.tokens])
        with use_micro_batch(view):
            hidden = self.model.embedding(
                input_ids=to_device(tokens_T, self.device)[None],
                position_ids=view.positions(self.device)[None],
            )
            return self.model.decoder(hidden_states=hidden, attention_mask=None).flatten(0, -2)

    @torch.no_grad()
    def logits(self, hidden_nH: Tensor) -> Tensor:
        """Logits of some rows' next tokens, fp32 `[n, vocabulary]`."""
        weight_VH = self.model.output_layer.weight
        return (hidden_nH @ weight_VH.t())[:, : self.spec.vocab_size].float()
