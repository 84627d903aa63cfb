"""Chooses the recompute of a run's micro-batches by their rows, where the run leaves it open."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.choices import recompute_for_rows
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.runtime.planning.plan_inputs import plan_hardware, plan_model, profile_of_gpu
from tlora_megatron.training.packing.round_packer import row_multiple
from tlora_megatron.training.preparation import PreparedJob

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
    layout, tokens = groups.layout, config.run.micro_batch_tokens
    plan = Plan(
        tp_size=layout.tp_size,
        pp_size=layout.pp_size,
        cp_size=layout.cp_size,
        dp_size=layout.dp_size,
        expert_tp_size=1 if layout.expert_tp < layout.tp_size else None,
        sequence_parallel=layout.sequence_parallel,
        first_stage_layers=layout.first_stage_layers,
        last_stage_layers=layout.last_stage_layers,
        lora_sharding=layout.lora_sharding,
        micro_batch_tokens=tokens,
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
