"""Mixes of eight jobs whose steps are timed: ranks 4 to 64, random tokens."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.training.data.tokenize import TokenSequence

SHORTEST, LONGEST = 256, 2048
RANKS = (4, 8, 16, 16, 24, 32, 64, 64)
MIXES = {"batch 1-8": (1, 8, 2, 4, 8, 1, 4, 2), "batch 1-4": (1, 4, 2, 2, 2, 2, 1, 4)}
"""Sequences an optimizer step of each job: the mix of the headline, and one of small batches."""
FULL = "full micro-batch"
"""A third mix: one global batch of each job; together they fill one micro-batch exactly."""
EQUAL_STEPS = {f"{tokens} a step": tokens for tokens in (512, 1024, 2048, 4096, 8192)}
"""Further mixes: tokens of an optimizer step of each job, in sequences of at most 1,024."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SEQUENCES_PER_JOB = 64

_QUANTILES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_TOKENS = (256, 265, 272, 284, 296, 313, 338, 376, 517, 837, 1171, 1686, 2018)
"""Lengths at those quantiles: GPT-2 tokens of prompt and completion, the 1,613 records of 256 to
2,048 tokens among samples of SciTLDR, QMSum, XQuAD, GPTeacher code generation and GSM8K."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Jobs that train together."""

    name: str
    specs: tuple[JobSpec, ...]
    data: tuple[tuple[TokenSequence, ...], ...]
    """Training sequences of each job."""
    target_share: float
    """Share of each sequence's tokens, its last ones, that count in the loss."""


def make_mixes(
    lengths: Path | None, *, vocab_size: int, target_share: float, dropout: float, longest: int
) -> list[Mix]:
    """The mixes of `MIXES`, the same ones every time, no sequence over `longest`.

    Args:
        lengths: CSV, gzipped or not, with `prompt_tokens` and `completion_tokens`; None draws from
            quantiles of such data.
    """
    draw = np.random.default_rng(0)
    pool = None if lengths is None else np.array(list(_read_lengths(lengths)))
    mixes = []
    for name, batches in MIXES.items():
        specs = [_spec(index, batch, dropout) for index, batch in enumerate(batches)]
        data = []
        for _ in specs:
            if pool is None:
                lengths = np.interp(draw.random(_SEQUENCES_PER_JOB), _QUANTILES, _TOKENS)
            else:
                lengths = draw.choice(pool, _SEQUENCES_PER_JOB)
            cut = (min(int(n), longest) for n in lengths)
            data.append(tuple(sequence(draw, n, vocab_size, target_share) for n in cut))
        mixes.append(
            Mix(name=name, specs=tuple(specs), data=tuple(data), target_share=target_share)
        )
    return mixes


def full_micro_batch(tokens: int, *, vocab_size: int, dropout: float) -> Mix:
    """Eight jobs, every third on attention only, whose batches are `tokens` rows together."""
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.full(len(RANKS), 4.0))
    rows = np.maximum((shares * tokens).astype(int), 16)
    rows[-1] += tokens - rows.sum()
    data = []
    for job_rows in map(int, rows):
        count = max(1, job_rows // 512)
        cuts = draw.choice(np.arange(8, job_rows - 8), count - 1, replace=False)
        lengths = np.diff([0, *np.sort(cuts), job_rows])
        data.append(tuple(sequence(draw, int(length), vocab_size, 0.5) for length in lengths))
    specs = []
    for index, sequences in enumerate(data):
        spec = _spec(index, len(sequences), dropout)
        if index % 3 == 2:
            spec = replace(spec, lora=replace(spec.lora, target_modules=ATTENTION))
        specs.append(spec)
    return Mix(name=FULL, specs=tuple(specs), data=tuple(data), target_share=0.5)


def equal_steps(name: str, *, vocab_size: int, dropout: float, longest: int = 1024) -> Mix:
    """Eight jobs whose optimizer steps all have as many tokens as a mix of `EQUAL_STEPS` says."""
    batch, length = step_shape(EQUAL_STEPS[name], longest)
    draw = np.random.default_rng(0)
    data = tuple(
        tuple(sequence(draw, length, vocab_size, 1.0) for _ in range(2 * batch)) for _ in RANKS
    )
    specs = (_spec(index, batch, dropout) for index in range(len(RANKS)))
    specs = tuple(replace(spec, max_seq_len=longest + 1) for spec in specs)
    return Mix(name=name, specs=specs, data=data, target_share=1.0)


def step_shape(tokens: int, longest: int = 1024) -> tuple[int, int]:
    """Sequences and their length in a step of so many tokens."""
    length = min(tokens, longest)
    return tokens // length, length


def _spec(index: int, batch_size: int, dropout: float) -> JobSpec:
    lora = LoraSpec(rank=RANKS[index % len(RANKS)], dropout=dropout)
    return endless_job(f"job{index}", lora, batch_size, LONGEST, index)


def endless_job(
    name: str, lora: LoraSpec, batch_size: int, longest: int, seed: int, **more: Any
) -> JobSpec:
    """A job whose data the benchmark draws, and that does not end by itself."""
    return JobSpec(
        name=name, data=DataSpec(train="synthetic"), lora=lora, batch_size=batch_size,
        max_seq_len=longest + 1, max_steps=10**6, seed=seed, **more,
    )  # fmt: skip


def _read_lengths(path: Path) -> Iterator[int]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    for row in csv.DictReader(text.splitlines()):
        tokens = int(row["prompt_tokens"]) + int(row["completion_tokens"])
        if SHORTEST <= tokens <= LONGEST:
            yield tokens


def sequence(
    draw: np.random.Generator, length: int, vocab_size: int, target_share: float
) -> TokenSequence:
    """A sequence of `length` rows: it holds one token more, since the last is only predicted."""
    is_target = np.arange(length + 1) > length * (1 - target_share)
    is_target[0], is_target[-1] = False, True
    return TokenSequence(draw.integers(0, vocab_size, length + 1, dtype=np.int32), is_target)


def mean_length(mix: Mix) -> float:
    """Mean rows of a sequence, over all of a mix's data."""
    sequences = list(itertools.chain.from_iterable(mix.data))
    return sum(len(s.tokens) - 1 for s in sequences) / len(sequences)
