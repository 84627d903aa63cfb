"""One step of generation: new tokens of many sequences through the model, and their next tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tlora_megatron.integrations.megatron.decoder import Decoder, DecodeView
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
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.decoding_ops import attend_cached
from tlora_megatron.ops.frozen.parts import HeadNorms, Vjp
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.lora.kernel_choice import runs_triton
from tlora_megatron.ops.routing import MicroBatchView, use_micro_batch

logger = logging.getLogger(__name__)


class CachedCoreAttention(PackedCoreAttention):
    """Mixin: in a view of sequences that grow, keys and values go to a cache and come from it.

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
        if isinstance(micro_batch, DecodeView | GrowingView):
            new_T = micro_batch.new_rows(k_TGD.device)
            keys, values = micro_batch.cache.write(self.tlora_layer, k_TGD, v_TGD, new_T)
            if isinstance(micro_batch, DecodeView):
                out_TND = attend_cached(q_TND, keys, values, micro_batch.spans, self.scale)
                return out_TND.reshape(len(q_TND), 1, -1)
            rows_K = micro_batch.key_rows(k_TGD.device)
            k_TGD, v_TGD = keys[rows_K], values[rows_K]
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

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        bank: AdapterBank,
        *,
        cache_bytes: int,
        step_tokens: int,
    ) -> None:
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
        self.runs_ahead = self.device.type == "cuda"
        """True if `step` comes back before it is computed."""
        self.decoder: Decoder | None = None
        """Of steps of single tokens; None = they are computed as others are."""
        if spec.experts is not None or not runs_triton(weight):
            why = "there is no GPU with Triton" if spec.experts is None else "the base has experts"
            logger.info("decoding runs without CUDA graphs: %s", why)
        else:
            self.decoder = Decoder(self._hidden, self.cache, bank, records=True)

    @torch.no_grad()
    def step(self, growths: Sequence[Growth], num_slots: int) -> Tensor:
        """Computes new tokens; returns their hidden states `[T, H]`, behind the last norm.

        Args:
            growths: in ascending order of slot, not empty.
        """
        if self.decoder is not None and all(len(growth.tokens) == 1 for growth in growths):
            return self.decoder.step(growths, num_slots)
        view = growing_view(growths, self.cache, num_slots=num_slots, row_budget=self.step_tokens)
        tokens_T = torch.tensor([token for growth in growths for token in growth.tokens])
        return self._hidden(view, to_device(tokens_T, self.device))

    def _hidden(self, view: MicroBatchView, tokens_T: Tensor) -> Tensor:
        with use_micro_batch(view):
            hidden = self.model.embedding(
                input_ids=tokens_T[None], position_ids=view.positions(self.device)[None]
            )
            return self.model.decoder(hidden_states=hidden, attention_mask=None).flatten(0, -2)

    @torch.no_grad()
    def logits(self, hidden_nH: Tensor) -> Tensor:
        """Logits of some rows' next tokens, fp32 `[n, vocabulary]`."""
        weight_VH = self.model.output_layer.weight
        return (hidden_nH @ weight_VH.t())[:, : self.spec.vocab_size].float()
