"""Reads jobs: single ones for a service, and those of a run in one process of each node.

Of a run's jobs those that can start are admitted: their data, and the folders of their results.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from torch import nn

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.schema import BaseModelSpec, JobError, RunConfig
from tlora_megatron.layers.multi_adapter import check_blocks_fit
from tlora_megatron.layers.sites import Site, check_targets
from tlora_megatron.model.backbone import Backbone, check_block_sizes
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.data.job_data import CachedData, JobData, TokenCache, TokenizerFolder
from tlora_megatron.training.data.mapped_tokens import MappedSequences, lengths_of
from tlora_megatron.training.data.tokenize import TokenSequence, load_tokenizer
from tlora_megatron.training.driven_jobs import NO_DATA
from tlora_megatron.training.formats.peft import check_adapter_directory
from tlora_megatron.training.formats.quantised import QuantisationCard, quantisation_card
from tlora_megatron.training.metrics import METRICS_FILE
from tlora_megatron.training.run.preparation import PreparedJob, prepare_job

logger = logging.getLogger(__name__)

_SMALL_DATA_S = 0.3
"""So long a run of one process waits at once: a mistake in small data shows before the imports."""
_BUDGETS = ("run.micro_batch_tokens", "micro_batch_tokens of some replica")
"""The longest sequence that alike replicas, or unlike ones, can train."""
_Outcomes = list[PreparedJob | ValueError]


class ReadJob(NamedTuple):
    """A job that can start, and where its tokens are kept."""

    prepared: PreparedJob
    keys: dict[str, str]
    """Keys of the cache's entries: `train`, and `eval` if the job has one."""


class JobReader:
    """Reads jobs over one base, their tokens through a cache.

    Args:
        budget: what the user calls that, for the sentence.
        tp_size: tensor-parallel ranks that must be able to divide a block-diagonal adapter.
    """

    def __init__(
        self,
        base: BaseModelSpec,
        cache: TokenCache,
        *,
        micro_batch_tokens: int,
        budget: str = "run.micro_batch_tokens",
        tp_size: int = 1,
    ) -> None:
        self.base = base
        self.source = TokenizerFolder(base.folder)
        self._cache = cache
        self._micro_batch_tokens, self._budget = micro_batch_tokens, budget
        self._tp_size = tp_size
        self.spec = read_model_spec(base.config_file)
        found = base_quantisation(base, self.spec)
        self._quantisation = quantisation_card(base, self.spec, found)

    def read(
        self,
        job: JobSpec,
        *,
        keys: Mapping[str, str] | None = None,
        saved: Path | None = None,
        values: bool = True,
    ) -> ReadJob:
        """Reads everything that a job starts from and checks that it fits.

        Args:
            keys: of its tokens in the cache, where they are known.
            saved: the job's own checkpoints; None = it has none.
        """
        check_block_sizes(job.name, job.lora, self.spec, self._tp_size)
        cached = CachedData(NO_DATA, {})
        if not job.driven:
            cached = self._cache.load(job, self.source, self.spec.vocab_size, keys)
        prepared = prepare_job(
            job,
            self.spec,
            None,
            base=self.base,
            quantisation=self._quantisation,
            micro_batch_tokens=self._micro_batch_tokens,
            budget=self._budget,
            saved=saved,
            data=cached.data,
            values=values,
        )
        return ReadJob(prepared, cached.keys)


Readings = Sequence[JobData | ValueError] | ValueError
"""Data of one job after the other, up to the first that stops the run; or why there is none."""


_T = TypeVar("_T")


class Background(Generic[_T]):
    """The result of work on a thread that does not keep the process from ending."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._future: Future[_T] = Future()
        threading.Thread(target=self._run, args=(work,), name="data", daemon=True).start()

    def result(self, timeout_s: float | None = None) -> _T:
        """Waits for the result, or the error that the work has raised.

        Raises:
            TimeoutError: if it takes longer than `timeout_s`.
        """
        return self._future.result(timeout_s)

    def _run(self, work: Callable[[], _T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:
            self._future.set_exception(error)


def share(mine: Readings | None) -> Readings | None:
    """Gives the first process's readings to those that have none; collective over the world.

    Returns:
        None where nothing was missing.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert mine is not None, "a process without a group reads its data itself"
        return None
    missing: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(missing, mine is None)
    if not any(missing):
        return None
    message: list[Any] = [None]
    if dist.get_rank() == 0 and mine is not None:
        message = [mine]
        if not isinstance(mine, ValueError):
            joined = {id(one): _joined(one) for one in mine}  # what jobs share is sent once
            message = [[joined[id(one)] for one in mine]]
    dist.broadcast_object_list(message, src=0)
    return message[0] if mine is None else None


def _joined(reading: JobData | ValueError) -> JobData | ValueError:
    """Puts a job's sequences end to end: a million of small arrays would take long to send."""
    if isinstance(reading, ValueError):
        return reading
    return replace(reading, train=_join(reading.train), eval=_join(reading.eval))


def _join(sequences: Sequence[TokenSequence]) -> MappedSequences:
    tokens = [np.empty(0, np.int32), *(sequence.tokens for sequence in sequences)]
    targets = [np.empty(0, bool), *(sequence.is_target for sequence in sequences)]
    ends = np.cumsum(lengths_of(sequences))
    return MappedSequences(np.concatenate(tokens), np.concatenate(targets), ends)


def check_job_folders(output_dir: Path, name: str) -> None:
    """Refuses a job whose checkpoints, adapter or metrics could not be written."""
    job = output_dir / "jobs" / name
    folders = (output_dir / "jobs", job, job / "checkpoints", job / "adapter")
    for folder in (*folders, job / "tensorboard"):
        if folder in folders and folder.is_symlink():
            # It could lead out of the output folder, where nothing may be replaced or removed.
            raise ValueError(
                f"job {name!r}: {folder} must be a folder of its own, got a symbolic link to "
                f"{folder.readlink()}; remove the link, or let run.output_dir lead there"
            )
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"job {name!r}: {folder} must be a folder, got a file; move it away")
    if (job / METRICS_FILE).is_dir():
        raise ValueError(f"job {name!r}: {job / METRICS_FILE} must be a file, got a folder")
    try:
        check_adapter_directory(job / "adapter")
    except ValueError as error:
        raise ValueError(f"job {name!r}: {error}; move it away") from error
    for folder in filter(Path.is_dir, folders):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"job {name!r}: {folder} must be writable, got: {error}") from error


class JobAdmission:
    """The jobs of a run that can start, and those that cannot, known once `settle` has been called.

    The first process of a node reads the data, on a thread that begins with this object.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: Backbone,
        *,
        quantisation: QuantisationCard | None = None,
        resuming: bool,
    ) -> None:
        self.rejected: list[JobError] = list(config.job_errors)
        self.prepared: list[PreparedJob] = []
        self._config = config
        self._spec = spec
        self._prepare = partial(
            prepare_for, config, spec, quantisation=quantisation, resuming=resuming
        )
        self._stops = config.run.on_job_error == "stop"
        # The first process of each node, or one that cannot tell.
        is_reader = os.environ.get("LOCAL_RANK", "0") == "0"
        self._reading = self._start_reading() if is_reader else None
        if self._reading is not None and os.environ.get("WORLD_SIZE", "1") == "1":
            with suppress(TimeoutError):
                self._take(self._reading.result(_SMALL_DATA_S))

    def settle(self) -> None:
        """Waits for the data and sorts the jobs; collective over the world, once there is a group.

        Raises:
            ValueError: with `run.on_job_error: stop`, for the first job that cannot start; else if
                none can; and if the tokenizer cannot be read.
        """
        if self.prepared:
            return
        own = None if self._reading is None else self._reading.result()
        read: Readings | None
        if own is None or isinstance(own, ValueError):
            read = own
        else:
            read = [x.data if isinstance(x, PreparedJob) else ValueError(str(x)) for x in own]
        shared = share(read)
        if own is None:
            assert shared is not None, "the first process reads"
            own = shared if isinstance(shared, ValueError) else self._prepare_all(shared)
        self._take(own)

    def _start_reading(self) -> Background[_Outcomes | ValueError]:
        try:
            # Here: threads that import at once can meet half a module.
            tokenizer = load_tokenizer(self._config.base_model.folder)
        except ValueError as error:
            failed = ValueError(str(error))
            return Background(lambda: failed)
        return Background(lambda: self._prepare_all(tokenizer=tokenizer))

    def _prepare_all(
        self, readings: Sequence[JobData | ValueError] = (), *, tokenizer: Any = None
    ) -> _Outcomes:
        """Prepares one job after the other, up to the first error that stops the run.

        Args:
            readings: what another process has read, job by job.
        """
        outcomes: _Outcomes = []
        shared: JobData | None = None
        for job, read in zip_longest(self._config.jobs, readings):
            try:
                if isinstance(read, ValueError):
                    raise read
                data = read or shared
                prepared = self._prepare(job, tokenizer, data=data, values=read is None)
                if self._config.sweep is not None:
                    shared = prepared.data  # trials have the same data, and one copy is enough
                outcomes.append(prepared)
            except ValueError as error:
                outcomes.append(error)
                if self._stops:
                    break
        return outcomes

    def _take(self, outcomes: _Outcomes | ValueError) -> None:
        if isinstance(outcomes, ValueError):
            raise outcomes
        for job, outcome in zip(self._config.jobs, outcomes, strict=False):
            if isinstance(outcome, ValueError):
                self._reject(job.name, outcome)
            else:
                self.prepared.append(outcome)
        self._require_any()

    def check_sites(
        self, layout: ParallelLayout, linears: Sequence[tuple[Site, nn.Module]]
    ) -> None:
        """Rejects jobs whose targets the built model lacks or its layout cannot divide."""
        able = []
        for job in self.prepared:
            try:
                check_fits_linears(job.spec, self._spec, layout, linears)
                able.append(job)
            except ValueError as error:
                self._reject(job.spec.name, error)
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


def prepare_for(
    config: RunConfig,
    spec: Backbone,
    job: JobSpec,
    tokenizer: Any,
    *,
    quantisation: QuantisationCard | None,
    resuming: bool,
    data: JobData | None = None,
    values: bool | None = None,
) -> PreparedJob:
    """Reads all that a job of a configuration starts from, and checks that it fits.

    Args:
        resuming: go on from the job's newest checkpoint in the output folder, if there is one.
        data, values: as in `prepare_job`.
    """
    # How other models' linears are divided shows when they are built: checked then.
    tp_size = config.parallel.most_tp if isinstance(spec, ModelSpec) else 1
    check_block_sizes(job.name, job.lora, spec, tp_size)
    saved = Path(config.run.output_dir) / "jobs" / job.name / "checkpoints"
    prepared = prepare_job(
        replace(job, seed=job.seed + config.run.seed),
        spec,
        tokenizer,
        base=config.base_model,
        quantisation=quantisation,
        micro_batch_tokens=config.longest_sequence,
        budget=_BUDGETS[config.parallel.is_unlike],
        saved=saved if resuming else None,
        data=data,
        values=values,
    )
    if prepared.checkpoint is None or prepared.checkpoint.step < prepared.plan.num_steps:
        check_job_folders(Path(config.run.output_dir), job.name)
    return prepared


def check_fits_linears(
    job: JobSpec, spec: Backbone, layout: ParallelLayout, linears: Sequence[tuple[Site, nn.Module]]
) -> None:
    """Refuses a job whose targets the built model lacks or its layout cannot divide."""
    check_targets(spec, layout, job.name, job.lora.target_modules)
    check_block_sizes(job.name, job.lora, spec, layout.tp_size)
    check_blocks_fit(job.name, job.lora, linears)
