"""One step of generation: new tokens of many sequences through the model, and their next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.integrations.megatron.key_cache import (
    CacheShape,
    GrowingView,
    Growth,
    KeyCache,
    growing_view,
)
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.modules import mix
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import Rotary
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.parts import HeadNorms, Vjp
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.routing import MicroBatchView, use_micro_batch


class CachedCoreAttention(PackedCoreAttention):
    """Mixin: in a `GrowingView`, keys and values go to its cache and come from it.

    Queries and keys are rotated by their positions in the whole sequence before that. There is no
    way back through a step.
    """

    tlora_layer: int
    """Number of the layer in the cache."""

    def attend_projection_vjp(
        self,
        mixed: Tensor,
        groups: int,
        micro_batch: MicroBatchView,
        rotary: Rotary | None = None,
        norms: HeadNorms | None = None,
        column: Any = None,
    ) -> tuple[Tensor, Vjp]:
        """Does what `attend_projection` does; the vjp refuses."""
        return self.attend_projection(mixed, groups, rotary, norms).squeeze(1), _no_way_back

    def _attend(
        self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, micro_batch: MicroBatchView
    ) -> Tensor:
        if isinstance(micro_batch, GrowingView):
            device = k_TGD.device
            k_TGD, v_TGD = micro_batch.cache.extend(
                self.tlora_layer,
                k_TGD,
                v_TGD,
                micro_batch.new_rows(device),
                micro_batch.key_rows(device),
            )
        return super()._attend(q_TND, k_TGD, v_TGD, micro_batch)


def _no_way_back(*_: Any) -> Any:
    raise RuntimeError("a step of generation must not be gone back through")


class Stepper:
    """Runs a backbone that was built for training, one process, over a cache.

    Args:
        model: a `GPTModel` of `integrations.megatron.model.build_backbone`, whose linears have
            adapters; its attention is changed in place, and trains no more.
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
        for index, layer in enumerate(model.decoder.layers):
            core = layer.self_attention.core_attention
            mix(CachedCoreAttention, core)
            core.tlora_layer = index

    @torch.no_grad()
    def step(self, growths: Sequence[Growth], num_slots: int) -> Tensor:
        """Computes new tokens; returns their hidden states `[T, H]`, behind the last norm.

        Args:
            growths: in ascending order of slot, not empty.
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
