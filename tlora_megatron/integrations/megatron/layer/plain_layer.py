"""A decoder layer that someone else built, computed by our kernels where it is plain.

The built modules keep weights, names and checkpoints. The layer gets a class made of its own and
`PlainLayer`, whose forward calls the kernels on those weights; whatever they do not compute in a
call, because something waits for a module or an argument is another one, runs the modules.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.built_parts import (
    BuiltHeadNorms,
    BuiltNorm,
    BuiltRotary,
    built_head_norms,
    built_norm,
    why_not_head_norms,
)
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.frozen_sublayer import (
    FrozenSublayer,
    no_replay,
    run_layer,
    runs_direct,
)
from tlora_megatron.integrations.megatron.layer.mixing import built_class, mix
from tlora_megatron.integrations.megatron.layer.module_hooks import (
    hangs_on_all,
    packs_saved_tensors,
    what_hangs_on,
)
from tlora_megatron.integrations.megatron.layer.norm import RMSNorm
from tlora_megatron.layers.te_fp8 import replay_autocast
from tlora_megatron.layers.te_linear import TEProductMixin, why_not_te_product
from tlora_megatron.ops.frozen.frozen_parts import Vjp
from tlora_megatron.ops.frozen.swiglu import swiglu_vjp
from tlora_megatron.ops.routing.segments import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.nano.lanes import Lane, current_lane

_RESIDUAL = ("_input_layernorm_returns_residual", "_pre_mlp_layernorm_returns_residual")


class LateReasons:
    """Why layers that are plain have run by their modules after all; each is told once."""

    def __init__(self, tell: Any) -> None:
        self._tell = tell
        self.found: list[str] = []

    def add(self, layer: Any, reason: str) -> None:
        """Notes a reason; the layer of the first call stands for all."""
        if reason not in self.found:
            self.found.append(reason)
            self._tell(f"layer {layer.layer_number - 1} runs by Megatron's modules: {reason}")

    def add_head(self, reason: str) -> None:
        """Notes a reason of the head."""
        if f"head: {reason}" not in self.found:
            self.found.append(f"head: {reason}")
            self._tell(f"the head runs by Megatron's modules: {reason}")


class PlainLayer(TransformerLayer):
    """Mixin of a layer that `why_not_plain` has found nothing against."""

    tlora_sublayers: Sequence[FrozenSublayer]
    tlora_modules: tuple[nn.Module, ...]
    """Those whose forward is not called."""
    tlora_rotary: BuiltRotary
    tlora_late: LateReasons
    tlora_agreed: bool | None = None
    """What the tensor-parallel ranks have agreed on (`AgreedParts`); None = this one decides."""

    @property
    def may_run_direct(self) -> bool:
        """True if nothing on this rank keeps the layer from running by its sublayers now."""
        return runs_direct(self.tlora_modules, self.tlora_sublayers)

    @property
    def direct_sublayers(self) -> Sequence[FrozenSublayer]:
        """The layer's sublayers if it may run by them now, otherwise none."""
        agreed = self.tlora_agreed
        if self.may_run_direct if agreed is None else agreed and not packs_saved_tensors():
            return self.tlora_sublayers
        reason = _why_not_now(self.tlora_modules)
        if reason is None and self.may_run_direct:
            reason = "something waits for its modules on another tensor-parallel rank"
        if reason is not None:
            self.tlora_late.add(self, reason)
        return ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`[T, 1, H]` to the same, and no context."""
        view = current_micro_batch()
        if current_lane() is None and view is not None and not view.nano_views:
            hidden = self._only_hidden(args, kwargs, view)
            sublayers = () if hidden is None else self.direct_sublayers
            if hidden is not None and sublayers:
                return run_layer(sublayers, hidden, view), None
        return super().forward(*args, **kwargs)

    def _only_hidden(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], view: MicroBatchView
    ) -> Tensor | None:
        """Returns the hidden states; None if there is an argument that kernels do not heed."""
        given = dict(kwargs)
        hidden = args[0] if args else given.pop("hidden_states", None)
        angles = given.pop("rotary_pos_emb", None)
        others = [name for name, value in given.items() if value is not None and value is not False]
        if len(args) > 1:
            others.append("positional arguments")
        if not others and self.tlora_rotary.gives(angles, view):
            return hidden
        names = ", ".join(others) or "other rotary_pos_emb than the micro-batch's"
        self.tlora_late.add(self, f"it is given {names}")
        return None


def make_plain(layer: Any, rotary: BuiltRotary, late: LateReasons) -> None:
    """Turns a layer for which `why_not_plain` gives None into a `PlainLayer`, in place."""
    # No attributes that torch would register.
    object.__setattr__(layer, "tlora_rotary", rotary)
    object.__setattr__(layer, "tlora_late", late)
    object.__setattr__(layer, "tlora_modules", tuple(layer.modules()))
    object.__setattr__(layer, "tlora_sublayers", _sublayers(layer, rotary))
    mix(PlainLayer, layer)


def why_not_plain(layer: Any) -> str | None:
    """Returns the first thing about a built layer that our kernels do not compute, or None.

    Settings of the whole model are looked at by `conditions.why_not_config`.
    """
    kinds = ((layer, TransformerLayer), (layer.self_attention, SelfAttention), (layer.mlp, MLP))
    for module, kind in kinds:
        if built_class(module) is not kind:
            return f"a {built_class(module).__name__} is no {kind.__name__}"
    for name in ("cross_attention", "pre_cross_attn_layernorm"):
        if not isinstance(getattr(layer, name, None), IdentityOp | None):
            return f"it has {name}"
    for name in _RESIDUAL:
        if getattr(layer, name, False):
            return f"{name.lstrip('_')} is True"
    return _why_not_attention(layer.self_attention) or _why_not_linears(layer)


def _why_not_attention(attention: Any) -> str | None:
    if not isinstance(attention.core_attention, PackedCoreAttention):
        return f"its core attention is a {type(attention.core_attention).__name__}"
    if attention.config.kv_channels % 8:
        return f"heads must be of a multiple of 8, got {attention.config.kv_channels}"
    return why_not_head_norms(attention)


def _why_not_linears(layer: Any) -> str | None:
    for half in (_attention_parts(layer), _mlp_parts(layer)):
        norm, column, row = half
        if norm is None:
            return "its norms are no RMSNorm of torch, Transformer Engine or this package"
        for linear, kind in ((column, ColumnParallelLinear), (row, RowParallelLinear)):
            reason = _why_not_linear(linear, kind)
            if reason is not None:
                return reason
    return None


def _why_not_linear(linear: Any, kind: type) -> str | None:
    if isinstance(linear, TEProductMixin):
        return why_not_te_product(linear)
    if built_class(linear) is not kind:
        return f"a {built_class(linear).__name__} computes by itself"
    if getattr(linear, "gather_output", False):
        return "a linear gathers its output"
    if kind is RowParallelLinear and linear.bias is not None:
        return "a row-parallel linear has a bias"
    return None


def _attention_parts(layer: Any) -> tuple[BuiltNorm | RMSNorm | None, Any, Any]:
    attention = layer.self_attention
    linears = attention.linear_qkv, attention.linear_proj
    return _norm_before(layer.input_layernorm, linears[0]), *linears


def _mlp_parts(layer: Any) -> tuple[BuiltNorm | RMSNorm | None, Any, Any]:
    linears = layer.mlp.linear_fc1, layer.mlp.linear_fc2
    return _norm_before(layer.pre_mlp_layernorm, linears[0]), *linears


def _norm_before(module: Any, linear: Any) -> BuiltNorm | RMSNorm | None:
    """The norm of the layer, or the one that Transformer Engine's linear begins with."""
    if not hasattr(linear, "layer_norm_weight"):
        return built_norm(module)
    is_inside = isinstance(module, IdentityOp) and linear.normalization == "RMSNorm"
    return BuiltNorm(linear, "layer_norm_weight") if is_inside else None


def _sublayers(layer: Any, rotary: BuiltRotary) -> tuple[FrozenSublayer, FrozenSublayer]:
    attention = layer.self_attention
    attend = functools.partial(_attend_vjp, attention, rotary, built_head_norms(attention))
    norm, column, row = _attention_parts(layer)
    mlp_norm, mlp_column, mlp_row = _mlp_parts(layer)
    assert norm is not None, "a plain layer has norms"
    assert mlp_norm is not None, "a plain layer has norms"
    return (
        FrozenSublayer(
            norm,
            column,
            attend,
            row,
            recomputes=False,
            recomputes_norm=bool(layer.recompute_input_layernorm),
        ),
        FrozenSublayer(
            mlp_norm,
            mlp_column,
            _swiglu_vjp,
            mlp_row,
            recomputes=bool(layer.recompute_mlp),
            recomputes_norm=bool(layer.recompute_pre_mlp_layernorm),
            replay=replay_autocast if layer.config.fp8 else no_replay,
        ),
    )


def _attend_vjp(
    attention: Any,
    rotary: BuiltRotary,
    norms: BuiltHeadNorms | None,
    mixed: Tensor,
    view: MicroBatchView,
    lane: Lane | None,
) -> tuple[Tensor, Vjp]:
    groups = attention.num_query_groups_per_partition
    weights = None if norms is None else norms.weights()
    return attention.core_attention.attend_projection_vjp(mixed, groups, view, rotary, weights)


def _swiglu_vjp(x: Tensor, view: MicroBatchView, lane: Lane | None) -> tuple[Tensor, Vjp]:
    return swiglu_vjp(x)


def _why_not_now(modules: Sequence[nn.Module]) -> str | None:
    """Returns what has come since the layer was found plain.

    None where its linears have no adapters yet: the base is scored before they get any.
    """
    if hangs_on_all():
        return "a hook waits for all modules"
    if packs_saved_tensors():
        return "tensors that autograd saves go through hooks"
    reasons = filter(None, map(what_hangs_on, modules))
    return next(reasons, None)
