"""This process's replica, and the speeds of all, by which rounds are shared out among them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.config.schema import Recompute, RunConfig, built_recompute
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.cp_dispatch import CpRates
from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.model.layout import (
    Deployment,
    ParallelLayout,
    RecomputeTable,
    ReplicaLayout,
    lay_out_world,
)
from tlora_megatron.model.quantisation import BaseQuantisation, check_block_layout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.replica_rate import replica_rate
from tlora_megatron.planner.deploy_sampled import teams_of
from tlora_megatron.runtime.planning.plan_inputs import profile_of_gpu
from tlora_megatron.runtime.recompute_choice import job_load
from tlora_megatron.training.formats.hf_convert import check_layout
from tlora_megatron.training.round_timing import RoundTiming
from tlora_megatron.training.run.preparation import PreparedJob

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
    """Refuses layouts that do not divide the model, those of other replicas too."""
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


_FLOPS_PER_PS = 400
"""Operations a picosecond without a profile; only ratios count among replicas that are alike."""
_ATTENTION_COSTS = 1.5
"""Time of an operation of attention over a GEMM's. In the profile of an H200 it is 1.3 to 1.7 for
sequences of 2,048 to 16,384."""
_BYTE_PS, _EXCHANGE_PS = 10, 20_000_000
"""Time of a byte that ranks exchange without a profile (100 GB/s), and of an exchange's beginning.
Any such times keep short sequences from being shared, which would cost nothing else."""


def resolve_round_timing(
    config: RunConfig,
    spec: Backbone,
    groups: ParallelGroups,
    jobs: Sequence[PreparedJob],
    table: RecomputeTable | None = None,
) -> RoundTiming | None:
    """Returns the speeds and depth for a run's rounds; None where one replica runs alone.

    It is a `training.run.training_run.TimingResolver`. Collective over the world: the first rank
    chooses, since machines may have unlike profiles.
    """
    depth = config.run.round_depth
    by_cp = config.parallel.cp_by_micro_batch and config.parallel.cp_size > 1
    if not jobs or (groups.layout.dp_size == 1 and depth in (1, "auto") and not by_cp):
        return None
    replicas = _replicas(config, groups)
    teams = teams_of(replicas[0]) if by_cp else ()
    found = [_rates(spec, groups, jobs, (*replicas, *teams), table, by_cp=by_cp)]
    dist.broadcast_object_list(found, src=0)
    rates, source, in_seconds = found[0]
    if groups.is_writer and depth != 1:
        logger.info("run.round_depth %s: rounds are shared out by times %s", depth, source)
    cp_rates = CpRates(rates[len(replicas) :]) if by_cp else None
    if groups.is_writer and cp_rates is not None:
        logger.info("parallel.cp_by_micro_batch: %s (%s)", cp_rates.line, source)
    stages = tuple(replica.pp_size for replica in replicas)
    return RoundTiming(
        rates=rates[: len(replicas)],
        cp_rates=cp_rates,
        stages=stages,
        depth=depth,
        is_unlike=groups.deployment is not None,
        source=source,
        in_seconds=in_seconds,
    )


def _replicas(config: RunConfig, groups: ParallelGroups) -> tuple[ReplicaLayout, ...]:
    """Every replica, with the run's budget and recompute where it has none of its own."""
    run, layout = config.run, groups.layout
    if groups.deployment is None:
        alike = ReplicaLayout(
            tp_size=layout.tp_size,
            pp_size=layout.pp_size,
            cp_size=layout.cp_size,
            sequence_parallel=layout.sequence_parallel,
        )
        replicas = (alike,) * layout.dp_size
    else:
        replicas = groups.deployment.replicas
    return tuple(
        replace(
            replica,
            micro_batch_tokens=replica.micro_batch_tokens or run.micro_batch_tokens,
            recompute=replica.recompute or built_recompute(run),
        )
        for replica in replicas
    )


def _rates(
    spec: Backbone,
    groups: ParallelGroups,
    jobs: Sequence[PreparedJob],
    replicas: Sequence[ReplicaLayout],
    table: RecomputeTable | None,
    *,
    by_cp: bool,
) -> tuple[tuple[ReplicaRate, ...], str, bool]:
    """Returns the speed of each replica, what the speeds come from, and whether in seconds."""
    gpu = torch.cuda.get_device_name(groups.device) if groups.device.type == "cuda" else None
    profile = None if gpu is None else profile_of_gpu(gpu)
    why = "" if gpu is None or profile is not None else f", as no profile is of {gpu}"
    if profile is not None and isinstance(spec, ModelSpec):
        loads = list(map(job_load, jobs))
        layout = groups.layout
        whole_experts: Literal[1] | None = 1 if layout.expert_tp < layout.tp_size else None
        try:
            by_kind = {
                kind: replica_rate(
                    spec,
                    loads,
                    Plan(**asdict(kind), expert_tp_size=whole_experts),
                    profile,
                    None if table is None else table.of_share(kind.cp_size, replicas[0].cp_size),
                )
                for kind in set(replicas)
            }
        except ValueError as error:
            why = f", since the planner says: {error}"
        else:
            source = f"predicted from the {profile.source} profile {profile.name}"
            return tuple(by_kind[kind] for kind in replicas), source, True
    of_shape = rate_of_team if by_cp else rate_of_shape
    rates = tuple(of_shape(spec, kind) for kind in replicas)
    return rates, f"from the model's shape{why}", False


def rate_of_shape(spec: Backbone, replica: ReplicaLayout) -> ReplicaRate:
    """Counts a replica's operations on a row and on a squared row of a sequence.

    Forward, the gradient of the inputs, and with full recompute forward again. Frozen weights get
    no gradients, and adapters are small beside them. Without the queries' width (a model that is
    described by linears of other names) only rows count.
    """
    if isinstance(spec, ModelSpec):
        weights = spec.row_weights
        query_size = spec.q_size
    else:
        weights = sum(linear.out_size * linear.in_size for linear in spec.linears)
        query_size = next((x.out_size for x in spec.linears if x.target == "q_proj"), 0)
    again, shares = replica.recompute == "full", replica.size
    row = 2 * weights * (2 + again) * spec.num_layers
    # Half of all pairs are masked; its backward has five products for the forward's two.
    pair = 2 * query_size * (3.5 + again) * spec.num_layers * _ATTENTION_COSTS
    return ReplicaRate(
        token_ps=max(1, round(row / _FLOPS_PER_PS / shares)),
        square_ps=round(pair / _FLOPS_PER_PS / shares),
        longest=replica.micro_batch_tokens or 1,
    )


def rate_of_team(spec: Backbone, team: ReplicaLayout) -> ReplicaRate:
    """Adds to a replica's operations what its context-parallel ranks exchange."""
    rate, others = rate_of_shape(spec, team), team.cp_size - 1
    if not others or not isinstance(spec, ModelSpec):
        return rate
    row_bytes = 2 * 2 * spec.num_kv_heads * spec.head_dim // team.tp_size
    times = (3 if team.recompute == "full" else 2) * spec.num_layers
    exchanged = row_bytes * times * _BYTE_PS * others // team.cp_size
    return replace(rate, token_ps=rate.token_ps + exchanged, fixed_ps=times * _EXCHANGE_PS)
