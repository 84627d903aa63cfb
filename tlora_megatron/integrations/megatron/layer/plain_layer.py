"""A decoder layer that someone else built, computed by our kernels where it is plain.

The built modules keep weights, names and checkpoints. The layer gets a class made of its own and
`PlainLayer`, which calls the kernels on those weights: for the whole layer, or for its attention or
its MLP where the other half is not plain. Whatever they do not compute in a call, because something
waits for a module or an argument is another one, runs the modules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.layer.conditions import (
    NAMES,
    Half,
    halves_of,
    norm_and_linears,
)
from tlora_megatron.integrations.megatron.layer.frozen_sublayer import (
    FrozenSublayer,
    no_replay,
    run_layer,
    runs_direct,
)
from tlora_megatron.integrations.megatron.layer.modules import (
    mix,
    packs_saved_tensors,
    what_hangs_on,
)
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import (
    BuiltHeadNorms,
    BuiltRotary,
    built_head_norms,
)
from tlora_megatron.layers.quantised_linear import held_codes
from tlora_megatron.layers.transformer_engine import one_scale, replay_autocast
from tlora_megatron.ops.frozen.parts import Vjp, swiglu_vjp
from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.lanes import Lane, current_lane


class LateReasons:
    """Why parts that are plain have run by their modules after all; each is told once."""

    def __init__(self, tell: Any) -> None:
        self._tell = tell
        self.found: list[str] = []

    def add(self, layer: Any, reason: str, half: Half) -> None:
        """Notes a reason; the layer of the first call stands for all."""
        if reason not in self.found:
            self.found.append(reason)
            what, number = NAMES[half].text, layer.layer_number - 1
            self._tell(f"layer {number} runs its {what} by Megatron's modules: {reason}")

    def add_head(self, reason: str) -> None:
        """Notes a reason of the head."""
        if f"head: {reason}" not in self.found:
            self.found.append(f"head: {reason}")
            self._tell(f"the head runs by Megatron's modules: {reason}")


@dataclass(slots=True, eq=False)
class PlainHalf:
    """A half of a layer, computed by our kernels."""

    sublayer: FrozenSublayer
    modules: tuple[nn.Module, ...]
    """Those whose forward is not called, the layer among them."""
    rotary: BuiltRotary | None
    """None for an MLP."""
    agreed: bool | None = None
    """The way that the tensor-parallel ranks have agreed on (`AgreedParts`); None = this one
    decides."""

    @property
    def may_run(self) -> bool:
        """True if nothing on this rank keeps it from running by our kernels now."""
        return runs_direct(self.modules, (self.sublayer,))


class PlainLayer(TransformerLayer):
    """Mixin of a layer in whose halves, or one of them, `why_not_half` has found nothing.

    Megatron's `forward` calls `_forward_attention` and `_forward_mlp`, in every version.
    """

    tlora_parts: Mapping[Half, PlainHalf]
    """The plain halves."""
    tlora_sublayers: Sequence[FrozenSublayer]
    """All that the layer computes; empty where a half is not plain."""
    tlora_late: LateReasons

    @property
    def tlora_rotary(self) -> BuiltRotary | None:
        """The rotation of heads by our kernels."""
        attention = self.tlora_parts.get("attention")
        return None if attention is None else attention.rotary

    @property
    def direct_sublayers(self) -> Sequence[FrozenSublayer]:
        """The layer's sublayers if all of it may run by them now, otherwise none."""
        return self.tlora_sublayers if all(map(self.runs_now, self.tlora_parts)) else ()

    def runs_now(self, half: Half) -> bool:
        """Returns True if a plain half may run by our kernels now; tells why it may not."""
        part = self.tlora_parts[half]
        if part.may_run if part.agreed is None else part.agreed and not packs_saved_tensors():
            return True
        # None where linears have no adapters yet: the base is scored before they get any.
        reason = what_hangs_on(part.modules)
        if reason is None and packs_saved_tensors():
            reason = "tensors that autograd saves go through hooks"
        if reason is None and part.may_run:
            reason = "something waits for its modules on another tensor-parallel rank"
        if reason is not None:
            self.tlora_late.add(self, reason, half)
        return False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`[T, 1, H]` to the same, and no context."""
        if self.tlora_sublayers:
            out = self._by_kernels(tuple(self.tlora_parts), args, kwargs)
            if out is not None:
                return out, None
        return super().forward(*args, **kwargs)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        out = self._by_kernels(("attention",), args, kwargs)
        return super()._forward_attention(*args, **kwargs) if out is None else (out, None)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        out = self._by_kernels(("mlp",), args, kwargs)
        return super()._forward_mlp(*args, **kwargs) if out is None else out

    def _by_kernels(
        self, halves: tuple[Half, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Returns the `[T, 1, H]` behind some halves; None where modules must run."""
        view = current_micro_batch()
        if current_lane() is not None or view is None or view.nano_views:
            return None
        parts = [self.tlora_parts[half] for half in halves if half in self.tlora_parts]
        if not parts:
            return None
        hidden, others = _only_hidden(args, kwargs, view, parts[0].rotary)
        if others:
            self.tlora_late.add(self, f"it is given {', '.join(others)}", halves[0])
        elif all(map(self.runs_now, halves)):
            return run_layer([part.sublayer for part in parts], hidden, view)
        return None


def _only_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], view: MicroBatchView, rotary: BuiltRotary | None
) -> tuple[Any, Sequence[str]]:
    """Returns the hidden states, and names of arguments that kernels do not heed."""
    given = dict(kwargs)
    hidden = args[0] if args else given.pop("hidden_states", None)
    angles = given.pop("rotary_pos_emb", None)
    others = [name for name, value in given.items() if value is not None and value is not False]
    if any(value is not None for value in args[1:]):
        others.append("positional arguments")
    if rotary is not None and not rotary.gives(angles, view):
        others.append("other rotary_pos_emb than the micro-batch's")
    return hidden, others


def make_plain(
    layer: Any, halves: Sequence[Half], rotary: BuiltRotary | None, late: LateReasons
) -> None:
    """Turns a layer into a `PlainLayer`, in place.

    Args:
        rotary: of the model; None where no attention is among them.
    """
    # No attributes that torch would register.
    parts = {half: _part(layer, half, rotary) for half in halves}
    is_whole = tuple(halves) == halves_of(layer)
    values = {
        "tlora_late": late,
        "tlora_parts": parts,
        "tlora_sublayers": tuple(part.sublayer for part in parts.values()) if is_whole else (),
    }
    for name, value in values.items():
        object.__setattr__(layer, name, value)
    mix(PlainLayer, layer)


def _part(layer: Any, half: Half, rotary: BuiltRotary | None) -> PlainHalf:
    norm, column, row = norm_and_linears(layer, half)
    assert norm is not None, "a plain half has a norm"
    names = NAMES[half]
    inner = (m for name in (names.norm, names.module) for m in getattr(layer, name).modules())
    modules = (layer, *inner)
    again = bool(getattr(layer, f"recompute_{names.norm}"))
    if half == "mlp":
        sublayer = FrozenSublayer(
            norm,
            column,
            functools.partial(_swiglu_vjp, column, row),
            row,
            recomputes=bool(layer.recompute_mlp),
            recomputes_norm=again,
            replay=replay_autocast if layer.config.fp8 else no_replay,
        )
        return PlainHalf(sublayer, modules, None)
    assert rotary is not None, "attention's heads are rotated"
    attention = layer.self_attention
    attend = functools.partial(_attend_vjp, attention, rotary, built_head_norms(attention))
    sublayer = FrozenSublayer(norm, column, attend, row, recomputes=False, recomputes_norm=again)
    return PlainHalf(sublayer, modules, rotary)


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
    return attention.core_attention.attend_projection_vjp(
        mixed, groups, view, rotary, weights, held_codes(attention.linear_qkv)
    )


def _swiglu_vjp(
    column: Any, row: Any, x: Tensor, view: MicroBatchView, lane: Lane | None
) -> tuple[Tensor, Vjp]:
    return swiglu_vjp(x, held_codes(row) or one_scale(row), held_codes(column) or one_scale(column))
