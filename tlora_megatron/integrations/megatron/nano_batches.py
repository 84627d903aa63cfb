"""The nano-batches of one of Megatron's models: their number, and what keeps it from having any."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from tlora_megatron.integrations.megatron.built.model import language_models
from tlora_megatron.integrations.megatron.layer.frozen_sublayer import gives_product
from tlora_megatron.integrations.megatron.layer.modules import built_class
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import built_norm
from tlora_megatron.integrations.megatron.staggered import stagger
from tlora_megatron.layers.multi_adapter import MegatronLinearMixin, MultiAdapter
from tlora_megatron.parallel.collectives import make_tensor_collectives
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.overlap import LaneRoom, Overlap, lane_room
from tlora_megatron.training.nano.rounds import NanoSettings

_RECOMPUTED_NORMS = ("recompute_input_layernorm", "recompute_pre_mlp_layernorm")
"""Attributes of a layer; lanes keep what they have gathered."""

_BY_CONTEXT = "context parallelism cuts documents over ranks"

logger = logging.getLogger(__name__)


class NanoBatches:
    """The number of nano-batches of one model, and their streams and collectives."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        groups: ParallelGroups,
        settings: NanoSettings = NanoSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._models = language_models(chunks)
        self._groups = groups
        self._settings = settings
        self.overlap: Overlap | None = None
        """The lanes of nano-batches; None = micro-batches run whole. Benches exchange it."""
        self._has_looked = False
        self._num_ready = 1

    @property
    def count(self) -> int:
        """The most nano-batches of a micro-batch; 1 where the model cannot run any."""
        return 1 if self.overlap is None else self.overlap.num_nano_batches

    def set_count(self, count: int) -> None:
        """Sets the number for the rounds to come; collective over the world."""
        if count < 1:
            raise ValueError(f"nano_batches must be at least 1, got {count}")
        if count > 1 and not self._has_looked:
            self._has_looked = True
            self.overlap = self._make_overlap()
        if self.overlap is not None:
            self.overlap.num_nano_batches = count
            self.overlap.streams(count)
            self._num_ready = max(self._num_ready, count)

    def room(self) -> LaneRoom:
        """Returns how many this process's device has memory for, beside those that ran already."""
        lane_bytes = 0 if self.overlap is None else self.overlap.collectives.lane_bytes
        return lane_room(self._groups.device, num_ready=self._num_ready, lane_bytes=lane_bytes)

    def close(self) -> None:
        """Gives the collectives' memory back; micro-batches run whole from then on.

        Every process must call it, before the process group ends.
        """
        if self.overlap is not None:
            self.overlap.num_nano_batches = 1
            self.overlap.collectives.close()
            self.overlap = None

    def _make_overlap(self) -> Overlap | None:
        obstacle = _agreed_obstacle(self._models, self._groups)
        if obstacle is not None:
            logger.warning("run.nano_batches has no effect, micro-batches run whole: %s", obstacle)
            return None
        collectives = make_tensor_collectives(
            self._groups.tp_group,
            self._groups.device,
            self._settings.transport,
            max_bytes=self._settings.max_bytes,
        )
        overlap = Overlap(collectives, self._groups.device)
        logger.info("nano-batches run staggered, collectives by %s", collectives.name)
        for model in self._models:
            stagger(model.decoder, overlap)
        return overlap


def _agreed_obstacle(models: Sequence[Any], groups: ParallelGroups) -> str | None:
    """The reason of the first process, in rank order, that cannot run nano-batches.

    Where one cannot, none may: a stage hands on rows in the order of its nano-batches, and all pack
    their rounds for as many. Collective over the world.
    """
    reasons = (_why_not_config(m) or _why_not_linears(m) or _why_not_layers(m) for m in models)
    own = next(filter(None, reasons), None) if groups.layout.cp_size == 1 else _BY_CONTEXT
    found: list[tuple[int, str | None]] = [(0, None)] * dist.get_world_size()
    dist.all_gather_object(found, (groups.pp_rank, own))
    for stage, reason in found:
        if reason is not None:
            return f"{reason} (pipeline stage {stage})" if groups.layout.pp_size > 1 else reason
    return None


def _why_not_config(model: Any) -> str | None:
    config = getattr(model, "config", None)
    if getattr(config, "tp_comm_overlap", False):
        return (
            "--tp-comm-overlap is on, by which Transformer Engine's linears overlap their own "
            "communication; leave it out to have nano-batches"
        )
    if getattr(config, "fp8", None) or getattr(config, "cpu_offloading", False):
        return "FP8 and CPU offloading wrap whole layers"
    if getattr(config, "fp32_residual_connection", False):
        return "fp32_residual_connection is True: lanes exchange gradients in half the width"
    return None


def _why_not_linears(model: Any) -> str | None:
    direct = {id(part) for layer in _direct_layers(model) for part in layer.modules()}
    for name, module in _linears(model):
        if not isinstance(module, MegatronLinearMixin) and id(module) not in direct:
            return f"{name} is a {type(module).__name__}, which does its own communication"
        sharding = module.tlora_adapters.site.lora_sharding
        if sharding != "fold":
            return f"parallel.lora_sharding must be fold or auto for it, got {sharding}"
    return None


def _why_not_layers(model: Any) -> str | None:
    decoder = model.decoder
    if not isinstance(decoder, TransformerBlock):
        return f"the decoder is a {type(decoder).__name__}"
    direct = _direct_layers(model)
    for layer in decoder.layers:
        reason = None if layer in direct else _why_not_layer(layer)
        if any(getattr(layer, name, False) for name in _RECOMPUTED_NORMS):
            reason = "its norms are recomputed"
        if reason is not None:
            return f"layer {layer.layer_number - 1}: {reason}"
    norm = decoder.final_layernorm
    needs_norm = not all(isinstance(x, MegatronLinearMixin) for _, x in _linears(model))
    if needs_norm and norm is not None and built_norm(norm) is None:
        return f"the final norm is a {type(norm).__name__}"
    return None


def _direct_layers(model: Any) -> list[Any]:
    """Returns the layers of sublayers, which run in lanes whatever their linears are."""
    found = []
    for layer in model.decoder.layers:
        parts = getattr(layer, "tlora_sublayers", ())
        if len(parts) == 2 and all(gives_product(x) for p in parts for x in (p.column, p.row)):
            found.append(layer)
    return found


def _why_not_layer(layer: Any) -> str | None:
    if built_class(layer) is not TransformerLayer:
        return f"it is a {type(layer).__name__}"
    if not isinstance(layer.self_attention, SelfAttention) or not isinstance(layer.mlp, MLP):
        return "it must be self-attention and an MLP"
    attention, mlp = layer.self_attention, layer.mlp
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    if not all(isinstance(linear, MegatronLinearMixin) for linear in linears):
        return "not all of its linears may have adapters"
    if not isinstance(getattr(layer, "cross_attention", None), IdentityOp | None):
        return "it has cross-attention"
    return None


def _linears(model: Any) -> Iterator[tuple[str, MultiAdapter]]:
    for name, module in model.decoder.named_modules():
        if isinstance(module, MultiAdapter):
            yield f"decoder.{name}", module
