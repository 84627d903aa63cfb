"""Chooses what a run leaves open: LoRA sharding, recompute by rows, how rounds are shared out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from tlora_megatron.config.schema import RunConfig, built_recompute, shared_fields
from tlora_megatron.layers.transformer_engine import TEProductMixin
from tlora_megatron.model.backbone import Backbone, LinearsSpec
from tlora_megatron.model.cp_dispatch import CpRates
from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.model.layout import LoraSharding, RecomputeTable, ReplicaLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.choices import (
    ShardingChoice,
    choose_lora_sharding,
    recompute_for_rows,
    replica_rate,
    sharding_times,
)
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.deploy_sampled import teams_of
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.runtime.planning.plan_inputs import base_shape, plan_hardware, profile_of_gpu
from tlora_megatron.training.data.mapped_tokens import rows_of
from tlora_megatron.training.packing.round_packer import row_multiple
from tlora_megatron.training.round_timing import RoundTiming
from tlora_megatron.training.run.preparation import PreparedJob
from tlora_megatron.training.run.training_run import Linears

logger = logging.getLogger(__name__)

_SOME_PROFILE = "h200"
"""Stands in where a GPU has none: drivers and libraries take as much on most."""


def choose_recompute(
    config: RunConfig, groups: ParallelGroups, jobs: Sequence[PreparedJob]
) -> RecomputeTable | None:
    """Returns the recompute of micro-batches by rows; None where all have the run's own.

    It is a `training.run.training_run.RecomputeChooser`. Collective over the world: the GPU with
    the least memory decides, and the first rank computes, since profiles of machines may differ.
    """
    if config.run.recompute != "auto":
        return None
    budget = torch.tensor(_memory_bytes(config, groups), dtype=torch.float64, device=groups.device)
    dist.all_reduce(budget, op=dist.ReduceOp.MIN)
    found: list[RecomputeTable | None] = [None]
    if dist.get_rank() == 0:
        found = [_table(config, groups, jobs, budget.item())]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _table(
    config: RunConfig, groups: ParallelGroups, jobs: Sequence[PreparedJob], budget_bytes: float
) -> RecomputeTable:
    tokens = config.run.micro_batch_tokens
    plan = replace(_plan(config, groups), shard_optimizer=config.parallel.shard_optimizer)
    any_rows = LengthHistogram.single(1)  # the table goes through all numbers of rows
    loads = [JobLoad.from_spec(job.spec, any_rows) for job in jobs]
    memory = MemoryModel(base_shape(config.base_model), loads, _hardware(config, groups))
    is_gpu, multiple = groups.device.type == "cuda", row_multiple(groups)
    table = recompute_for_rows(
        memory, plan, budget_bytes, multiple=multiple, least_rows=None if is_gpu else multiple
    )
    _tell(table, budget_bytes, tokens)
    return table


def _plan(config: RunConfig, groups: ParallelGroups) -> Plan:
    tokens = config.run.micro_batch_tokens
    return Plan(**shared_fields(groups.layout, Plan), micro_batch_tokens=tokens)


def _tell(table: RecomputeTable, budget_bytes: float, tokens: int) -> None:
    is_free = budget_bytes == float("inf")
    where = "no GPU limits it" if is_free else f"in {budget_bytes / 1e9:.4g} GB of a GPU"
    logger.info("run.recompute: %s (auto: %s)", table.line, where)
    heaviest, most = table.most_rows[-1]
    if most < tokens:
        logger.warning(
            "run.micro_batch_tokens should be at most %d, got %d: more rows are predicted not to "
            "fit %s, even with recompute %s",
            most,
            tokens,
            where,
            heaviest,
        )


def _memory_bytes(config: RunConfig, groups: ParallelGroups) -> float:
    """Memory of this process's GPU that the run may count on; infinite without a GPU.

    What other processes hold is taken off. This one's own driver and libraries, which a profile
    counts, are not, so that every start of a run finds the same.
    """
    asked = config.run.gpu_memory_gb
    budget = float("inf") if asked is None else asked * 1e9
    if groups.device.type != "cuda":
        return budget
    free, total = torch.cuda.mem_get_info(groups.device)
    others = total - free - torch.cuda.memory_reserved(groups.device)
    expected = _hardware(config, groups).reserved_bytes
    return min(budget, total - max(0.0, others - expected))


def _hardware(config: RunConfig, groups: ParallelGroups) -> HardwareProfile:
    """The profile of this process's GPU, in the run's dtype."""
    profile, dtype = plan_hardware(_SOME_PROFILE), config.base_model.dtype
    if groups.device.type != "cuda":
        return replace(profile, dtype=dtype, reserved_bytes=0.0)
    own = profile_of_gpu(torch.cuda.get_device_name(groups.device))
    return replace(own or profile, dtype=dtype)


def resolve_lora_sharding(
    config: RunConfig,
    spec: Backbone,
    groups: ParallelGroups,
    linears: Linears,
    jobs: Sequence[PreparedJob],
) -> tuple[ParallelGroups, Linears]:
    """Returns groups and linears with the run's LoRA sharding in them; logs the choice and why.

    It is a `training.run.training_run.ShardingResolver`. Collective over the world, replicas
    without tensor parallelism included: the first rank chooses, since machines may differ.
    """
    if isinstance(spec, LinearsSpec):
        return groups, linears
    choice = _agreed_choice(config, spec, groups, linears, jobs)
    if choice is None or groups.layout.tp_size == 1:
        return groups, linears
    if groups.is_writer:
        logger.info("%s", choice.line)
    sharding = choice.sharding
    layout = replace(groups.layout, lora_sharding=sharding)
    sites = [
        (site if site.experts else replace(site, lora_sharding=sharding), module)
        for site, module in linears
    ]
    return replace(groups, layout=layout), sites


def _agreed_choice(
    config: RunConfig,
    spec: Backbone,
    groups: ParallelGroups,
    linears: Linears,
    jobs: Sequence[PreparedJob],
) -> ShardingChoice | None:
    """The same on all ranks; None if none has tensor parallelism."""
    asked = config.parallel.lora_sharding
    dense = [module for site, module in linears if site.experts is None]
    others = [module for module in dense if not hasattr(module, "_forward_impl")]
    foreign = {
        type(module).__name__.removeprefix("MultiLoRA")
        for module in others
        if asked == "s_lora" or not isinstance(module, TEProductMixin)
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (groups.layout.tp_size, sorted(foreign), bool(others)))
    tp_sizes = {tp_size for tp_size, *_ in found}
    if tp_sizes == {1}:
        return None
    black_box = next((name for _, names, _ in found for name in names), None)
    times: dict[LoraSharding, float] = {}
    # What our kernels can compute is computed around the base, by fold too, where they do not.
    source = "of what works around Transformer Engine's linears too, fold exchanges least"
    if asked == "auto" and len(tp_sizes) == 1 and not any(has_others for *_, has_others in found):
        times, source = _predict(config, spec, groups, jobs)
    choice = choose_lora_sharding(
        asked,
        tp_sizes=tp_sizes,
        black_box=black_box,
        overlaps=config.run.nano_batches != 1,
        times_s=times,
        source=source,
    )
    agreed = [choice]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def _predict(
    config: RunConfig, spec: Backbone, groups: ParallelGroups, jobs: Sequence[PreparedJob]
) -> tuple[dict[LoraSharding, float], str]:
    """Predicts the seconds of a round for each sharding; no seconds where nothing predicts them.

    The second value says what the seconds come from, or why there are none.
    """
    if groups.device.type != "cuda" or not isinstance(spec, ModelSpec):
        return {}, "nothing predicts times here"
    gpu = torch.cuda.get_device_name(groups.device)
    profile = profile_of_gpu(gpu)
    if profile is None:
        return {}, f"no profile in configs/hardware is of {gpu}"
    plan = replace(_plan(config, groups), recompute=built_recompute(config.run))
    try:
        times = sharding_times(spec, list(map(job_load, jobs)), plan, profile)
    except ValueError as error:
        return {}, f"not predicted: {error}"
    return times, f"predicted from the {profile.source} profile {profile.name}"


def job_load(job: PreparedJob) -> JobLoad:
    """A job as the planner sees it, its lengths those of its training data."""
    rows = rows_of(job.data.train, job.spec.num_sides)
    return JobLoad.from_spec(job.spec, LengthHistogram.from_lengths(rows.tolist()))


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
        alike = ReplicaLayout(**shared_fields(layout, ReplicaLayout))
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
        of_experts: Any = {"expert_tp_size": groups.layout.expert_tp_size}
        try:
            by_kind = {
                kind: replica_rate(
                    spec,
                    loads,
                    Plan(**asdict(kind), **of_experts),
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
