"""Takes deployments of unlike replicas from the planner to `tlora train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron.config.parallel_rules import settle_replicas
from tlora_megatron.config.reader import must, read_spec
from tlora_megatron.config.schema import ParallelSpec, ReplicaSpec, RunConfig
from tlora_megatron.config.sections import expand_short_form
from tlora_megatron.planner.advice import advise
from tlora_megatron.planner.deploy import RankedDeployment, deploy
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.workload import LengthHistogram
from tlora_megatron.runtime.planning.plan_files import (
    SIZES,
    as_overrides,
    start_command,
    write_config,
)
from tlora_megatron.runtime.planning.plan_inputs import other_profiles, plan_jobs, plan_model


def check_deployable(config: RunConfig) -> None:
    """Refuses configurations that unlike replicas cannot keep."""
    why = "with --replicas any"
    # Portions are dealt out by replicas' sizes, and what is chosen here rests on time alone.
    remedy = "leave --replicas any out, or name parallel.replicas yourself"
    if config.run.deterministic:
        raise must("run.deterministic", f"be false {why}", True, remedy)
    if config.parallel.shard_optimizer:
        raise must("parallel.shard_optimizer", f"be false {why}", True, "leave --replicas any out")
    if config.parallel.lora_sharding not in ("auto", "fold"):
        raise must(
            "parallel.lora_sharding", f"be auto or fold {why}", config.parallel.lora_sharding
        )
    for job in config.jobs:
        if job.portion_tokens is not None:
            name = f"portion_tokens of job {job.name}"
            raise must(name, f"be null {why}", job.portion_tokens, remedy)


def best_deployment(
    config: RunConfig,
    num_gpus: int,
    hardware: HardwareProfile,
    lengths: LengthHistogram | None = None,
) -> RankedDeployment:
    """Returns the deployment with which `tlora train` is fastest; the same one on every process.

    Raises:
        ValueError: if no replica holds the longest sequence, or for what cannot be used.
    """
    check_deployable(config)
    spec = plan_model(config)
    jobs = plan_jobs(config, spec, lengths)
    space = SearchSpace(runs_in="train")
    best = deploy(spec, jobs, hardware, num_gpus, space).best
    if best is None:
        longest = max(job.lengths.longest for job in jobs)
        advice = advise(spec, jobs, hardware, num_gpus, space, other_profiles(hardware))
        raise ValueError(
            f"--replicas any must find replicas for sequences of {longest} tokens on {num_gpus} x "
            f"{hardware.gpu}, got none. Replicas alike: {advice}"
        )
    return best


def deployment_overrides(config: RunConfig, best: RankedDeployment) -> list[str]:
    """The deployment as overrides for `tlora train --set`."""
    applied, given, plain = _deployed(config, best), config.parallel, ParallelSpec()
    # Replicas have even stages.
    stages = ("first_stage_layers", "last_stage_layers")
    even = [f"parallel.{key}=null" for key in stages if getattr(given, key) is not None]
    if best.has_recompute_by_rows:
        return [
            *([] if given.replicas is None else ["parallel.replicas=null"]),
            *even,
            *as_overrides(applied, "parallel", SIZES),
            *as_overrides(applied, "run", ("micro_batch_tokens", "recompute", "round_depth")),
        ]
    sizes = [name for name in SIZES if getattr(given, name) != getattr(plain, name)]
    return [
        *even,
        *as_overrides(replace(config, parallel=plain), "parallel", sizes),
        f"parallel.replicas={best.deployment}",
        *as_overrides(applied, "run", ("nano_batches", "round_depth")),
    ]


def write_deployment(
    path: Path, config: RunConfig, best: RankedDeployment, hardware: HardwareProfile
) -> str:
    """Writes a configuration with the deployment; returns the line that starts it."""
    write_config(path, _deployed(config, best))
    return start_command(path, best.deployment.world_size, hardware)


def _deployed(config: RunConfig, best: RankedDeployment) -> RunConfig:
    # Where the configuration leaves the default depth, auto is what was planned.
    depth = config.run.round_depth
    run = replace(config.run, round_depth="auto" if depth == 1 else depth)
    plain = ParallelSpec(lora_sharding=config.parallel.lora_sharding)
    if best.has_recompute_by_rows:  # which `parallel.replicas` does not name: all are alike
        layout = best.deployment.replicas[0]
        assert layout.micro_batch_tokens is not None, "the planner names every budget"
        sizes: dict[str, Any] = {name: getattr(layout, name) for name in SIZES}
        run = replace(run, micro_batch_tokens=layout.micro_batch_tokens, recompute="auto")
        return replace(config, parallel=replace(plain, **sizes), run=run)
    if not best.deployment.tp_is_alike:
        run = replace(run, nano_batches=1)
    parts = expand_short_form(str(best.deployment), "parallel.replicas")
    specs = tuple(read_spec(ReplicaSpec, part, "parallel.replicas") for part in parts)
    parallel, run = settle_replicas(replace(plain, replicas=specs), run)
    return replace(config, parallel=parallel, run=run)
