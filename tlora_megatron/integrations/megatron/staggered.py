"""A decoder whose nano-batches take turns through its layers (`parallel.lanes`).

Blocks and layers are re-classed in place and run as they were wherever the bound micro-batch has no
nano-batches. Layers that have `direct_sublayers` run by those; for all others the layers' own code
runs, and this module decides where it is cut, and recomputes. Transformer Engine's linears cannot
be cut: where a layer of theirs must run by its modules, nano-batches run one after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tlora_megatron.integrations.megatron.layer.frozen_layer import FrozenTransformerLayer
from tlora_megatron.integrations.megatron.layer.frozen_sublayer import FrozenSublayer, run_in_lane
from tlora_megatron.integrations.megatron.layer.modules import mix
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import built_norm, norm_runs
from tlora_megatron.layers.multi_adapter import MegatronLinearMixin, MultiAdapter
from tlora_megatron.ops.frozen.rms_norm import add_rms_norm_vjp
from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch, use_micro_batch
from tlora_megatron.parallel.lane_tape import AutogradTape, VjpTape
from tlora_megatron.parallel.lanes import Lane, current_lane
from tlora_megatron.parallel.overlap import Overlap, join, take_turns, take_turns_back

_SIGNATURE = inspect.signature(TransformerBlock.forward)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive layers that backward goes through in one go."""

    layers: tuple[Any, ...]
    recompute: bool
    """Forward keeps their input only; backward computes the rest again."""
    final_norm: Any = None
    """The norm behind the last layer."""
    sublayers: tuple[FrozenSublayer, ...] | None = None
    """The sublayers of all layers, where they run without their modules."""

    @property
    def num_read(self) -> int:
        """Number of reductions whose results backward reads: all but the last, the output."""
        return 2 * len(self.layers) - 1


class StaggeredBlock(TransformerBlock):
    """Mixin of a decoder that runs its layers on the nano-batches of the bound micro-batch."""

    tlora_overlap: Overlap
    tlora_cuts_modules: bool
    """All linears are Megatron's own, which lanes can cut; else only sublayers run staggered."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Does what `TransformerBlock.forward` does; staggered where there are nano-batches."""
        view = current_micro_batch()
        if view is None or not view.nano_views:
            return super().forward(*args, **kwargs)
        bound = _SIGNATURE.bind(self, *args, **kwargs)
        given = {name: value for name, value in bound.arguments.items() if value is not None}
        del given["self"]
        hidden = given.pop("hidden_states", None)
        hidden = hidden if self.pre_process else self.input_tensor
        if not (self.tlora_cuts_modules or runs_sublayers(self, view, given)):
            return self._one_by_one(hidden, view, given)
        run = _Run(self, view, given)
        if not torch.is_grad_enabled():
            return run.forward(hidden, records=False)
        return _Staggered.apply(hidden, run)

    def _one_by_one(self, hidden: Tensor, view: MicroBatchView, given: dict[str, Any]) -> Tensor:
        """Runs nano-batches one after another by the modules, which reduce by themselves."""
        parts = zip(
            view.nano_views,
            hidden.split(_local_rows(self.config, view)),
            _arguments_alone(self, view, given),
            strict=True,
        )
        outs = []
        for nano, part, arguments in parts:
            self.input_tensor = part
            with use_micro_batch(nano):
                outs.append(super().forward(part, **arguments))
        # No view: Megatron's pipeline frees what a stage has sent.
        return torch.cat(outs)


class _PerLane:
    """A layer's attribute with a value for each lane: set before the linears, read behind them."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"tlora_{name}"

    def __get__(self, layer: Any, owner: type) -> Any:
        return layer.__dict__.get(self._name, {}).get(self._lane())

    def __set__(self, layer: Any, value: Any) -> None:
        layer.__dict__.setdefault(self._name, {})[self._lane()] = value

    @staticmethod
    def _lane() -> int | None:
        return getattr(current_lane(), "index", None)


class StaggeredLayer(TransformerLayer):
    """Mixin of a layer of Megatron's that is cut where attention and MLP begin."""

    attn_norm_manager = _PerLane()
    """For activation offloading, like `mlp_norm_manager`; Megatron-core 0.20 sets both always."""
    mlp_norm_manager = _PerLane()

    @property
    def recompute_mlp(self) -> bool:
        """True where Megatron is to checkpoint the MLP; lanes recompute in their own way."""
        return current_lane() is None and self.__dict__["recompute_mlp"]

    @recompute_mlp.setter
    def recompute_mlp(self, value: bool) -> None:
        self.__dict__["recompute_mlp"] = value

    def _forward_attention(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        lane = current_lane()
        if lane is not None:
            hidden_states = lane.detach_residual(hidden_states, joint=False)
        return super()._forward_attention(hidden_states, *args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        lane = current_lane()
        if lane is not None:
            hidden_states = lane.detach_residual(hidden_states, joint=False)
            if self.__dict__["recompute_mlp"]:
                lane.replay(self.mlp)
        return super()._forward_mlp(hidden_states, *args, **kwargs)


def stagger(block: Any, overlap: Overlap) -> None:
    """Turns a decoder and its layers into staggered ones, in place."""
    # No attributes that torch would register.
    object.__setattr__(block, "tlora_overlap", overlap)
    if isinstance(block, StaggeredBlock):
        return
    linears = [module for module in block.modules() if isinstance(module, MultiAdapter)]
    cuts_modules = all(isinstance(linear, MegatronLinearMixin) for linear in linears)
    object.__setattr__(block, "tlora_cuts_modules", cuts_modules)
    mix(StaggeredBlock, block)
    for layer in block.layers:
        if not isinstance(layer, FrozenTransformerLayer):
            mix(StaggeredLayer, layer)


class _Run:
    """One micro-batch's way through a decoder's layers and back."""

    def __init__(self, block: Any, view: MicroBatchView, arguments: dict[str, Any]) -> None:
        gathers = block.config.sequence_parallel
        self._view = view
        self._lanes = block.tlora_overlap.lanes(view.nano_views, gathers=gathers)
        self._arguments = _split_arguments(arguments, view)
        self._local_rows = _local_rows(block.config, view)
        self._stretches = list(_stretches(block, view, arguments))
        self._kept: list[Any] = []
        """For each stretch and lane its input if it is recomputed, otherwise its tape."""
        self._records = False
        self._entries: Sequence[Tensor] = ()
        """Kept until main has joined in backward: main's memory, which lanes read parts of."""

    def forward(self, hidden: Tensor, *, records: bool) -> Tensor:
        """Runs `[T, 1, H]`, the local rows of all nano-batches, through all layers."""
        parts = self._rows(hidden)
        self._records = records
        with use_micro_batch(self._view), torch.set_grad_enabled(records):
            outs = take_turns(self._lanes, lambda lane: self._run_lane(lane, parts[lane.index]))
        join(self._lanes)
        if records:
            self._entries = parts
            self._kept = [list(kept) for kept in zip(*(kept for _, kept in outs), strict=True)]
        # No view: Megatron's pipeline frees what a stage has sent.
        return torch.cat([out.view(-1, *hidden.shape[1:]) for out, _ in outs])

    def _rows(self, x: Tensor) -> Sequence[Tensor]:
        """Splits `[T, 1, H]` into each lane's rows; sublayers take two dimensions."""
        runs_sublayers = all(stretch.sublayers is not None for stretch in self._stretches)
        return (x.flatten(0, -2) if runs_sublayers else x).split(self._local_rows)

    def _run_lane(self, lane: Lane, hidden: Tensor) -> tuple[Tensor, list[Any]]:
        kept: list[Any] = []
        for stretch in self._stretches:
            entry = hidden
            hidden, tape = self._run_stretch(
                lane, stretch, entry, records=self._records and not stretch.recompute
            )
            kept.append(entry if stretch.recompute else tape)
        return hidden, kept

    def _run_stretch(
        self, lane: Lane, stretch: _Stretch, hidden: Tensor, *, records: bool
    ) -> tuple[Tensor, AutogradTape | VjpTape | None]:
        if stretch.sublayers is not None:
            return self._run_sublayers(lane, stretch, hidden, records=records)
        num_read = stretch.num_read if stretch.recompute else None
        out = lane.begin(hidden, records=records, num_read=num_read)
        for layer in stretch.layers:
            out, _ = layer(hidden_states=out, **self._arguments[lane.index])
        if stretch.final_norm is not None:
            out = stretch.final_norm(out)
        return out.detach(), lane.end(out)

    def _run_sublayers(
        self, lane: Lane, stretch: _Stretch, hidden: Tensor, *, records: bool
    ) -> tuple[Tensor, VjpTape | None]:
        assert stretch.sublayers is not None, "layers run by their modules"
        torch.set_grad_enabled(False)
        tape = VjpTape() if records else None
        x, residual = run_in_lane(stretch.sublayers, hidden, lane, tape)
        if residual is not None:
            if records and stretch.recompute:  # again: nothing reads the result
                return residual, tape
            x = lane.reduce(x)
        if stretch.final_norm is None:
            return x if residual is None else residual + x, tape
        norm = stretch.final_norm.norm_weight
        _, out, norm_back = add_rms_norm_vjp(x, residual, norm)
        if tape is not None:
            tape.norm = norm_back
        return out, tape

    def backward(self, dout: Tensor) -> Tensor:
        """Returns the gradient of the layers' input."""
        whole = dout.contiguous()
        douts = self._rows(whole)
        after_main = True
        with use_micro_batch(self._view):
            while self._stretches:
                stretch, tapes = self._stretches.pop(), self._kept.pop()
                if stretch.recompute:
                    tapes = self._record_again(stretch, tapes, after_main=after_main)
                douts = take_turns_back(self._lanes, tapes, douts, after_main=after_main)
                # Between stretches lanes go on without main: what one still sends or receives has
                # the others' next compute pieces beside it.
                after_main = False
            join(self._lanes)
        return torch.cat(tuple(douts)).view(whole.shape)

    def _record_again(
        self, stretch: _Stretch, entries: Sequence[Tensor], *, after_main: bool
    ) -> list[Any]:
        def run(lane: Lane) -> Any:
            return self._run_stretch(lane, stretch, entries[lane.index], records=True)

        with torch.enable_grad():
            outs = take_turns(self._lanes, run, after_main=after_main)
        return [tape for _, tape in outs]


def _stretches(block: Any, view: MicroBatchView, arguments: dict[str, Any]) -> Iterator[_Stretch]:
    """Groups layers as Megatron's block does for recompute; without recompute all are one."""
    is_direct, norm = runs_sublayers(block, view, arguments), block.final_layernorm

    def stretch(layers: tuple[Any, ...], *, recompute: bool, final_norm: Any = None) -> _Stretch:
        if not is_direct:
            return _Stretch(layers, recompute, final_norm)
        parts = tuple(part for layer in layers for part in layer.tlora_sublayers)
        return _Stretch(layers, recompute, final_norm and built_norm(final_norm), parts)

    config, layers = block.config, tuple(block.layers)
    if view.recompute == "full":
        yield from (stretch((layer,), recompute=True) for layer in layers)
        layers = ()
    if config.recompute_granularity == "full" and block.training:
        count = config.recompute_num_layers
        recomputed = len(layers) if config.recompute_method == "uniform" else count
        size = count if config.recompute_method == "uniform" else 1
        for begin in range(0, min(recomputed, len(layers)), size):
            yield stretch(layers[begin : begin + size], recompute=True)
        layers = layers[recomputed:]
    if layers or norm is not None:
        yield stretch(layers, recompute=False, final_norm=norm)


def runs_sublayers(block: Any, view: MicroBatchView, arguments: dict[str, Any]) -> bool:
    """Returns True if all layers of a block and its norm may run without their modules now."""
    norm, angles = block.final_layernorm, arguments.get("rotary_pos_emb")
    if norm is not None and (built_norm(norm) is None or not norm_runs(norm)):
        return False
    for layer in block.layers:  # sublayers take the hidden states alone
        rotary = getattr(layer, "tlora_rotary", None)
        if rotary is not None and not rotary.gives(angles, view):
            return False
        if not getattr(layer, "direct_sublayers", ()):
            return False
    return True


def _local_rows(config: Any, view: MicroBatchView) -> list[int]:
    """Returns the rows of each nano-batch that this rank holds between sublayers."""
    num_shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return [nano.num_tokens // num_shards for nano in view.nano_views]


def _arguments_alone(
    block: Any, view: MicroBatchView, arguments: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns the block's arguments for each nano-batch as a micro-batch of its own."""
    split, angles = _split_arguments(arguments, view), arguments.get("rotary_pos_emb")
    for rotary in {getattr(layer, "tlora_rotary", None) for layer in block.layers}:
        if rotary is not None and rotary.gives(angles, view):
            for nano, own in zip(view.nano_views, split, strict=True):
                own["rotary_pos_emb"] = rotary.angles(nano)
    return split


def _split_arguments(arguments: dict[str, Any], view: MicroBatchView) -> list[dict[str, Any]]:
    """Returns the block's arguments for each nano-batch; only rotary angles have rows."""
    rows = [nano.num_tokens for nano in view.nano_views]
    unknown = arguments.keys() - {"rotary_pos_emb"}
    assert not unknown, f"{', '.join(sorted(unknown))} must be None"
    if "rotary_pos_emb" not in arguments:
        return [{"attention_mask": None} for _ in rows]
    angles = arguments["rotary_pos_emb"].split(rows)
    return [{"attention_mask": None, "rotary_pos_emb": part} for part in angles]


class _Staggered(torch.autograd.Function):
    """All layers and all nano-batches as one node of the micro-batch's graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: _Run) -> Tensor:
        ctx.run = run
        return run.forward(hidden, records=True)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        run, ctx.run = ctx.run, None
        return run.backward(dout), None
