"""Chooses what a run leaves open: its LoRA sharding, and the recompute of micro-batches by rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tlora_megatron.config.schema import RunConfig, built_recompute
from tlora_megatron.layers.transformer_engine import TEProductMixin
from tlora_megatron.model.backbone import Backbone, LinearsSpec
from tlora_megatron.model.layout import LoraSharding, RecomputeTable
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.choices import (
    ShardingChoice,
    choose_lora_sharding,
    recompute_for_rows,
    sharding_times,
)
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.runtime.planning.plan_inputs import plan_hardware, plan_model, profile_of_gpu
from tlora_megatron.training.packing.round_packer import row_multiple
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
    plan = replace(
        _plan(config, groups),
        lora_sharding=groups.layout.lora_sharding,
        shard_optimizer=config.parallel.shard_optimizer,
    )
    any_rows = LengthHistogram.single(1)  # the table goes through all numbers of rows
    loads = [JobLoad.from_spec(job.spec, any_rows) for job in jobs]
    memory = MemoryModel(plan_model(config), loads, _hardware(config, groups))
    is_gpu, multiple = groups.device.type == "cuda", row_multiple(groups)
    table = recompute_for_rows(
        memory, plan, budget_bytes, multiple=multiple, least_rows=None if is_gpu else multiple
    )
    _tell(table, budget_bytes, tokens)
    return table


def _plan(config: RunConfig, groups: ParallelGroups) -> Plan:
    layout = groups.layout
    return Plan(
        tp_size=layout.tp_size,
        pp_size=layout.pp_size,
        cp_size=layout.cp_size,
        dp_size=layout.dp_size,
        expert_tp_size=1 if layout.expert_tp < layout.tp_size else None,
        sequence_parallel=layout.sequence_parallel,
        first_stage_layers=layout.first_stage_layers,
        last_stage_layers=layout.last_stage_layers,
        micro_batch_tokens=config.run.micro_batch_tokens,
    )


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
    recompute = built_recompute(config.run)
    plan = replace(_plan(config, groups), ep_size=groups.layout.ep_size, recompute=recompute)
    try:
        times = sharding_times(spec, list(map(job_load, jobs)), plan, profile)
    except ValueError as error:
        return {}, f"not predicted: {error}"
    return times, f"predicted from the {profile.source} profile {profile.name}"


def job_load(job: PreparedJob) -> JobLoad:
    """A job as the planner sees it, its lengths those of its training data."""
    rows = [len(sequence.tokens) - 1 for sequence in job.data.train]
    return JobLoad.from_spec(job.spec, LengthHistogram.from_lengths(rows))
