"""Causal attention inside the documents of a packed micro-batch, without Transformer Engine.

Shapes: T local rows, K gathered key rows, N query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.norm_and_rotary import PackedRotaryEmbedding, Rotary
from tlora_megatron.integrations.megatron.process_groups import groups_by_size
from tlora_megatron.model.spec import GptOssAttention
from tlora_megatron.ops.frozen.packed_attention import (
    WHOLE,
    Sight,
    attend_documents,
    attend_documents_vjp,
)
from tlora_megatron.ops.frozen.parts import HeadNorms, Vjp, vjp_by_autograd
from tlora_megatron.ops.frozen.rotary import unpack_qkv, unpack_qkv_vjp
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.ops.quantised.weight import QuantWeight
from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch


class PackedCoreAttention(MegatronModule):
    """Core attention in Megatron's plain `[T, 1, N, D]` layout; document borders come from the
    bound micro-batch.

    The constructor is that of Megatron's `DotProductAttention`, and the rotary embedding, which is
    applied here: None where the caller has rotated queries and keys. No score matrix is stored on
    CUDA in bf16 and fp16 (flash attention, head dimensions in eights); all else runs
    `scaled_dot_product_attention` a span. With gpt-oss' attention, its layer's window and sinks
    narrow it; sinks are a frozen parameter of this rank's heads.

    Layout in: local rows; out: the same. Forward under context parallelism: one all-gather of keys
    and values; backward: one reduce-scatter of their gradients.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        rotary: PackedRotaryEmbedding | None = None,
        gpt_oss: GptOssAttention | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0.0:
            raise ValueError(f"attention_dropout must be 0 in a frozen backbone, got {dropout}")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.rotary = rotary
        self.window: int | None = None
        self.sinks: nn.Parameter | None = None
        if gpt_oss is not None:
            self.window = gpt_oss.windows[layer_number - 1]
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
            self.sinks = nn.Parameter(torch.empty(heads, **place), requires_grad=False)
        self.cp_groups: dict[int, Any] = {}
        if config.context_parallel_size > 1:
            whole = getattr(pg_collection, "cp", None)
            whole = whole or parallel_state.get_context_parallel_group()
            self.cp_groups = groups_by_size(whole, config.context_parallel_size)

    @property
    def sight(self) -> Sight:
        """The window and the sinks."""
        if self.window is None and self.sinks is None:
            return WHOLE
        return Sight(window=self.window, sinks_N=self.sinks)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Checkpoints of Transformer Engine's attention hold its FP8 state, empty without FP8.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attends within documents.

        Args:
            query: `[T, 1, N, D]`.
            key: `[T, 1, G, D]`, as `value`.
            attention_mask: must be None, like `attention_bias` and `packed_seq_params`: the
                micro-batch's documents decide who sees whom.

        Returns:
            `[T, 1, N * D]`.
        """
        micro_batch = _bound_micro_batch()
        if any(x is not None for x in (attention_mask, attention_bias, packed_seq_params)):
            raise ValueError("attention_mask, attention_bias and packed_seq_params must be None")
        if self.rotary is not None:
            query, key = self.rotary(query, micro_batch), self.rotary(key, micro_batch)
        q_TND, k_TGD, v_TGD = (x.squeeze(1) for x in (query, key, value))
        return self._attend(q_TND, k_TGD, v_TGD, micro_batch)

    def attend_projection(
        self,
        mixed: Tensor,
        groups: int,
        rotary: Rotary | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Attends within documents, straight from Megatron's fused projection.

        Args:
            mixed: `[T, 1, G (N / G + 2) D]`: of each group its queries, its key, its value.
            groups: G on this rank.
            rotary: None = the core's own.
            norms: of queries and keys, before they turn.

        Returns:
            `[T, 1, N * D]`.
        """
        rotary = rotary or self.rotary
        assert rotary is not None, "heads that were rotated are not in a projection"
        micro_batch = _bound_micro_batch()
        mixed_TGMD = mixed.view(len(mixed), groups, -1, self.config.kv_channels)
        cos_TD, sin_TD = rotary.cos_sin(mixed, micro_batch)
        return self._attend(*unpack_qkv(mixed_TGMD, cos_TD, sin_TD, norms), micro_batch)

    def attend_projection_vjp(
        self,
        mixed: Tensor,
        groups: int,
        micro_batch: MicroBatchView,
        rotary: Rotary | None = None,
        norms: HeadNorms | None = None,
        column: QuantWeight | None = None,
    ) -> tuple[Tensor, Vjp]:
        """Does what `attend_projection` does, for callers without autograd.

        Under context parallelism keys are gathered by autograd's functions, and so the vjp is a
        graph of its own.

        Args:
            column: the projection, if it is quantised: its gradient carries FP8 codes.

        Returns:
            `[T, N * D]` of `[T, G (N / G + 2) D]`, and its vjp.
        """
        rotary = rotary or self.rotary
        assert rotary is not None, "heads that were rotated are not in a projection"
        if micro_batch.cp_size > 1:
            return vjp_by_autograd(
                lambda x: self.attend_projection(x, groups, rotary, norms).squeeze(1), mixed
            )
        shape = mixed.shape
        cos_TD, sin_TD = rotary.cos_sin(mixed, micro_batch)
        mixed_TGMD = mixed.view(shape[0], groups, -1, self.config.kv_channels)
        qkv, unpack_back = unpack_qkv_vjp(mixed_TGMD, cos_TD, sin_TD, norms, column)
        out_TND, attend_back = attend_documents_vjp(*qkv, micro_batch, self.scale, self.sight)
        heads = out_TND.shape

        def vjp(dout: Tensor) -> Tensor:
            nonlocal attend_back
            dqkv = attend_back(dout.view(heads))
            del attend_back  # and with it queries, keys, values
            dmixed = unpack_back(*dqkv)
            return dmixed if dmixed.shape == shape else dmixed.view(shape)  # codes lie on it

        return out_TND.reshape(shape[0], -1), vjp

    def _attend(
        self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, micro_batch: MicroBatchView
    ) -> Tensor:
        k_KGD, v_KGD = k_TGD, v_TGD
        if micro_batch.cp_size > 1:
            k_KGD, v_KGD = self._gather_keys(k_TGD, v_TGD, micro_batch)
        out_TND = attend_documents(q_TND, k_KGD, v_KGD, micro_batch, self.scale, self.sight)
        return out_TND.reshape(len(q_TND), 1, -1)

    def _gather_keys(
        self, key: Tensor, value: Tensor, micro_batch: MicroBatchView
    ) -> tuple[Tensor, Tensor]:
        """Returns all ranks' keys and values, span after span as the local queries need them."""
        rows = micro_batch.cached("attention.key_rows", lambda: _key_rows(micro_batch, key.device))
        gathered = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1),
            tensor_parallel_output_grad=True,
            group=self.cp_groups[micro_batch.cp_size],
        )
        # A row serves at most two spans of a rank, so the sum in backward has no order to vary.
        key, value = gathered.index_select(0, rows).chunk(2, dim=-1)
        return key, value


def _bound_micro_batch() -> MicroBatchView:
    micro_batch = current_micro_batch()
    if micro_batch is None:
        raise RuntimeError("a micro-batch must be bound by use_micro_batch, got none")
    return micro_batch


def _key_rows(micro_batch: MicroBatchView, device: torch.device) -> Tensor:
    """Returns the rows of the gathered keys in span order, int64 `[sum(k_lens)]`."""
    spans = micro_batch.attention
    runs = zip(spans.k_begins, spans.k_lens, strict=True)
    packed = torch.cat([torch.arange(begin, begin + length) for begin, length in runs])
    order = micro_batch.packed_order(device)
    assert order is not None, "keys are gathered under context parallelism only"
    return order[to_device(packed, device)]
