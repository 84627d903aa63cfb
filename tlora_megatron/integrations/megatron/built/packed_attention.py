"""Makes the attention of a model that someone else built end at document borders.

Core attention becomes `PackedCoreAttention`, for Megatron's local layers and Transformer Engine's
alike. Heads are still rotated by Megatron, by the model's own frequencies (base, percentage,
interleaving, scaling), which its rotary embedding now gives for the position of each token in its
document.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from torch import nn

from tlora_megatron.integrations.megatron.built.model import check_config, language_models
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "qk_clip": (False,),
    "log_max_attention_logit": (False,),
    "multi_latent_attention": (False,),
    "fused_single_qkv_rope": (False,),
}
_POSITIONS = ("rope", "yarn", "none")


def install_packed_attention(chunks: Sequence[nn.Module]) -> None:
    """Replaces every core attention and the rotary embedding, in place; a second time nothing.

    From then on the model runs inside `use_micro_batch(view)`, without attention mask and packed
    sequence parameters, on rows `[1, T]` of one context-parallel rank; Megatron's recompute works
    after `engine.install()`. With `context_parallel_size` above 1, Megatron's local spec must
    name `PackedCoreAttention` before the model is built: its own refuses to be.
    """
    for model in language_models(chunks):
        check_config(model.config, _REQUIRED)
        kind = model.position_embedding_type
        if kind not in _POSITIONS:
            raise ValueError(f"position_embedding_type must be one of {_POSITIONS}, got {kind!r}")
        for layer in model.decoder.layers:
            attention = getattr(layer, "self_attention", None)
            if isinstance(attention, SelfAttention):
                _replace_core(attention)
        if kind != "none":
            _replace_rotary(model.rotary_pos_emb)


def _replace_core(attention: Any) -> None:
    if isinstance(attention.core_attention, PackedCoreAttention):
        return
    core = PackedCoreAttention(
        attention.config,
        attention.layer_number,
        attention.attn_mask_type,
        attention.attention_type,
        softmax_scale=attention.config.softmax_scale,
        pg_collection=getattr(attention, "pg_collection", None),
    )
    attention.core_attention = core.train(attention.training)


class DocumentRotaryEmbedding(RotaryEmbedding):
    """A rotary embedding whose rows are those of each token's position in its document."""

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        """Returns angles of this rank's rows, `[T, 1, 1, dim]`; with YaRN its factor too."""
        view = current_micro_batch()
        if view is None:
            return super().forward(max_seq_len, *args, **kwargs)
        return self.of_view(view)

    def of_view(self, view: MicroBatchView) -> Any:
        """Returns what `forward` does for a micro-batch, the same object at every call."""
        # The module is kept beside the result, so its id is not given to another one.
        key = f"angles of {id(self)}"
        return view.cached(key, lambda: (self, self._of_documents(view)))[1]

    def _of_documents(self, view: MicroBatchView) -> Any:
        longest = max(document.length for document in view.documents)
        table = self.get_emb(longest)
        if isinstance(table, tuple):
            angles, factor = table
            return angles[view.positions(angles.device)], factor
        return table[view.positions(table.device)]


def _replace_rotary(rotary: RotaryEmbedding) -> None:
    if not isinstance(rotary, DocumentRotaryEmbedding):
        base: Any = type(rotary)
        rotary.__class__ = _document_class(base)


@functools.cache
def _document_class(base: type[RotaryEmbedding]) -> type[RotaryEmbedding]:
    return type(f"Document{base.__name__}", (DocumentRotaryEmbedding, base), {})
