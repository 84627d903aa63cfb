"""A decoder layer of Megatron's local spec, its elementwise parts done in as few passes as can be.

The norm comes together with the residual sum before it, both gradients of the residual stream are
added where one is computed, heads are normed and turn while they are sorted, SwiGLU is one pass
each way. A layer is re-classed in place. Where all linears give their product without autograd it
runs as two `FrozenSublayer`s, else by its modules' forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.frozen_experts import FrozenExperts
from tlora_megatron.integrations.megatron.layer.frozen_sublayer import (
    FrozenSublayer,
    Inner,
    run_layer,
    runs_direct,
)
from tlora_megatron.integrations.megatron.layer.modules import does_more
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm, built_head_norms
from tlora_megatron.layers.quantised_linear import held_codes
from tlora_megatron.ops.frozen.parts import HeadNorms, Vjp, swiglu, swiglu_vjp
from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.lanes import Lane, current_lane


class FrozenSelfAttention(SelfAttention):
    """Self-attention whose core sorts, norms and rotates the heads of the fused projection itself.

    Where a group of heads lies on several ranks, or a hook waits for the call of the core or of a
    norm, Megatron's own way stays.
    """

    @property
    def is_fused(self) -> bool:
        """True if the core takes the projection."""
        config = self.config
        return config.num_query_groups >= config.tensor_model_parallel_size

    @property
    def inner_modules(self) -> tuple[nn.Module, ...]:
        """The modules between the linears, which are not called where the core is fused."""
        modules = (self.core_attention, self.q_layernorm, self.k_layernorm)
        return tuple(module for module in modules if module is not None)

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of queries and keys; None where heads are not normed."""
        norms = built_head_norms(self) if self.config.qk_layernorm else None
        return None if norms is None else norms.weights()

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """`[T, 1, H]` to the same; Megatron's arguments beside it are all None here."""
        if not self.is_fused or any(map(does_more, self.inner_modules)):
            return super().forward(hidden_states, *args, **kwargs)
        mixed, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        context = self.core_attention.attend_projection(mixed, groups, norms=self.head_norms)
        return self.linear_proj(context)

    def attend_vjp(
        self, mixed: Tensor, view: MicroBatchView, lane: Lane | None
    ) -> tuple[Tensor, Vjp]:
        """Attends, which is all between the linears; returns the context and its vjp."""
        groups = self.num_query_groups_per_partition
        return self.core_attention.attend_projection_vjp(
            mixed, groups, view, norms=self.head_norms, column=held_codes(self.linear_qkv)
        )


class FrozenMLP(MLP):
    """An MLP of two linears with SwiGLU between them."""

    @property
    def parts(self) -> tuple[Any, Inner, Any]:
        """What a frozen sublayer has: a first linear, what is between, and a second one."""
        return self.linear_fc1, self._swiglu_vjp, self.linear_fc2

    def _swiglu_vjp(self, x: Tensor, view: MicroBatchView, lane: Lane | None) -> tuple[Tensor, Vjp]:
        return swiglu_vjp(x, held_codes(self.linear_fc2), held_codes(self.linear_fc1))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """`[T, 1, H]` to the same."""
        intermediate, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(intermediate))


class FrozenTransformerLayer(TransformerLayer):
    """Pre-norm layer without dropout, biases of linears, or cross-attention."""

    input_layernorm: RMSNorm
    pre_mlp_layernorm: RMSNorm
    tlora_sublayers: Sequence[FrozenSublayer]
    """Empty where only autograd can go back through the part between the linears."""

    @property
    def direct_sublayers(self) -> Sequence[FrozenSublayer]:
        """The layer's sublayers if it may run by them now, otherwise none."""
        attention = self.self_attention
        norms = (self.input_layernorm, self.pre_mlp_layernorm)
        modules = (self, *norms, attention, *attention.inner_modules, self.mlp)
        sublayers = self.tlora_sublayers
        return sublayers if sublayers and runs_direct(modules, sublayers) else ()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """`[T, 1, H]` to the same, and no context; further arguments of the block are all None."""
        view, lane = current_micro_batch(), current_lane()
        if lane is None and view is not None and not view.nano_views and self.direct_sublayers:
            return run_layer(self.tlora_sublayers, hidden_states, view), None
        run = partial(self._by_modules, attention_mask, view, lane)
        if lane is None and view is not None and view.recompute == "full":
            return tensor_parallel.checkpoint(run, False, hidden_states), None
        return run(hidden_states), None

    def _by_modules(
        self,
        attention_mask: Tensor | None,
        view: MicroBatchView | None,
        lane: Lane | None,
        hidden_states: Tensor,
    ) -> Tensor:
        repeats_mlp = self.recompute_mlp or (view is not None and view.recompute == "selective")
        residual, normed = self.input_layernorm.add(hidden_states, None)
        if lane is not None:
            residual = lane.detach_residual(residual, joint=True)
        attended, _ = self.self_attention(normed, attention_mask=attention_mask)
        residual, normed = self.pre_mlp_layernorm.add(attended, residual)
        if lane is not None:
            residual = lane.detach_residual(residual, joint=True)
            if repeats_mlp:
                lane.replay(self.mlp)
        if repeats_mlp and lane is None:
            out, _ = tensor_parallel.checkpoint(self.mlp, False, normed)
        else:
            out, _ = self.mlp(normed)
        return residual + out


def freeze_layer(layer: TransformerLayer) -> None:
    """Turns one of `GPTModel`'s decoder layers into a `FrozenTransformerLayer`, in place."""
    layer.__class__ = FrozenTransformerLayer
    layer.self_attention.__class__ = FrozenSelfAttention
    if not isinstance(layer.mlp, FrozenExperts):
        layer.mlp.__class__ = FrozenMLP
    object.__setattr__(layer, "tlora_sublayers", _sublayers(layer))


def _sublayers(layer: Any) -> tuple[FrozenSublayer, ...]:
    attention = layer.self_attention
    mlp: tuple[Any, Inner, Any] = layer.mlp.parts
    if not attention.is_fused:
        return ()
    return (
        FrozenSublayer(
            layer.input_layernorm,
            attention.linear_qkv,
            attention.attend_vjp,
            attention.linear_proj,
            recomputes=False,
        ),
        FrozenSublayer(
            layer.pre_mlp_layernorm,
            *mlp,
            recomputes=layer.recompute_mlp,
            asks_micro_batch=True,
        ),
    )
