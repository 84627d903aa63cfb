"""One run's jobs from checked input to files, whoever builds and drives the backbone.

`tlora train` builds a backbone and drives it (`controller`); under Megatron-LM's trainer somebody
else does both (`integrations.megatron_lm`).
"""

from __future__ import annotations

import json
import logging
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tlora_megatron.config.load import JobError, RunConfig, config_to_dict
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.attach import attach, check_blocks_fit
from tlora_megatron.layers.sites import Site, check_targets
from tlora_megatron.layers.slab import StatePlacement, initial_factor
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.block_sizes import check_block_sizes
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.transport.tensor_collectives import DEFAULT_MAX_BYTES
from tlora_megatron.runtime.agreement import check_agreement
from tlora_megatron.runtime.lora_sharding import settle_lora_sharding
from tlora_megatron.runtime.output_dir import CONFIG_NAME, claim_output_dir, hold_output_dir
from tlora_megatron.runtime.summary import summarize, summarize_nano_batches
from tlora_megatron.training.data.job_data import load_tokenizer
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.loop import RunListener, TrainingLoop
from tlora_megatron.training.metrics import write_atomic, write_summary
from tlora_megatron.training.nano.rounds import NanoEngine, NanoRounds, RankAwareCut
from tlora_megatron.training.packing.packing import RoundShape
from tlora_megatron.training.preparation import PreparedJob, prepare_job
from tlora_megatron.training.report.report import write_report
from tlora_megatron.training.super_model import Engine, SuperModel

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By `base_model.dtype`."""


class TrainingRun:
    """Use it as a context manager, or call `close`: what it holds is let go of, however it ends.

    Construct it (no process group is needed), `check_agreement` once there is one, `start` when the
    backbone stands; drive the loop; `finish`. Every process of the run makes every call.

    Args:
        spec: of the backbone.
        tokenizer_dir: Hugging Face folder of the tokenizer.
        base_model: what exported adapters call their base.
        listener: on every rank; a silent one on all but the first.

    Raises:
        ValueError: for input that cannot be used.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: Backbone,
        *,
        tokenizer_dir: Path,
        base_model: str,
        listener: RunListener,
    ) -> None:
        self._begin_s = time.perf_counter()
        self.config = config
        self.spec = spec
        self.base_model = base_model
        self.listener = listener
        self.output_dir = Path(config.run.output_dir)
        self.loop: TrainingLoop | None = None
        self._open = ExitStack()
        self._rejected = list(config.job_errors)
        self._resuming = claim_output_dir(self.output_dir, config)
        self._prepared = self._prepare_jobs(tokenizer_dir)

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes files and lets go of the output folder; a second call does nothing."""
        self._open.close()

    def check_agreement(self) -> None:
        """Refuses processes that have read different files; collective over the world."""
        check_agreement(self.config, self._prepared)

    def start(
        self,
        groups: ParallelGroups,
        linears: Sequence[tuple[Site, nn.Module]],
        engine: Engine,
        *,
        round_shape: RoundShape = RoundShape(),  # noqa: B008 - frozen
        placement: StatePlacement = StatePlacement(),  # noqa: B008 - frozen
    ) -> TrainingLoop:
        """Gives the linears their adapters and returns the loop over the jobs, not yet started.

        Args:
            linears: of this rank's part of the frozen backbone.
            engine: runs the backbone.
            round_shape: what the driver fixes; `portion_tokens` is the configuration's.
            placement: of the adapters' master weights and moments.
        """
        self._leave_out_jobs_without_sites(groups.layout, linears)
        groups, linears = settle_lora_sharding(
            self.config, self.spec, groups, linears, self._prepared
        )
        loras = [job.spec.lora for job in self._prepared]
        dtype = DTYPES[self.config.base_model.dtype]
        sites = [site for site, _ in linears]
        bank = AdapterBank(sites, loras, dtype=dtype, device=groups.device, placement=placement)
        attach(linears, bank)
        super_model = SuperModel(
            engine,
            bank,
            groups,
            [_start_job(job, self.spec, bank) for job in self._prepared],
            micro_batch_tokens=self.config.run.micro_batch_tokens,
            round_shape=replace(round_shape, portion_tokens=self.config.run.portion_tokens),
        )
        if groups.is_writer:
            self._open.enter_context(hold_output_dir(self.output_dir))
            document = json.dumps(config_to_dict(self.config), indent=2)
            write_atomic(self.output_dir / CONFIG_NAME, document)
        _allow_open_files(len(self._prepared))
        self.loop = self._make_loop(super_model)
        self._open.callback(self.loop.close)
        return self.loop

    def finish(self) -> dict[str, Any]:
        """Writes summary and report behind the loop.

        Returns:
            What `OUT/summary.json` holds; empty on every process but the writer.
        """
        assert self.loop is not None, "start comes before finish"
        engine, groups = self.loop.super_model.engine, self.loop.super_model.groups
        nano_batches = summarize_nano_batches(self.loop, self.config.run.nano_batches)
        if isinstance(engine, NanoEngine):
            # Not in `close`: after a failure the others may never come.
            engine.nano_batches.close()
        if not groups.is_writer:
            return {}
        wall_time_s = time.perf_counter() - self._begin_s
        summary = summarize(self.loop, groups.layout, self._rejected, wall_time_s, nano_batches)
        write_summary(self.output_dir, summary)
        _try_report(self.output_dir)
        return summary

    def _make_loop(self, super_model: SuperModel) -> TrainingLoop:
        run = self.config.run
        return TrainingLoop(
            super_model,
            self.spec,
            self.listener,
            output_dir=self.output_dir,
            base_model=self.base_model,
            checkpoint_every_steps=run.checkpoint_every_steps,
            max_nonfinite_steps=run.max_nonfinite_steps,
            tensorboard=run.tensorboard,
            wandb_project=run.wandb_project,
            nano_rounds=self._nano_rounds(super_model),
        )

    def _nano_rounds(self, super_model: SuperModel) -> NanoRounds | None:
        """Sets how micro-batches are cut; what chooses the number, if it is to be chosen."""
        run, engine, groups = self.config.run, super_model.engine, super_model.groups
        if groups.layout.tp_size == 1 or not isinstance(engine, NanoEngine):
            return None
        assert isinstance(self.spec, ModelSpec), "Megatron's models have a whole shape"
        super_model.cut_documents = RankAwareCut(self.spec, super_model)
        engine.nano_batches.kind = run.tensor_collectives
        engine.nano_batches.max_bytes = self._nano_batch_bytes(self.spec)
        # Two make the engine ready for any number, or say why there can be none.
        engine.set_nano_batches(2 if run.nano_batches == "auto" else run.nano_batches)
        if run.nano_batches != "auto" or engine.num_nano_batches == 1:
            return None
        return NanoRounds(
            run.nano_controller,
            engine.set_nano_batches,
            jobs=super_model.jobs,
            device=groups.device,
            output_dir=self.output_dir,
            is_writer=groups.is_writer,
            resuming=self._resuming,
            room=engine.nano_batches.room,
        )

    def _nano_batch_bytes(self, spec: ModelSpec) -> int:
        """Of half a micro-batch's rows, and a quarter more: cuts fall between documents."""
        row_bytes = spec.hidden_size * DTYPES[self.config.base_model.dtype].itemsize
        return min(self.config.run.micro_batch_tokens * row_bytes * 5 // 8, DEFAULT_MAX_BYTES)

    def _prepare_jobs(self, tokenizer_dir: Path) -> list[PreparedJob]:
        """Reads every job's input; those that cannot start are left out or stop the run."""
        tokenizer = load_tokenizer(tokenizer_dir)
        run = self.config.run
        # How other models' linears are cut shows when they are built: checked then.
        tp_size = self.config.parallel.tp_size if isinstance(self.spec, ModelSpec) else 1
        prepared = []
        for job in self.config.jobs:
            saved = self.output_dir / "jobs" / job.name / "checkpoints"
            try:
                check_block_sizes(job.name, job.lora, self.spec, tp_size)
                prepared.append(
                    prepare_job(
                        replace(job, seed=job.seed + run.seed),
                        self.spec,
                        tokenizer,
                        base_model=self.base_model,
                        micro_batch_tokens=run.micro_batch_tokens,
                        saved=saved if self._resuming else None,
                    )
                )
            except ValueError as error:
                self._leave_out(job.name, error)
        self._check_any(prepared)
        return prepared

    def _leave_out_jobs_without_sites(
        self, layout: ParallelLayout, linears: Sequence[tuple[Site, nn.Module]]
    ) -> None:
        """As `_prepare_jobs`, over what the built model lacks or its layout cannot cut."""
        able = []
        for job in self._prepared:
            try:
                check_targets(self.spec, layout, job.spec.name, job.spec.lora.target_modules)
                check_block_sizes(job.spec.name, job.spec.lora, self.spec, layout.tp_size)
                check_blocks_fit(job.spec.name, job.spec.lora, linears)
                able.append(job)
            except ValueError as error:
                self._leave_out(job.spec.name, error)
        self._check_any(able)
        self._prepared = able

    def _leave_out(self, name: str, error: ValueError) -> None:
        if self.config.run.on_job_error == "stop":
            raise error
        logger.warning("job %s is left out: %s", name, error)
        self._rejected.append(JobError(name=name, message=str(error)))

    def _check_any(self, prepared: Sequence[PreparedJob]) -> None:
        if not prepared:
            reasons = "; ".join(error.message for error in self._rejected)
            raise ValueError(f"jobs must hold at least one that can start, got {reasons}")


def _start_job(prepared: PreparedJob, spec: Backbone, bank: AdapterBank) -> JobState:
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
        slab.load(lambda name: initial_factor(spec, name, job.lora, job.seed))
    return state


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
