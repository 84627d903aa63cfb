"""Finds the fastest plan for `tlora train --plan auto`."""

from __future__ import annotations

from tlora_megatron.config.schema import RunConfig
from tlora_megatron.planner.advice import advise
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.search import RankedPlan, search
from tlora_megatron.planner.workload import LengthHistogram
from tlora_megatron.runtime.planning.plan_inputs import (
    largest_portion,
    other_profiles,
    plan_jobs,
    plan_model,
)


def best_plan(
    config: RunConfig,
    num_gpus: int,
    hardware: HardwareProfile,
    lengths: LengthHistogram | None = None,
) -> RankedPlan:
    """Returns the plan with which `tlora train` is fastest; the same one on every process.

    Raises:
        ValueError: if none fits, with changes that would help; or if jobs or data cannot be used.
    """
    spec = plan_model(config)
    jobs = plan_jobs(config, spec, lengths)
    asked = config.parallel.lora_sharding
    space = SearchSpace(
        runs_in="train",
        lora_sharding=None if asked == "auto" else asked,
        largest_portion=largest_portion(config),
        shard_optimizer=config.parallel.shard_optimizer or None,
        deterministic=config.run.deterministic or None,
    )
    result = search(spec, jobs, hardware, num_gpus, space)
    if result.best is None:
        reasons = "; ".join(dropped.reason for dropped in result.dropped[:3])
        advice = advise(spec, jobs, hardware, num_gpus, space, other_profiles(hardware))
        raise ValueError(
            f"--plan auto must find a plan that fits {num_gpus} x {hardware.gpu}, got none: "
            f"{reasons}. {advice}"
        )
    return result.best
