"""One run of jobs inside Megatron-LM's trainer: an iteration of the trainer is a round of ours."""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import nn

from tlora_megatron import timeline
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.integrations.megatron import engine as recompute
from tlora_megatron.integrations.megatron.built.model import (
    discover,
    freeze,
    install_packed_attention,
    language_models,
    record_stages,
    require_whole_weights,
)
from tlora_megatron.integrations.megatron.built.own_compute import use_own_compute
from tlora_megatron.integrations.megatron.layer.modules import built_class
from tlora_megatron.integrations.megatron.process_groups import current_groups
from tlora_megatron.integrations.megatron_lm.arguments import LaunchSettings
from tlora_megatron.integrations.megatron_lm.engine import (
    IntervalLosses,
    JobOptimizer,
    MegatronLmEngine,
    MicroBatchFeed,
)
from tlora_megatron.integrations.megatron_lm.experts import set_rotary_frequencies
from tlora_megatron.integrations.megatron_lm.same_model import (
    check_transformer_config,
    checkpoint_of_convert,
    precision_of,
    without_quantization,
)
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.formats.fingerprint import read_fingerprint
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.nano.rounds import NanoSettings
from tlora_megatron.training.packing.isolation import check_isolation
from tlora_megatron.training.packing.packing import RoundShape
from tlora_megatron.training.run.determinism import set_environment
from tlora_megatron.training.run.fingerprint import check_base
from tlora_megatron.training.run.training_run import DTYPES, ShardingResolver, TrainingRun
from tlora_megatron.training.signals import StopSignals
from tlora_megatron.training.super_model import StepReport

logger = logging.getLogger(__name__)

ITERATION_FILE = "iteration.json"
"""In the output folder: where the trainer's own count goes on when the run is resumed."""


class Session:
    """The run from the trainer's set-up to its end. Every process makes every call.

    Args:
        args: Megatron's, validated; `train_iters` is set when all jobs have ended.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        settings: LaunchSettings,
        resolve_sharding: ShardingResolver,
        signals: StopSignals,
    ) -> None:
        self.args = args
        self._settings = settings
        self.feed = MicroBatchFeed()
        """Gives the trainer the micro-batches of a round."""
        self._reports: list[StepReport] = []
        """Jobs that stepped in the round that the trainer ran last."""
        self._interval = IntervalLosses()
        self._watched = ExitStack()
        """Watches for hangs from the start to the end, between the iterations too."""
        recompute.install()
        set_environment(settings.config.run.deterministic)
        self._run = TrainingRun(
            settings.config,
            settings.spec,
            resolve_sharding=resolve_sharding,
            signals=signals,
        )
        self._run.check_agreement()
        # Before Megatron loads: it renames the folders that it was given.
        self._checkpoint = checkpoint_of_convert(args)
        self._fingerprint = None
        if self._checkpoint is not None and not settings.config.base_model.random_init:
            self._fingerprint = read_fingerprint(self._checkpoint)

    @property
    def loop(self) -> Loop:
        """The loop over the jobs, once the model stands."""
        assert self._run.loop is not None, "start comes first"
        return self._run.loop

    @property
    def output_dir(self) -> Path:
        return self._run.output_dir

    def take_model(self, chunks: Sequence[nn.Module]) -> None:
        """Freezes the built base and replaces its attention, before the trainer wraps it in DDP.

        DDP keeps a table of the modules that it finds.
        """
        settings = self._settings
        for model in language_models(chunks):
            if settings.config_json is not None:
                check_transformer_config(model.config, settings.spec, settings.config_json)
            set_rotary_frequencies(model, settings.spec)
        freeze(chunks)
        require_whole_weights(chunks)
        install_packed_attention(chunks)

    def optimizer(self, config: Any) -> JobOptimizer:
        """The stand-in for the trainer's optimizer."""
        return JobOptimizer(config, self._end_round, torch.device(torch.cuda.current_device()))

    def start(self, chunks: Sequence[nn.Module]) -> None:
        """Gives the built and loaded model its adapters, and evaluates new jobs."""
        settings, spec = self._settings, self._settings.spec
        groups = current_groups(settings.layout, with_experts=settings.adapts_experts)
        linears = discover(chunks, spec, groups)
        groups = record_stages(groups, linears)
        config = settings.config
        self._compute = use_own_compute(chunks, linears, groups, spec.vocab_size)
        self.engine = MegatronLmEngine(
            chunks,
            groups,
            vocab_size=spec.vocab_size,
            seq_length=self.args.seq_length,
            nano=NanoSettings.of_run(config.run, spec, DTYPES[config.base_model.dtype]),
            compute=self._compute,
        )
        with timeline.phase("base"):
            check_engine_isolation(self.engine)
        self._check_base(chunks, groups)
        if groups.is_writer and config.run.round_depth != 1:
            logger.warning(
                "run.round_depth has no effect here: the trainer fixes the number of micro-batches "
                "(--global-batch-size) and their rows (--seq-length), so no rank could run fewer"
            )
        shape = RoundShape(num_micro_batches=get_num_microbatches, fills_budget=True)
        self._run.start(groups, linears, self.engine, round_shape=shape)
        self._resume_iteration()
        self._watched.enter_context(self.loop.watch.watching())
        self.loop.start()
        if self.loop.is_over:
            self.args.train_iters = self.args.iteration

    def _check_base(self, chunks: Sequence[nn.Module], groups: ParallelGroups) -> None:
        """Refuses a model that is not the one of the checkpoint's fingerprint, if it has one."""
        if self._fingerprint is None:
            return
        with timeline.phase("base"), without_quantization(chunks):
            check_base(
                self.engine,
                groups,
                self._fingerprint,
                where=str(self._checkpoint),
                precision=precision_of(self.args),
                micro_batch_tokens=self.args.seq_length,
                fills_budget=True,
            )

    def train_step(self, run_step: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Runs one iteration of the trainer as a round of the jobs.

        Args:
            run_step: the trainer's `train_step` with the engine's `forward_step` in it, whose
                optimizer ends the round.
        """
        answer: tuple[Any, ...] = ()

        def run_round() -> list[StepReport]:
            nonlocal answer
            self._reports = []
            self._compute.parts.begin()
            self.feed.fill(self.loop.super_model.begin_round())
            self._compute.parts.end()
            answer = run_step()
            return self._reports

        reports = self.loop.step(run_round)
        if self.loop.has_ended:
            self.args.train_iters = self.args.curr_iteration + 1
        losses = self._interval.add(reports)
        device = self.loop.super_model.groups.device
        _, *rest = answer
        values = torch.tensor([*losses.values()], device=device)  # one copy for all
        return dict(zip(losses, values, strict=True)), *rest

    def before_log(self, logged: Mapping[str, Any]) -> None:
        """Corrects the sums that the trainer's log line averages; see `IntervalLosses`."""
        if logged["iteration"] % self.args.log_interval == 0:
            self._interval.correct(logged["loss_dict"], logged["total_loss_dict"])

    def save(self, iteration: int) -> None:
        """Checkpoints every job that still trains, but never the base.

        The trainer's count follows behind them, or it would be ahead of the jobs after a kill.
        """
        self.loop.save_active()
        state = {"iteration": iteration, "samples": self.args.consumed_train_samples}
        self.loop.saver.submit(partial(self._write_iteration, json.dumps(state)))

    def _write_iteration(self, state: str) -> None:
        try:
            write_atomic(self.loop.output_dir / ITERATION_FILE, state, mode=BY_UMASK)
        except OSError as error:
            logger.warning("%s could not be written: %s", ITERATION_FILE, error)

    def finish(self) -> dict[str, Any]:
        """Writes summary and report; returns the summary, empty but on the writer. Collective."""
        if self._run.loop is None:
            return {}
        left = [job.name for job in self.loop.super_model.jobs if job.is_active]
        self._watched.close()
        self._run.facts["compute"] = self._compute.summary()
        summary = self._run.finish()
        self._compute.parts.close()
        # All leave together: Megatron's scripts exit with the process group still standing.
        dist.barrier()
        if summary and left and not self.loop.stopped_by:
            logger.warning(
                "%d jobs have steps left (%s); run again, with a larger --train-iters if that is "
                "what ended it, and they go on from their checkpoints",
                len(left), ", ".join(left),
            )  # fmt: skip
        return summary

    def close(self) -> None:
        """Closes files and releases the output folder."""
        self._run.close()

    def _end_round(self) -> tuple[float, float]:
        """Steps the jobs; returns the largest gradient norm and learning rate for the log."""
        losses = self.engine.take_losses()
        self._reports = self.loop.super_model.end_round(losses)
        norms = [report.outcome.grad_norm for report in self._reports]
        rates = [report.lr for report in self._reports]
        return max((n for n in norms if math.isfinite(n)), default=0.0), max(rates, default=0.0)

    def _resume_iteration(self) -> None:
        """Sets the trainer's count to the one saved with the run that is resumed."""
        file = self.loop.output_dir / ITERATION_FILE
        if not any(job.step for job in self.loop.jobs) or not file.is_file():
            return
        state = json.loads(file.read_text())
        self.args.iteration = state["iteration"]
        self.args.consumed_train_samples = state["samples"]


def check_engine_isolation(engine: MegatronLmEngine) -> None:
    """Refuses a model of the script that does not keep packed documents apart.

    Collective over the world; call it before adapters are attached. Micro-batches have the
    trainer's own size, for which a model may have been built. FP8 of activations is off, whose
    scales may look at whole micro-batches; `OwnCompute` tells of that.
    """
    models = language_models(engine.chunks)
    config = models[0].config
    with without_quantization(engine.chunks):
        check_isolation(
            engine.forward_backward,
            [model.embedding for model in models if hasattr(model, "embedding")],
            engine.groups,
            name=built_class(models[0]).__name__,
            dtype=config.params_dtype,
            has_experts=config.num_moe_experts is not None,
            vocab_size=engine.vocab_size,
            num_rows=engine.seq_length,
        )
