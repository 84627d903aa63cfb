"""Decides which of a run's jobs can start; the others are left out, or stop the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from tlora_megatron.config.load import JobError, RunConfig
from tlora_megatron.layers.attach import check_blocks_fit
from tlora_megatron.layers.sites import Site, check_targets
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.block_sizes import check_block_sizes
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.data.job_data import load_tokenizer
from tlora_megatron.training.preparation import PreparedJob, prepare_job
from tlora_megatron.training.run.job_folders import check_job_folders
from tlora_megatron.training.run.resumption import check_resumption

logger = logging.getLogger(__name__)


class JobAdmission:
    """The jobs of a run that can start, and those that cannot.

    Raises:
        ValueError: with `run.on_job_error: stop`, for the first job that cannot start; else if none
            can.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: Backbone,
        *,
        tokenizer_dir: Path,
        base_model: str,
        resuming: bool,
    ) -> None:
        self.rejected: list[JobError] = list(config.job_errors)
        self._spec = spec
        self._stops = config.run.on_job_error == "stop"
        tokenizer = load_tokenizer(tokenizer_dir)
        # How other models' linears are divided shows when they are built: checked then.
        tp_size = config.parallel.tp_size if isinstance(spec, ModelSpec) else 1
        self.prepared: list[PreparedJob] = []
        for job in config.jobs:
            try:
                check_block_sizes(job.name, job.lora, spec, tp_size)
                saved = Path(config.run.output_dir) / "jobs" / job.name / "checkpoints"
                prepared = prepare_job(
                    replace(job, seed=job.seed + config.run.seed),
                    spec,
                    tokenizer,
                    base_model=base_model,
                    micro_batch_tokens=config.run.micro_batch_tokens,
                    saved=saved if resuming else None,
                )
                check_resumption(prepared)
                if (
                    prepared.checkpoint is None
                    or prepared.checkpoint.step < prepared.plan.num_steps
                ):
                    check_job_folders(Path(config.run.output_dir), job.name)
                self.prepared.append(prepared)
            except ValueError as error:
                self._reject(job.name, error)
        self._require_any()

    def check_sites(
        self, layout: ParallelLayout, linears: Sequence[tuple[Site, nn.Module]]
    ) -> None:
        """Rejects jobs whose targets the built model lacks or its layout cannot divide.

        Raises:
            ValueError: see the class.
        """
        able = []
        for job in self.prepared:
            name, lora = job.spec.name, job.spec.lora
            try:
                check_targets(self._spec, layout, name, lora.target_modules)
                check_block_sizes(name, lora, self._spec, layout.tp_size)
                check_blocks_fit(name, lora, linears)
                able.append(job)
            except ValueError as error:
                self._reject(name, error)
        self.prepared = able
        self._require_any()

    def _reject(self, name: str, error: ValueError) -> None:
        if self._stops:
            raise error
        logger.warning("job %s is left out: %s", name, error)
        self.rejected.append(JobError(name=name, message=str(error)))

    def _require_any(self) -> None:
        if not self.prepared:
            reasons = "; ".join(error.message for error in self.rejected)
            raise ValueError(f"jobs must hold at least one that can start, got {reasons}")
