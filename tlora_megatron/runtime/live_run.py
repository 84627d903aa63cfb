"""Opens a run of `tlora train` for jobs that are added or cancelled while it trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron.config.jobs import read_job
from tlora_megatron.config.load import check_jobs_may_change, config_to_dict, fit_job
from tlora_megatron.config.parallel_rules import check_job_over_experts
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.data.job_data import TokenCache, TokenizerFolder
from tlora_megatron.training.live.changes import LiveChanges
from tlora_megatron.training.live.live_jobs import LiveJobs
from tlora_megatron.training.live.mailbox import TOKENS, RunMailbox
from tlora_megatron.training.loop import TrainingLoop
from tlora_megatron.training.preparation import PreparedJob
from tlora_megatron.training.resident.staging import Stager
from tlora_megatron.training.run.determinism import keep_fingerprints
from tlora_megatron.training.run.job_admission import check_fits_linears, prepare_for
from tlora_megatron.training.run.output_dir import CONFIG_NAME
from tlora_megatron.training.run.training_run import Linears, TrainingRun

logger = logging.getLogger(__name__)


@contextmanager
def open_for_requests(
    run: TrainingRun, linears: Linears, loop: TrainingLoop
) -> Iterator[Callable[[], None]]:
    """Yields what the loop calls behind its rounds; every rank of the run calls it.

    Args:
        linears: that have the run's adapters.
    """
    agreement = loop.watch.agreement
    if agreement is None:
        yield lambda: None
        return
    is_writer = loop.super_model.groups.is_writer
    mailbox, record, reader = None, None, _OrderReader(run, keeps=is_writer)
    if is_writer:
        mailbox = open_mailbox(run.output_dir)
        record = _Record(run, reader.prepared)
    stager = Stager(
        loop.super_model.bank,
        run.spec,
        reader,
        lambda job: _check(run, linears, loop, job),
        loop.files.open_metrics,
    )
    live = LiveJobs(loop, stager, agreement, mailbox, record)
    try:
        yield live.at_boundary
    finally:
        live.close()
        if mailbox is not None:
            mailbox.close()


def open_mailbox(output_dir: Path) -> RunMailbox | None:
    """Opens where requests to a run come in; None if its folder allows none."""
    try:
        return RunMailbox(output_dir)
    except OSError as error:
        logger.warning("no job can be added to this run or cancelled in it: %s", error)
        return None


class _OrderReader:
    """Reads what a job starts from, its tokens as those who asked have kept them.

    Args:
        keeps: jobs are kept in `prepared` until somebody takes them out.
    """

    def __init__(self, run: TrainingRun, *, keeps: bool) -> None:
        self._run = run
        self._keeps = keeps
        self._cache = TokenCache(run.output_dir / TOKENS)
        self.prepared: dict[str, PreparedJob] = {}
        """The jobs that were read, by name, without their weights."""

    def __call__(self, order: Mapping[str, Any]) -> PreparedJob:
        run, config = self._run, self._run.config
        check_jobs_may_change(config.parallel, config.run)
        job = fit_job(read_job(order["document"], None), config)
        if isinstance(run.spec, ModelSpec) and run.spec.experts is not None:
            check_job_over_experts(job, config)
        source = TokenizerFolder(run.tokenizer_dir)
        data = self._cache.load(job, source, run.spec.vocab_size, order.get("tokens")).data
        prepared = prepare_for(
            config,
            run.spec,
            job,
            None,
            base_model=run.base_model,
            quantisation=run.quantisation,
            resuming=True,
            data=data,
        )
        if self._keeps:
            self.prepared[job.name] = replace(prepared, imported=None)
        return prepared


def _check(run: TrainingRun, linears: Linears, loop: TrainingLoop, prepared: PreparedJob) -> None:
    """Refuses a job that the run has no place for."""
    job, super_model = prepared.spec, loop.super_model
    super_model.bank.shape.check_holds(job.name, job.lora)
    check_fits_linears(job, run.spec, super_model.groups.layout, linears)


class _Record:
    """Keeps changes where the next start of the run finds them; the disk may refuse.

    Args:
        prepared: the jobs that were read, by name; those that join are taken out.
    """

    def __init__(self, run: TrainingRun, prepared: dict[str, PreparedJob]) -> None:
        self._run, self._prepared = run, prepared
        self._config: RunConfig = run.config
        self._changes = LiveChanges.read(run.output_dir)

    def joined(self, document: Mapping[str, Any]) -> None:
        """Notes a job that joins now."""
        job = read_job(dict(document), None)
        others = tuple(other for other in self._config.jobs if other.name != job.name)
        self._config = replace(self._config, jobs=(*others, job))
        self._changes.add(job)
        self._write(job.name, [self._prepared.pop(job.name)])

    def cancelled(self, name: str) -> None:
        """Notes a job that has left for good."""
        self._changes.cancel(name)
        self._write(name, ())

    def _write(self, name: str, begun: Sequence[PreparedJob]) -> None:
        output_dir = self._run.output_dir
        try:
            self._changes.write(output_dir)
            text = json.dumps(config_to_dict(self._config), indent=2)
            write_atomic(output_dir / CONFIG_NAME, text, mode=BY_UMASK)
            if begun:
                keep_fingerprints(self._run.facts.get("deterministic"), output_dir, begun)
        except OSError as error:
            logger.warning("job %s: a later start of the run will not know: %s", name, error)
