"""One run's jobs from checked input to files, whoever builds and drives the backbone.

`tlora train` and DeepSpeed build a backbone and drive it; under Megatron-LM's trainer the user's
script does both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tlora_megatron import timeline
from tlora_megatron.config.load import config_to_dict
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.slab import StatePlacement
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.ops.exactness import exactness_of
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.evaluation import Scorer
from tlora_megatron.training.formats.quantised import QuantisationCard
from tlora_megatron.training.job_files import JobFiles
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.metrics import EventSink, write_summary
from tlora_megatron.training.nano.rounds import rank_aware_cut, start_nano_batches
from tlora_megatron.training.packing.packing import RoundShape
from tlora_megatron.training.round_timing import RateCorrection, RoundTiming, read_correction
from tlora_megatron.training.run.determinism import (
    check_deterministic,
    keep_fingerprints,
    run_fingerprint,
)
from tlora_megatron.training.run.output_dir import (
    CONFIG_NAME,
    claim_output_dir,
    hold_output_dir,
    make_output_dir,
)
from tlora_megatron.training.run.preparation import PreparedJob, start_job
from tlora_megatron.training.run.reading import JobAdmission
from tlora_megatron.training.run.report import Report
from tlora_megatron.training.run.summary import run_times, summarize, summarize_nano_batches
from tlora_megatron.training.run.sweep_results import sweep_results, write_table
from tlora_megatron.training.run_watch import RunWatch
from tlora_megatron.training.rungs import Rungs, known_rungs
from tlora_megatron.training.signals import StopSignals
from tlora_megatron.training.super_model import SuperModel

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The torch dtype of each `base_model.dtype`."""

Linears = Sequence[tuple[Site, nn.Module]]
"""The linears of this rank's part of a backbone."""
ShardingResolver = Callable[
    [RunConfig, Backbone, ParallelGroups, Linears, Sequence[PreparedJob]],
    tuple[ParallelGroups, Linears],
]
"""Chooses the LoRA sharding of a run before adapters are allocated."""
RecomputeChooser = Callable[
    [RunConfig, ParallelGroups, Sequence[PreparedJob]], RecomputeTable | None
]
"""Chooses the recompute of micro-batches by their rows; None = all have the one built in."""

TimingResolver = Callable[
    [RunConfig, Backbone, ParallelGroups, Sequence[PreparedJob], RecomputeTable | None],
    RoundTiming | None,
]
"""Predicts the speeds of a run's replicas under the recompute chosen, and says how deep its rounds
are."""


class TrainingRun:
    """One run of jobs over a backbone, from its configuration to its summary and report.

    Construct it (no process group is needed), call `check_agreement` once there is one and `start`
    when the backbone stands; drive the loop; then `finish`. Every process of the run makes every
    call. Use it as a context manager, or call `close`: that releases its files, however it ends.

    Args:
        events: takes what happens, on every rank that has one; mostly that is the first alone.
        resolve_timing: shares rounds out by predicted time; None = balances tokens.
        signals: stop the loop; given on every process or on none.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: Backbone,
        *,
        quantisation: QuantisationCard | None = None,
        events: EventSink | None = None,
        resolve_sharding: ShardingResolver,
        choose_recompute: RecomputeChooser = lambda *_: None,
        resolve_timing: TimingResolver | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        self.config = config
        self.spec = spec
        self.quantisation = quantisation
        self.events = events
        self.output_dir = Path(config.run.output_dir)
        self.loop: Loop | None = None
        self.facts: dict[str, Any] = {}
        """Facts that whoever drives the backbone adds to the summary's `run`."""
        self._resolve_sharding = resolve_sharding
        self._choose_recompute = choose_recompute
        self._resolve_timing = resolve_timing
        self._signals = signals
        self._open = ExitStack()
        self._resuming = claim_output_dir(self.output_dir, config)
        if self._resuming:
            self.facts["resumed"] = True
        self._rungs: Sequence[Mapping[str, Any]] = ()
        if self._resuming and config.sweep is not None:
            self._rungs = known_rungs(config.sweep, self.output_dir)
        with timeline.phase("data"):
            self._jobs = JobAdmission(
                config, spec, quantisation=quantisation, resuming=self._resuming
            )

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes files and releases the output folder; a second call does nothing."""
        self._open.close()

    def check_agreement(self) -> None:
        """Waits for the jobs' data; refuses processes that have read different files.

        Collective over the world.
        """
        with timeline.phase("data"):
            self._jobs.settle()
        check_agreement(self.config, self._jobs.prepared)

    def start(
        self,
        groups: ParallelGroups,
        linears: Linears,
        engine: Scorer,
        *,
        round_shape: RoundShape = RoundShape(),  # noqa: B008 - frozen
        placement: StatePlacement | None = None,
    ) -> Loop:
        """Gives the linears their adapters and returns the loop over the jobs, not yet started.

        Args:
            round_shape: the driver's demands; exactness comes from the configuration.
            placement: where the adapters' master weights and moments lie; None = as
                `parallel.shard_optimizer` says.
        """
        self._jobs.check_sites(groups.layout, linears)
        groups, linears = self._resolve_sharding(
            self.config, self.spec, groups, linears, self._jobs.prepared
        )
        recompute = self._choose_recompute(self.config, groups, self._jobs.prepared)
        if recompute is not None:
            self.facts["recompute"] = recompute.line
            round_shape = replace(round_shape, recompute=recompute)
        fingerprint = self._fingerprint(groups, linears, engine)
        if placement is None:
            shards = self.config.parallel.shard_optimizer
            placement = StatePlacement.over_replicas(groups, shards=shards)
        sites, loras = [site for site, _ in linears], [j.spec.lora for j in self._jobs.prepared]
        dtype = DTYPES[self.config.base_model.dtype]
        bank = AdapterBank(sites, loras, dtype=dtype, device=groups.device, placement=placement)
        attach(linears, bank)
        super_model = self._make_super_model(groups, bank, engine, round_shape)
        make_output_dir(self.output_dir)
        if groups.is_writer:
            self._open.enter_context(hold_output_dir(self.output_dir))
            document = json.dumps(config_to_dict(self.config), indent=2)
            write_atomic(self.output_dir / CONFIG_NAME, document, mode=BY_UMASK)
            keep_fingerprints(fingerprint, self.output_dir, self._jobs.prepared)
        allow_open_files(len(self._jobs.prepared))
        watch = RunWatch.open(self._signals, self.config.run.hang_timeout_s)
        self._open.callback(watch.close)
        files = JobFiles(
            self.config.run,
            base_model=self.config.base_model.name,
            quantisation=self.quantisation,
            has_metrics=groups.is_writer,
            waits_for_room=watch.waits_for_room,
        )
        switch, run = engine.nano_batches, self.config.run
        nano_rounds = start_nano_batches(
            run, switch, groups, super_model.jobs, resuming=self._resuming
        )
        sweep, rungs = self.config.sweep, None
        if sweep is not None:
            rungs = Rungs(sweep, self.output_dir, super_model.jobs, self._rungs)
        self.loop = Loop(
            super_model,
            self.spec,
            run,
            files,
            self.events,
            nano_rounds=nano_rounds,
            watch=watch,
            rungs=rungs,
        )
        self._open.callback(self.loop.saves.close)
        return self.loop

    def finish(self) -> dict[str, Any]:
        """Writes summary and report at the end of the loop.

        Returns:
            The content of `OUT/summary.json`; empty on every process but the writer.
        """
        assert self.loop is not None, "start comes before finish"
        summary = self._write_results(self.loop)
        if self.loop.stopped_by:
            # An agent takes the first exit code that is not 0 for a failure, and ends the others.
            self.loop.watch.wait_for_all()
        return summary

    def _write_results(self, loop: Loop) -> dict[str, Any]:
        super_model = loop.super_model
        report = Report(self.output_dir)
        if super_model.groups.is_writer:
            report.draw_beside()
        loop.saves.drain()  # a job whose adapter cannot be written has failed
        nano_batches = summarize_nano_batches(loop)
        if super_model.engine.nano_batches is not None:
            # Not in `close`: after a failure the others may never come.
            super_model.engine.nano_batches.close()
        if not super_model.groups.is_writer:
            return {}
        summary = summarize(loop, self._jobs.rejected, nano_batches)
        summary["run"] |= self.facts
        loop.files.settle()
        if loop.rungs is not None:
            rungs = loop.rungs.document()
            summary["sweep"] = sweep_results(loop.rungs.sweep, rungs["rungs"], summary["jobs"])
            loop.rungs.write(rungs | summary["sweep"])
            write_table(self.output_dir, summary["sweep"])
        self._write_summary(loop, summary)
        try:
            report.write()
        except (ImportError, OSError, ValueError) as error:  # training is done
            logger.warning("%s could not be written: %s", self.output_dir / "report.html", error)
        # The user has waited for the report, too.
        summary["run"] |= run_times()
        self._write_summary(loop, summary)
        return summary

    def _write_summary(self, loop: Loop, summary: dict[str, Any]) -> None:
        """Writes it once the disk has room; a run that a signal stops does without."""
        write = partial(write_summary, self.output_dir, summary)
        try:
            loop.files.with_room("the run's summary", write)
        except OSError as error:
            told = f"{self.output_dir}/summary.json could not be written: {error}"
            if not loop.stopped_by:
                raise OSError(told) from error
            logger.warning(told)

    def _fingerprint(
        self, groups: ParallelGroups, linears: Linears, engine: Scorer
    ) -> dict[str, Any] | None:
        """Returns what a deterministic run promises bits for; None if it promises nothing."""
        if not self.config.run.deterministic:
            return None
        dtype = DTYPES[self.config.base_model.dtype]
        check_deterministic(groups.device, dtype, linears)
        self.facts["deterministic"] = run_fingerprint(
            self.config, groups, dtype, engine, self.quantisation
        )
        return self.facts["deterministic"]

    def _make_super_model(
        self, groups: ParallelGroups, bank: AdapterBank, engine: Scorer, round_shape: RoundShape
    ) -> SuperModel:
        run, spec = self.config.run, self.spec
        prepared = self._jobs.prepared
        jobs = [start_job(job, spec, bank.new_slab(job.spec.lora)) for job in prepared]
        timing = None
        if self._resolve_timing is not None:
            table = round_shape.recompute
            timing = self._resolve_timing(self.config, spec, groups, prepared, table)
        correction = None
        if timing is not None and timing.cp_rates is None:  # teams' speeds are not corrected
            correction = self._make_correction(timing, groups)
        return SuperModel(
            engine,
            bank,
            groups,
            jobs,
            micro_batch_tokens=groups.budgets(run.micro_batch_tokens)[groups.dp_rank],
            round_shape=replace(round_shape, exactness=exactness_of(run.deterministic)),
            cut_for=partial(rank_aware_cut, spec),
            timing=timing,
            correction=correction,
        )

    def _make_correction(self, timing: RoundTiming, groups: ParallelGroups) -> RateCorrection:
        """Measures the replicas; goes on with what an earlier part of the run has found."""
        run = self.config.run
        frozen = run.deterministic or not run.correct_speeds
        correction = RateCorrection(
            timing.rates, own=groups.dp_rank, device=groups.device, frozen=frozen
        )
        if self._resuming:
            read_correction(correction, self.output_dir)
        return correction


def check_agreement(config: RunConfig, prepared: Sequence[PreparedJob]) -> None:
    """Refuses processes that read different files: they would wait for each other for ever.

    Collective over the world.
    """
    steps = [(job.spec.name, job.checkpoint.step if job.checkpoint else 0) for job in prepared]
    everyone = _gather(steps)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"every process must start the same jobs at the same steps, got {theirs} on rank "
                f"{rank} and {everyone[0]} on rank 0; run.output_dir and the data must lie where "
                f"all nodes see them"
            )
    everyone = _gather(content_digest(config, prepared))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"every process must read the same configuration and data, got others on rank "
                f"{rank} than on rank 0; they must lie where all nodes see them, or be copied anew"
            )


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def content_digest(config: RunConfig, prepared: Sequence[PreparedJob]) -> str:
    """Digest of everything that packing and updates follow from; paths may differ by node."""
    run = asdict(config.run) | {"output_dir": None}
    base = asdict(config.base_model) | {"path": None, "config": None}
    content = [run, base, [job.digest for job in prepared]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def allow_open_files(num_jobs: int) -> None:
    """Raises this process's limit of open files, often 1024: metrics keep two a job open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + 4 * num_jobs
    if soft != resource.RLIM_INFINITY:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
