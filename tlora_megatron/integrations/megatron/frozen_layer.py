"""A decoder layer of Megatron's local spec, its elementwise parts done in as few passes as can be.

What a GPU spends on a frozen layer besides GEMMs and attention is reading and writing `[T, hidden]`
and `[T, 2 ffn]`. So the norm comes together with the residual sum before it and both gradients of
the residual stream are added where one is computed; heads turn while they are sorted; SwiGLU is one
pass each way; no weight of a norm gets a gradient.

A layer is re-classed in place: parameters, state-dict keys and `isinstance` answers stay.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tlora_megatron.integrations.megatron.norm import RMSNorm
from tlora_megatron.ops.swiglu import swiglu
from tlora_megatron.parallel.lanes import current_lane


class FrozenSelfAttention(SelfAttention):
    """Self-attention whose core sorts and rotates the heads of the fused projection itself.

    Where queries and keys are normed one by one, or a group of heads lies on several ranks,
    Megatron's own way stays.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """`[T, 1, H]` to the same; Megatron's arguments beside it are all None here."""
        # Where nothing is normed, megatron-core before 0.19 has an identity there.
        if not isinstance(self.q_layernorm, IdentityOp | None) or (
            self.config.num_query_groups < self.config.tensor_model_parallel_size
        ):
            return super().forward(hidden_states, *args, **kwargs)
        mixed, _ = self.linear_qkv(hidden_states)
        context = self.core_attention.attend_projection(mixed, self.num_query_groups_per_partition)
        return self.linear_proj(context)


class FrozenMLP(MLP):
    """The two linears with SwiGLU between them."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """`[T, 1, H]` to the same."""
        intermediate, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(intermediate))


class FrozenTransformerLayer(TransformerLayer):
    """Pre-norm layer without dropout, biases of linears, or cross-attention."""

    input_layernorm: RMSNorm
    pre_mlp_layernorm: RMSNorm

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """`[T, 1, H]` to the same, and no context; further arguments of the block are all None."""
        lane = current_lane()
        residual, normed = self.input_layernorm.fork(hidden_states)
        if lane is not None:
            residual = lane.cut(residual, joint=True)
        attended, _ = self.self_attention(normed, attention_mask=attention_mask)
        residual, normed = self.pre_mlp_layernorm.add(attended, residual)
        if lane is not None:
            residual = lane.cut(residual, joint=True)
            if self.recompute_mlp:
                lane.replay(self.mlp)
        if self.recompute_mlp and lane is None:
            out, _ = tensor_parallel.checkpoint(self.mlp, False, normed)
        else:
            out, _ = self.mlp(normed)
        return residual + out, None


def freeze_layer(layer: TransformerLayer) -> None:
    """Turns one of `GPTModel`'s decoder layers into a `FrozenTransformerLayer`, in place."""
    layer.__class__ = FrozenTransformerLayer
    layer.self_attention.__class__ = FrozenSelfAttention
    layer.mlp.__class__ = FrozenMLP
