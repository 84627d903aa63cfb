"""Takes deployments of unlike replicas from the planner to `tlora train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from tlora_megatron.config.parallel_rules import settle_replicas
from tlora_megatron.config.reader import must, read_spec
from tlora_megatron.config.schema import ParallelSpec, ReplicaSpec, RunConfig
from tlora_megatron.config.sections import expand_short_form
from tlora_megatron.planner.advice import advise
from tlora_megatron.planner.deploy import RankedDeployment, deploy
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.workload import LengthHistogram
from tlora_megatron.runtime.planning.plan_files import start_command, write_config
from tlora_megatron.runtime.planning.plan_inputs import other_profiles, plan_jobs, plan_model


def check_deployable(config: RunConfig) -> None:
    """Refuses configurations that unlike replicas cannot keep.

    Raises:
        ConfigError: naming the key.
    """
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
    if best.has_recompute_by_rows:
        return _plain_overrides(config, best)
    parallel = ParallelSpec()
    plain = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "sequence_parallel": False}
    given = [name for name in plain if getattr(config.parallel, name) != getattr(parallel, name)]
    return [
        *_even_stages(config),
        *(f"parallel.{name}={str(plain[name]).lower()}" for name in given),
        f"parallel.replicas={best.deployment}",
        f"run.nano_batches={_nano_batches(config, best)}",
        f"run.round_depth={_round_depth(config)}",
    ]


def _plain_overrides(config: RunConfig, best: RankedDeployment) -> list[str]:
    """Alike replicas with recompute by rows, which `parallel.replicas` does not name."""
    layout = best.deployment.replicas[0]
    replaced = [] if config.parallel.replicas is None else ["parallel.replicas=null"]
    return [
        *replaced,
        *_even_stages(config),
        f"parallel.tp_size={layout.tp_size}",
        f"parallel.pp_size={layout.pp_size}",
        f"parallel.cp_size={layout.cp_size}",
        f"parallel.sequence_parallel={str(layout.sequence_parallel).lower()}",
        f"run.micro_batch_tokens={layout.micro_batch_tokens}",
        "run.recompute=auto",
        f"run.round_depth={_round_depth(config)}",
    ]


def _even_stages(config: RunConfig) -> list[str]:
    """Takes back sizes of stages that the configuration gives: replicas have even ones."""
    keys = ("first_stage_layers", "last_stage_layers")
    return [f"parallel.{key}=null" for key in keys if getattr(config.parallel, key) is not None]


def write_deployment(
    path: Path, config: RunConfig, best: RankedDeployment, hardware: HardwareProfile
) -> str:
    """Writes a configuration with the deployment; returns the line that starts it."""
    if best.has_recompute_by_rows:
        write_config(path, _with_recompute_by_rows(config, best))
        return start_command(path, best.deployment.world_size, hardware)
    parts = expand_short_form(str(best.deployment), "parallel.replicas")
    specs = tuple(read_spec(ReplicaSpec, part, "parallel.replicas") for part in parts)
    plain = ParallelSpec(replicas=specs, lora_sharding=config.parallel.lora_sharding)
    run = replace(
        config.run, nano_batches=_nano_batches(config, best), round_depth=_round_depth(config)
    )
    parallel, run = settle_replicas(plain, run)
    write_config(path, replace(config, parallel=parallel, run=run))
    return start_command(path, best.deployment.world_size, hardware)


def _with_recompute_by_rows(config: RunConfig, best: RankedDeployment) -> RunConfig:
    layout = best.deployment.replicas[0]
    assert layout.micro_batch_tokens is not None, "the planner names every budget"
    parallel = ParallelSpec(
        tp_size=layout.tp_size,
        pp_size=layout.pp_size,
        cp_size=layout.cp_size,
        sequence_parallel=layout.sequence_parallel,
        lora_sharding=config.parallel.lora_sharding,
    )
    run = replace(
        config.run,
        micro_batch_tokens=layout.micro_batch_tokens,
        recompute="auto",
        round_depth=_round_depth(config),
    )
    return replace(config, parallel=parallel, run=run)


def _nano_batches(config: RunConfig, best: RankedDeployment) -> int | Literal["auto"]:
    """The value of the configuration; 1 where replicas differ in TP size."""
    return config.run.nano_batches if best.deployment.tp_is_alike else 1


def _round_depth(config: RunConfig) -> Literal[1, 2, 4, "auto"]:
    """The value of the configuration; auto where it leaves the default, as was planned."""
    return "auto" if config.run.round_depth == 1 else config.run.round_depth
