"""Reads single jobs over one base model: for a service, whose jobs come one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.model.backbone import check_block_sizes
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.training.data.job_data import CachedData, TokenCache, TokenizerFolder
from tlora_megatron.training.driven_jobs import NO_DATA
from tlora_megatron.training.formats.quantised import (
    check_same_base,
    quantisation_card,
)
from tlora_megatron.training.preparation import PreparedJob, prepare_job
from tlora_megatron.training.run.summary import check_resumption


class ReadJob(NamedTuple):
    """A job that can start, and where its tokens are kept."""

    prepared: PreparedJob
    keys: dict[str, str]
    """Keys of the cache's entries: `train`, and `eval` if the job has one."""


class JobReader:
    """Reads jobs over one base, their tokens through a cache.

    Args:
        base: section `base_model` of the configuration.
        cache: of tokenized files.
        micro_batch_tokens: rows of the longest sequence that can be trained.
        budget: what the user calls that, for the sentence.
        tp_size: tensor-parallel ranks that must be able to divide a block-diagonal adapter.

    Raises:
        ValueError: if the base cannot be used.
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
            values: look at every value of a checkpoint.

        Raises:
            ValueError: naming the job.
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
