"""Reads jobs: single ones for a service, and those of a run in one process of each node."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.schema import BaseModelSpec, RunConfig
from tlora_megatron.model.backbone import check_block_sizes
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.training.data.job_data import CachedData, JobData, TokenCache, TokenizerFolder
from tlora_megatron.training.data.mapped_tokens import MappedSequences, lengths_of
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.driven_jobs import NO_DATA
from tlora_megatron.training.formats.quantised import check_same_base, quantisation_card
from tlora_megatron.training.run.preparation import PreparedJob, prepare_job
from tlora_megatron.training.run.summary import check_resumption


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
            base_model=self.base.path or str(self.base.folder),
            quantisation=self._quantisation,
            micro_batch_tokens=self._micro_batch_tokens,
            budget=self._budget,
            saved=saved,
            data=cached.data,
            values=values,
        )
        check_resumption(prepared)
        if prepared.checkpoint is not None:
            where, state = prepared.checkpoint.path, prepared.checkpoint.state
            may_change = self.base.allow_change
            check_same_base(job.name, where, state, self._quantisation, allow_change=may_change)
        return ReadJob(prepared, cached.keys)


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


class Failed(NamedTuple):
    """The reason for which a job, or the whole run, cannot be read."""

    message: str


Readings = Sequence[JobData | Failed] | Failed
"""Data of one job after the other, up to the first that stops the run; or why there is none."""


def reads_here() -> bool:
    """True on the first process of each node, and where processes cannot tell."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


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
        message = [mine if isinstance(mine, Failed) else [_joined(one) for one in mine]]
    dist.broadcast_object_list(message, src=0)
    return message[0] if mine is None else None


def _joined(reading: JobData | Failed) -> JobData | Failed:
    """Puts a job's sequences end to end: a million of small arrays would take long to send."""
    if isinstance(reading, Failed):
        return reading
    return replace(reading, train=_join(reading.train), eval=_join(reading.eval))


def _join(sequences: Sequence[TokenSequence]) -> MappedSequences:
    tokens = [np.empty(0, np.int32), *(sequence.tokens for sequence in sequences)]
    targets = [np.empty(0, bool), *(sequence.is_target for sequence in sequences)]
    ends = np.cumsum(lengths_of(sequences))
    return MappedSequences(np.concatenate(tokens), np.concatenate(targets), ends)
