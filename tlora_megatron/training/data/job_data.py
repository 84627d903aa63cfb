"""The data of one job: its JSONL files as token sequences, and which of them each step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tlora_megatron.config.job import JobSpec
from tlora_megatron.training.data.jsonl_file import LoadedFile, files_of
from tlora_megatron.training.data.tokenize import TokenSequence, fingerprint, load_tokenizer

__all__ = ["BatchPlan", "JobData", "TokenSequence", "load_job_data", "load_tokenizer"]


@dataclass(frozen=True, kw_only=True)
class JobData:
    """A job's sequences, none longer than its max_seq_len and none without a target."""

    train: Sequence[TokenSequence]
    eval: Sequence[TokenSequence]
    """Empty if the job has no evaluation file."""
    num_truncated: int
    """Sequences of both files that were cut to max_seq_len and kept."""
    num_dropped: int
    """Sequences of both files left out because the cut left no target."""
    known_fingerprint: str | None = None
    """Digest of the training sequences, where it was kept with them."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the training sequences; kept, since it reads all of them."""
        return self.known_fingerprint or fingerprint(self.train)

    @classmethod
    def of_files(
        cls, train: LoadedFile, evaluation: LoadedFile | None, fingerprint: str | None = None
    ) -> JobData:
        """Joins what was read from a job's files.

        Args:
            fingerprint: of the training sequences, where it is known.
        """
        files = [train] if evaluation is None else [train, evaluation]
        return cls(
            train=train.sequences,
            eval=() if evaluation is None else evaluation.sequences,
            num_truncated=sum(file.num_truncated for file in files),
            num_dropped=sum(file.num_dropped for file in files),
            known_fingerprint=fingerprint,
        )


def load_job_data(job: JobSpec, tokenizer: Any, vocab_size: int) -> JobData:
    """Reads, checks and tokenizes a job's training and evaluation files.

    Args:
        tokenizer: the base model's Hugging Face tokenizer.
        vocab_size: rows of the base model's embedding; every token id is below it.

    Raises:
        ValueError: naming job, file and line, if a file or a line of it cannot be used, or the
            tokenizer has no EOS.
    """
    train, evaluation = files_of(job)
    return JobData.of_files(
        train.load(tokenizer, vocab_size),
        None if evaluation is None else evaluation.load(tokenizer, vocab_size),
    )


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Says which sequences each optimizer step takes, as a pure function of the step.

    The job's stream is one permutation of its sequences after another, that of epoch e drawn from
    (seed, e) alone, and batches are consecutive cuts of the stream. So a step needs no state to be
    resumed, and the order does not depend on the job's neighbours. With `max_steps` every batch is
    full and may cross epochs; with `epochs` the last batch may be smaller.
    """

    num_sequences: int
    batch_size: int
    seed: int
    max_steps: int | None = None
    epochs: int | None = None
    _orders: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Permutations of the last two epochs used."""

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError(
                f"exactly one of max_steps and epochs must be set, "
                f"got {self.max_steps} and {self.epochs}"
            )
        for name in ("num_sequences", "batch_size", "max_steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @classmethod
    def for_job(cls, job: JobSpec, num_sequences: int) -> BatchPlan:
        """The plan of a job over its `num_sequences` training sequences."""
        return cls(num_sequences, job.batch_size, job.seed, job.max_steps, job.epochs)

    @property
    def num_steps(self) -> int:
        """Optimizer steps until the job ends."""
        return -(-self._stream_length // self.batch_size)

    @property
    def num_epochs(self) -> float:
        """Passes over the data until the job ends."""
        return self._stream_length / self.num_sequences

    @property
    def _stream_length(self) -> int:
        if self.epochs is not None:
            return self.epochs * self.num_sequences
        assert self.max_steps is not None, "checked at construction"
        return self.max_steps * self.batch_size

    def indices(self, step: int) -> tuple[int, ...]:
        """Indices of the training sequences in the batch of `step`, counted from 0.

        Raises:
            IndexError: if the job has no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step must be in [0, {self.num_steps}), got {step}")
        begin = step * self.batch_size
        end = min(begin + self.batch_size, self._stream_length)
        places = (divmod(place, self.num_sequences) for place in range(begin, end))
        return tuple(int(self._order(epoch)[offset]) for epoch, offset in places)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
            self._orders[epoch] = np.random.Generator(bits).permutation(self.num_sequences)
        return self._orders[epoch]
