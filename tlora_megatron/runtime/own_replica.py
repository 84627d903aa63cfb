"""This process's replica: what a configuration makes of it, whoever else is in the world."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from tlora_megatron.config.schema import Recompute, RunConfig, built_recompute
from tlora_megatron.model.deployment import Deployment, lay_out_world
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import BaseQuantisation, check_block_layout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.formats.hf_convert import check_layout

logger = logging.getLogger(__name__)


class OwnReplica(NamedTuple):
    """The layout of this process's replica, and all replicas where they are unlike."""

    layout: ParallelLayout
    deployment: Deployment | None
    """None = all are as `layout` says."""
    recompute: Recompute


def own_replica(
    config: RunConfig, *, rank: int | None = None, world_size: int | None = None
) -> OwnReplica:
    """Returns the replica of a process.

    Args:
        rank, world_size: its place in the world; None = as torchrun's environment says.

    Raises:
        ValueError: if the configuration does not take as many processes as there are.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    deployment = lay_out_world(config.parallel, world_size)
    if isinstance(deployment, ParallelLayout):
        return OwnReplica(deployment, None, built_recompute(config.run))
    own = deployment.placed(rank).layout
    layout = own.parallel_layout(len(deployment.replicas))
    return OwnReplica(layout, deployment, own.recompute or built_recompute(config.run))


def log_replicas(groups: ParallelGroups) -> None:
    """Logs, on the writer, which replica is on which processes, and where gradients are summed."""
    deployment = groups.deployment
    if deployment is None or not groups.is_writer:
        return
    for replica in deployment.placed_replicas():
        first, last = replica.ranks[0], replica.ranks[-1]
        where = f"process {first}" if first == last else f"processes {first} to {last}"
        logger.info("replica %d is %s on %s", replica.index, Deployment((replica.layout,)), where)
    logger.info(
        "%d replicas of %d layouts sum adapters in cells of 1/%d of the columns, between the "
        "stages' borders", len(deployment.replicas), len(deployment.kinds), deployment.atoms,
    )  # fmt: skip


def warn_of_sharding(config: RunConfig, groups: ParallelGroups) -> None:
    """Logs, on the writer, that there are no replicas to divide what shall be divided."""
    is_lone = groups.layout.dp_size * groups.layout.cp_size == 1
    if config.parallel.shard_optimizer and is_lone and groups.is_writer:
        logger.warning("parallel.shard_optimizer has no effect with one replica")


def check_replicas_fit(
    spec: ModelSpec, quantisation: BaseQuantisation | None, own: OwnReplica
) -> None:
    """Refuses layouts that do not divide the model, those of other replicas too.

    Raises:
        ValueError: naming the size.
    """
    layouts = [own.layout]
    if own.deployment is not None:
        layouts = [kind.parallel_layout(1) for kind in own.deployment.kinds]
        atoms = own.deployment.atoms
        if spec.hidden_size % atoms:
            raise ValueError(
                f"hidden_size must be a multiple of {atoms}, the least common one of the replicas' "
                f"TP sizes, got {spec.hidden_size}"
            )
        if quantisation is not None and not own.deployment.tp_is_alike:
            raise ValueError(
                "parallel.replicas must have one tp_size over an FP8 base, got "
                f"{own.deployment}: a rank's part of a row has a scale of its own, so losses would "
                "follow from the replica that a sequence meets"
            )
    for layout in layouts:
        check_layout(spec, layout)
        if quantisation is not None:
            check_block_layout(spec, quantisation, layout)
