"""Many LoRA jobs over one base under DeepSpeed, trained to their ends or round by round."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tlora_megatron import timeline
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.load import config_to_dict, ignored_settings, read_config
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.runtime.choices import resolve_lora_sharding, resolve_round_timing
from tlora_megatron.training.job_state import EvalResult
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.metrics import EventSink
from tlora_megatron.training.run.determinism import set_environment
from tlora_megatron.training.run.training_run import TrainingRun
from tlora_megatron.training.signals import StopSignals
from tlora_megatron.training.super_model import StepReport

if TYPE_CHECKING:
    from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig
    from tlora_megatron.integrations.deepspeed.engine import FrozenBase
    from tlora_megatron.integrations.deepspeed.job_defaults import TrainerValues

logger = logging.getLogger(__name__)


def initialize(
    model: Any = None,
    config: str | Path | dict[str, Any] | None = None,
    *,
    overrides: Sequence[str] = (),
    output_dir: str | None = None,
    events: EventSink | None = None,
    signals: StopSignals | None = None,
) -> DeepSpeedRun:
    """Puts a model under DeepSpeed and the configured jobs on it; every process must call it.

    Args:
        model: a causal model of transformers, or its directory; None = as `tlora.base_model` says.
        config: a DeepSpeed JSON with a `tlora` section or a `tlora_config` file, or its values.
        events: takes what happens, on every rank that gives one; mostly that is the first alone.
        signals: installed by the caller; they stop the run behind a round with all jobs saved. None
            = handlers of signals are left alone. Given on every process or on none.

    Raises:
        RuntimeError: if this DeepSpeed is not one of those supported.
    """
    timeline.begin_run()
    settings = read_settings(model, config, overrides=overrides, output_dir=output_dir)
    for sentence in settings.changes:
        logger.info("%s", sentence)
    given = None if isinstance(model, str | Path) else model
    return open_run(settings, given, events, signals)


def read_settings(
    model: Any,
    config: str | Path | dict[str, Any] | None,
    *,
    overrides: Sequence[str] = (),
    output_dir: str | None = None,
    trainer: TrainerValues | None = None,
) -> DeepSpeedConfig:
    """Checks DeepSpeed and reads all that a run is told, before anything is built."""
    from tlora_megatron.integrations.deepspeed.known_keys import check_deepspeed

    with timeline.phase("imports"):
        check_deepspeed()
    if config is None:
        raise ValueError("config must be a DeepSpeed JSON with a tlora section, got None")
    with timeline.phase("imports"):
        from tlora_megatron.integrations.deepspeed.config import load_deepspeed_config
        from tlora_megatron.integrations.deepspeed.engine import base_of_model

    overrides = list(overrides)
    if isinstance(model, str | Path):
        # In quotes: a path may hold what means something else in YAML.
        overrides.append(f"base_model.path={json.dumps(str(Path(model).resolve()))}")
        model = None
    given = None if model is None else base_of_model(model)
    settings = load_deepspeed_config(
        config, overrides, output_dir=output_dir, base_model=given, trainer=trainer
    )
    check_deepspeed(settings.tp_size)
    return replace(settings, changes=(*settings.changes, *ignored_settings(settings.run)))


def open_run(
    settings: DeepSpeedConfig,
    model: Any = None,
    events: EventSink | None = None,
    signals: StopSignals | None = None,
) -> DeepSpeedRun:
    """Puts a base under DeepSpeed and the settings' jobs on it; every process must call it."""
    set_environment(settings.run.run.deterministic)
    with timeline.phase("imports"):
        from tlora_megatron.integrations.deepspeed.engine import build_base, join_processes

    join_processes()
    with timeline.phase("base"):
        base = build_base(settings, model)
    return DeepSpeedRun(base, settings.run, events, signals)


class DeepSpeedRun:
    """Jobs over one base. Every process of the run makes every call, and `close` at the end.

    `train` runs all jobs to their ends. `train_round` runs one round, for callers with a loop of
    their own. `install_jobs` puts a new set of jobs on the same base.
    """

    def __init__(
        self,
        base: FrozenBase,
        config: RunConfig,
        events: EventSink | None,
        signals: StopSignals | None = None,
    ) -> None:
        self.base = base
        self._events = events
        self._signals = signals
        self._run = self._open_run(config)

    def _open_run(self, config: RunConfig) -> TrainingRun:
        run = TrainingRun(
            config,
            self.base.spec,
            events=self._events,
            resolve_sharding=resolve_lora_sharding,
            resolve_timing=resolve_round_timing,
            signals=self._signals,
        )
        try:
            run.check_agreement()
            base = self.base
            run.start(base.groups, base.linears, base.engine, placement=base.placement)
        except BaseException:
            run.close()
            raise
        return run

    @property
    def loop(self) -> Loop:
        """The loop over the jobs that are installed."""
        assert self._run.loop is not None, "a run has a loop once it has started"
        return self._run.loop

    @property
    def is_over(self) -> bool:
        """True once every job has finished or failed, or a signal has stopped the run."""
        return self.loop.has_ended

    def train(self) -> dict[str, Any]:
        """Trains every job to its end, or until a signal stops the run.

        Returns:
            The content of `OUT/summary.json`; empty on every process but the first.
        """
        try:
            self.loop.run()
            return self._run.finish()
        finally:
            self._run.close()

    def train_round(self) -> list[StepReport]:
        """Runs one round with its metrics, evaluation, checkpoints and exports.

        Returns:
            One report for each job that made a step; none once all jobs have ended.
        """
        return self.loop.step()

    def finish(self) -> dict[str, Any]:
        """Writes summary and report behind a caller's own loop; returns what `train` does."""
        try:
            return self._run.finish()
        finally:
            self._run.close()

    def evaluate(self) -> dict[str, EvalResult]:
        """Evaluates the jobs that still train, with their present adapters."""
        jobs = [job for job in self.loop.super_model.jobs if job.is_active]
        results = self.loop.super_model.evaluate(jobs)
        return {
            job.name: result
            for job, result in zip(jobs, results, strict=True)
            if result is not None
        }

    def install_jobs(
        self, jobs: Sequence[JobSpec], *, output_dir: str | Path | None = None
    ) -> None:
        """Saves the present jobs, takes them off the base and puts new ones on it.

        A job that has a checkpoint in the run's directory goes on from there.

        Args:
            output_dir: output folder of the new run; None = the same.

        Raises:
            ValueError: if a field of a job is wrong or its files are missing, and the present jobs
                stay; or if a job does not fit the base, and none is left until others are
                installed.
        """
        # Checked like a configuration that is read from a file.
        document = config_to_dict(replace(self._run.config, jobs=tuple(jobs)))
        base_model = self._run.config.base_model
        config = read_config(document, Path.cwd(), targets=None, base_model=base_model)
        self.save()
        self.loop.super_model.set_jobs(())  # their room is free before the new ones' is taken
        self._run.close()
        dist.barrier()  # every process is about to look for what the first has written
        timeline.begin_run()
        if output_dir is not None:
            run = replace(config.run, output_dir=str(Path(output_dir).resolve()))
            config = replace(config, run=run)
        self._run = self._open_run(config)

    def save(self) -> None:
        """Checkpoints every job that still trains; they are on the disk when it returns."""
        self.loop.save_active()
        self.loop.saves.drain()

    def export(self, name: str, directory: str | Path) -> None:
        """Writes a job's present adapter as a PEFT directory; the first process writes it.

        Raises:
            ValueError: if no such job is there, or the directory holds something else.
        """
        jobs = {job.name: job for job in self.loop.jobs}
        if name not in jobs:
            raise ValueError(f"job must be one of {', '.join(jobs)}, got {name!r}")
        # A link was given on purpose: the adapter is written where it leads.
        self.loop.saves.export(jobs[name], Path(directory).resolve())

    def close(self) -> None:
        """Closes files; the model stays as it is, with the adapters on it."""
        self._run.close()


MultiLoRAEngine = DeepSpeedRun
"""Earlier name of `DeepSpeedRun`."""
