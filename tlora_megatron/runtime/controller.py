"""One run from configuration to results: sets the super-model up, trains it, writes the files."""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tlora_megatron.config import JobError, RunConfig, config_to_dict
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.attach import attach
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.model import ModelSpec, read_model_spec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.plan import ParallelLayout
from tlora_megatron.runtime.agreement import check_agreement
from tlora_megatron.runtime.output_dir import CONFIG_NAME, claim_output_dir, hold_output_dir
from tlora_megatron.training.data import load_tokenizer
from tlora_megatron.training.hf_convert import check_layout
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.loop import RunListener, TrainingLoop
from tlora_megatron.training.metrics import write_atomic, write_summary
from tlora_megatron.training.preparation import PreparedJob, prepare_job
from tlora_megatron.training.report import write_report
from tlora_megatron.training.super_model import SuperModel

logger = logging.getLogger(__name__)

_TRITON = (
    "this megatron-core needs triton, which CPU builds of torch leave out; "
    "pip install triton or pip install 'megatron-core<0.18'"
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train_run(config: RunConfig, listener: RunListener) -> dict[str, Any]:
    """Trains all jobs of a run; called by every process of it.

    Returns:
        The summary that `OUT/summary.json` holds; empty on every process but the writer.

    Raises:
        ValueError: for input that cannot be used, before any training.
    """
    begin_s = time.perf_counter()
    spec = read_model_spec(_model_config(config))
    layout = _layout(config)
    check_layout(spec, layout)
    output_dir = Path(config.run.output_dir)
    resuming = claim_output_dir(output_dir, config)
    prepared, rejected = _prepare_jobs(config, spec, resuming=resuming)
    groups, super_model = _build(config, spec, layout, prepared)
    with hold_output_dir(output_dir) if groups.is_writer else nullcontext():
        if groups.is_writer:
            write_atomic(output_dir / CONFIG_NAME, json.dumps(config_to_dict(config), indent=2))
        _allow_open_files(len(prepared))
        loop = _loop(config, spec, super_model, listener)
        loop.run()
        if not groups.is_writer:
            return {}
        summary = _summary(loop, layout, rejected, time.perf_counter() - begin_s)
        write_summary(output_dir, summary)
        _try_report(output_dir)
        return summary


def _loop(
    config: RunConfig, spec: ModelSpec, super_model: SuperModel, listener: RunListener
) -> TrainingLoop:
    return TrainingLoop(
        super_model,
        spec,
        listener,
        output_dir=Path(config.run.output_dir),
        base_model=_base_model_name(config),
        checkpoint_every_steps=config.run.checkpoint_every_steps,
        max_nonfinite_steps=config.run.max_nonfinite_steps,
        tensorboard=config.run.tensorboard,
        wandb_project=config.run.wandb_project,
    )


def _allow_open_files(num_jobs: int) -> None:
    """Raises this process's limit of open files, often 1024: metrics keep two a job open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + 4 * num_jobs
    if soft != resource.RLIM_INFINITY:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _try_report(output_dir: Path) -> None:
    """Writes the report; training is done, so what hinders it is a warning."""
    try:
        write_report(output_dir)
    except (ImportError, OSError, ValueError) as error:
        logger.warning("%s could not be written: %s", output_dir / "report.html", error)


def _model_config(config: RunConfig) -> Path:
    base = config.base_model
    return Path(base.path) / "config.json" if base.path is not None else Path(str(base.config))


def _model_dir(config: RunConfig) -> Path:
    """Holds the tokenizer and, unless they are drawn, the weights."""
    return _model_config(config).parent


def _base_model_name(config: RunConfig) -> str:
    """What exported adapters call their base."""
    return config.base_model.path or str(_model_dir(config))


def _layout(config: RunConfig) -> ParallelLayout:
    parallel = config.parallel
    return ParallelLayout.for_world(
        int(os.environ.get("WORLD_SIZE", "1")),
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        cp_size=parallel.cp_size,
        sequence_parallel=parallel.sequence_parallel,
    )


def _prepare_jobs(
    config: RunConfig, spec: ModelSpec, *, resuming: bool
) -> tuple[list[PreparedJob], list[JobError]]:
    """Reads every job's input; those that cannot start are left out or stop the run."""
    tokenizer = load_tokenizer(_model_dir(config))
    prepared, rejected = [], list(config.job_errors)
    for job in config.jobs:
        saved = Path(config.run.output_dir) / "jobs" / job.name / "checkpoints"
        try:
            prepared.append(
                prepare_job(
                    replace(job, seed=job.seed + config.run.seed),
                    spec,
                    tokenizer,
                    base_model=_base_model_name(config),
                    micro_batch_tokens=config.run.micro_batch_tokens,
                    saved=saved if resuming else None,
                )
            )
        except ValueError as error:
            if config.run.on_job_error == "stop":
                raise
            logger.warning("job %s is left out: %s", job.name, error)
            rejected.append(JobError(name=job.name, message=str(error)))
    if not prepared:
        reasons = "; ".join(error.message for error in rejected)
        raise ValueError(f"jobs must hold at least one that can start, got {reasons}")
    return prepared, rejected


def _build(
    config: RunConfig, spec: ModelSpec, layout: ParallelLayout, prepared: Sequence[PreparedJob]
) -> tuple[ParallelGroups, SuperModel]:
    """Sets up processes, backbone, adapters and engine."""
    try:
        from tlora_megatron.integrations.megatron import model as backbone
        from tlora_megatron.integrations.megatron import recompute
        from tlora_megatron.integrations.megatron.engine import (
            MegatronEngine,
            current_groups,
            pair_linears,
        )
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(_TRITON) from error

    backbone.initialize_parallel(layout)
    groups = current_groups(layout)
    check_agreement(config, prepared)
    dtype = _DTYPES[config.base_model.dtype]
    model = backbone.build_backbone(spec, layout, dtype=dtype, recompute=config.run.recompute)
    weights = None if config.base_model.random_init else _model_dir(config)
    backbone.load_backbone(model, spec, weights, layout, seed=config.base_model.seed)
    recompute.install()
    sites = stage_sites(spec, layout, tp_rank=groups.tp_rank, pp_rank=groups.pp_rank)
    loras = [job.spec.lora for job in prepared]
    bank = AdapterBank(sites, loras, dtype=dtype, device=groups.device)
    attach(pair_linears(model, sites), bank)
    jobs = [_start(job, spec, bank) for job in prepared]
    engine = MegatronEngine(model, groups, spec.vocab_size)
    return groups, SuperModel(
        engine, bank, groups, jobs, micro_batch_tokens=config.run.micro_batch_tokens
    )


def _start(prepared: PreparedJob, spec: ModelSpec, bank: AdapterBank) -> JobState:
    """Gives a job its adapter: from its checkpoint, an imported one, or a fresh one."""
    job = prepared.spec
    slab = bank.new_slab(job.lora)
    state = JobState(
        spec=job,
        data=prepared.data,
        plan=prepared.plan,
        adapter=Adapter(name=job.name, lora=job.lora, slab=slab),
    )
    imported = prepared.imported
    if prepared.checkpoint is not None:
        prepared.checkpoint.restore(state)
    elif imported is not None:
        slab.load(imported.__getitem__)
    else:
        slab.load(lambda name: initial_factor(spec, name, job.lora.rank, job.seed))
    return state


def _summary(
    loop: TrainingLoop, layout: ParallelLayout, rejected: Sequence[JobError], wall_time_s: float
) -> dict[str, Any]:
    jobs = {job.name: _job_summary(job, loop) for job in loop.jobs}
    for error in rejected:
        jobs[error.name] = {"status": "rejected", "reason": error.message}
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        "run": {
            "tokens_per_s": loop.tokens_per_s if loop.rounds else None,
            "world_size": dist.get_world_size(),
            "layout": asdict(layout),
            "rounds": loop.rounds,
            "train_time_s": loop.train_time_s,
            "wall_time_s": wall_time_s,
            "peak_memory_bytes": peak,
            "device": torch.cuda.get_device_name() if peak is not None else platform.machine(),
            "versions": _versions(),
        },
        "jobs": jobs,
    }


def _job_summary(job: JobState, loop: TrainingLoop) -> dict[str, Any]:
    before, after = job.eval_before, job.eval_after
    adapter = loop.job_dir(job) / "adapter"
    return {
        "status": job.status,
        "reason": job.reason,
        "rank": job.spec.lora.rank,
        "steps": job.step,
        "max_steps": job.plan.num_steps,
        "skipped_steps": job.step - job.updates,
        "last_loss": job.last_loss,
        "eval_loss_before": before and before.loss,
        "eval_loss_after": after and after.loss,
        "exact_match_before": before and before.exact_match,
        "exact_match_after": after and after.exact_match,
        "tokens": job.tokens,
        "target_tokens": job.target_tokens,
        "truncated_sequences": job.data.num_truncated,
        "dropped_sequences": job.data.num_dropped,
        "adapter": str(adapter) if job.status == "finished" else None,
    }


def _versions() -> dict[str, str]:
    names = ("tlora-megatron", "torch", "megatron-core", "transformers")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
