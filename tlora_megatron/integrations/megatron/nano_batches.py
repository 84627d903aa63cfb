"""Whether and how a model of Megatron's can run its micro-batches in nano-batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from tlora_megatron.integrations.megatron.built_model import language_models
from tlora_megatron.integrations.megatron.layer.frozen_layer import FrozenTransformerLayer
from tlora_megatron.integrations.megatron.staggered import stagger
from tlora_megatron.layers.multi_adapter import (
    MultiAdapter,
    MultiAdapterMixin,
    RankExchangeMixin,
    RankShardedMixin,
)
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano.lane_room import LaneRoom, lane_room
from tlora_megatron.parallel.nano.overlap import Overlap, OverlapMode
from tlora_megatron.parallel.transport.tensor_collectives import (
    DEFAULT_MAX_BYTES,
    Kind,
    TensorCollectives,
    make_tensor_collectives,
)

logger = logging.getLogger(__name__)


class NanoBatches:
    """The number of nano-batches of one model, and what they run with once there is more than one.

    Args:
        chunks: of this rank's model.
        kind: of the collectives.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], groups: ParallelGroups, kind: Kind = "auto"
    ) -> None:
        self._models = language_models(chunks)
        self._groups = groups
        self.kind: Kind = kind
        self.max_bytes = DEFAULT_MAX_BYTES
        """What a nano-batch's collective carries at once; see `make_tensor_collectives`."""
        self.overlap: Overlap | None = None
        """What micro-batches are cut for; None = they run whole. Benches exchange it."""
        self._has_looked = False
        self._num_ready = 1

    @property
    def count(self) -> int:
        """Into how many a micro-batch is to be cut, at most; 1 where the model cannot be."""
        return 1 if self.overlap is None else self.overlap.num_nano_batches

    @property
    def mode(self) -> OverlapMode | None:
        """How nano-batches run; None before there is more than one, or where there cannot be."""
        return None if self.overlap is None else self.overlap.mode

    def set_count(self, count: int) -> None:
        """For the rounds to come; collective over the world.

        Raises:
            ValueError: if it is not at least 1.
        """
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
        """How many this process's device has memory for; those that were set before have theirs."""
        lane_bytes = 0 if self.overlap is None else self.overlap.collectives.lane_bytes
        return lane_room(self._groups.device, num_ready=self._num_ready, lane_bytes=lane_bytes)

    def use(self, collectives: TensorCollectives | None, mode: OverlapMode | None) -> None:
        """Takes these from now on, and one nano-batch until `set_count`; None = what is best.

        Collective over the world. Stages may be given different modes.
        """
        self._has_looked = True
        self._num_ready = 1
        self.overlap = self._make_overlap(collectives, mode)

    def close(self) -> None:
        """Gives back what collectives hold of each other's memory; micro-batches run whole from now
        on. Every process calls it, before the process group ends."""
        if self.overlap is not None:
            self.overlap.num_nano_batches = 1
            self.overlap.collectives.close()
            self.overlap = None

    def _make_overlap(
        self, collectives: TensorCollectives | None = None, mode: OverlapMode | None = None
    ) -> Overlap | None:
        obstacles = _agreed_obstacles(self._models, self._groups)
        if obstacles.split is not None:
            logger.warning(
                "run.nano_batches has no effect, micro-batches run whole: %s", obstacles.split
            )
            return None
        reason = None
        if mode is None:
            reason = obstacles.stagger
            mode = "staggered" if reason is None else "within_linear"
        if collectives is None:
            collectives = make_tensor_collectives(
                self._groups.tp_group,
                self._groups.device,
                self.kind,
                max_bytes=self.max_bytes,
            )
        overlap = Overlap(1, collectives, mode, self._groups.device)
        logger.info(
            "nano-batches run %s, collectives by %s%s",
            mode, collectives.name, f": {reason}" if reason else "",
        )  # fmt: skip
        for _, linear in _linears(self._models):
            object.__setattr__(linear, "tlora_overlap", overlap)
        for model in self._models:
            object.__setattr__(model.decoder, "tlora_overlap", overlap)
            if mode == "staggered":
                stagger(model.decoder)
        return overlap


class _Obstacles(NamedTuple):
    """Why not; None where nothing is in the way."""

    split: str | None
    """The same in all processes: a stage hands on rows in the order of its nano-batches, and all
    pack their rounds for as many."""
    stagger: str | None
    """The same on all ranks of a stage, which communicate; other stages see the same rows."""


def _agreed_obstacles(models: Sequence[Any], groups: ParallelGroups) -> _Obstacles:
    """The first of all processes', in rank order, with whose stage it is; collective over the
    world."""
    split = why_not_split(models, groups)
    own = (groups.pp_rank, split, None if split else why_not_staggered(models))
    found: list[tuple[int, str | None, str | None]] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    is_pipeline = groups.layout.pp_size > 1
    reasons = (
        f"{reason} (pipeline stage {stage})" if is_pipeline else reason
        for stage, reason, _ in found
        if reason is not None
    )
    mine = (reason for stage, _, reason in found if stage == groups.pp_rank and reason is not None)
    return _Obstacles(split=next(reasons, None), stagger=next(mine, None))


def why_not_split(models: Sequence[Any], groups: ParallelGroups) -> str | None:
    """Why micro-batches cannot be cut at all; None if they can."""
    if groups.layout.cp_size > 1:
        return "context parallelism cuts documents over ranks"
    for name, module in _linears(models):
        if isinstance(module, RankShardedMixin | RankExchangeMixin):
            sharding = module.tlora_branch.site.lora_sharding
            return f"parallel.lora_sharding must be fold or auto for it, got {sharding}"
        if not isinstance(module, MultiAdapterMixin):
            return f"{name} is a {type(module).__name__}, which does its own communication"
    return None


def why_not_staggered(models: Sequence[Any]) -> str | None:
    """Why nano-batches cannot take turns through whole layers; None if they can."""
    for model in models:
        config = model.config
        if not isinstance(model.decoder, TransformerBlock):
            return f"the decoder is a {type(model.decoder).__name__}"
        if getattr(config, "fp8", None) or getattr(config, "cpu_offloading", False):
            return "FP8 and CPU offloading wrap whole layers"
        for layer in model.decoder.layers:
            reason = _why_not_layer(layer)
            if reason is not None:
                return f"layer {layer.layer_number - 1}: {reason}"
    return None


def _why_not_layer(layer: Any) -> str | None:
    if not isinstance(layer, FrozenTransformerLayer):
        names = {c.__name__ for c in type(layer).__mro__ if issubclass(c, TransformerLayer)}
        if not names <= {"StaggeredLayer", "StaggeredLayerTransformerLayer", "TransformerLayer"}:
            return f"it is a {type(layer).__name__}"
    if not isinstance(layer.self_attention, SelfAttention) or not isinstance(layer.mlp, MLP):
        return "it must be self-attention and an MLP"
    attention, mlp = layer.self_attention, layer.mlp
    linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
    if not all(isinstance(linear, MultiAdapterMixin) for linear in linears):
        return "not all of its linears may have adapters"
    if not isinstance(getattr(layer, "cross_attention", None), IdentityOp | None):
        return "it has cross-attention"
    recomputed = ("recompute_input_layernorm", "recompute_pre_mlp_layernorm")
    if any(getattr(layer, name, False) for name in recomputed):
        return "its norms are recomputed"
    return None


def _linears(models: Sequence[Any]) -> Iterator[tuple[str, MultiAdapter]]:
    for model in models:
        for name, module in model.decoder.named_modules():
            if isinstance(module, MultiAdapter):
                yield f"decoder.{name}", module
