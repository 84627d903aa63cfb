"""Core attention that sees the tokens of earlier steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tlora_megatron.integrations.megatron.generation.growing_view import GrowingView
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention, Rotary
from tlora_megatron.integrations.megatron.layer.mixing import mix
from tlora_megatron.ops.frozen.parts import Vjp
from tlora_megatron.ops.frozen.rms_norm import HeadNorms
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.ops.routing import MicroBatchView


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
        column: QuantWeight | None = None,
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


def cache_keys(model: Any) -> None:
    """Turns the core attention of all layers into a cached one, in place."""
    for index, layer in enumerate(model.decoder.layers):
        core = layer.self_attention.core_attention
        mix(CachedCoreAttention, core)
        core.tlora_layer = index
