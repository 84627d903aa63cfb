"""Rounds that the super-model of a case packs, without running it, and which of them to time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scripts.bench.planner.cases import Case
from tlora_megatron.planner.cost.memory import ROW_TILE
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.profiling.synthetic_run import data_lengths
from tlora_megatron.training.data.job_data import BatchPlan
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import Item, batch_items, fill_bins, round_up


class PackedRound(NamedTuple):
    tokens: int
    """Rows of all jobs over all ranks."""
    padded: int
    """Micro-batches of a rank times their rows: what the slowest rank computes."""


def packed_rounds(case: Case, count: int) -> list[PackedRound]:
    """The first rounds of a case: its jobs' data in their order, by the run's own packer."""
    plan = case.plan
    streams = [_Batches(load, seed) for seed, load in enumerate(case.jobs)]
    queues: list[list[Item]] = [[] for _ in streams]
    rounds = []
    for index in range(count):
        queues = [queue or stream.next() for queue, stream in zip(queues, streams, strict=True)]
        filled, queues = fill_bins(
            queues, capacity=plan.micro_batch_tokens, dp_size=plan.dp_size, pp_size=plan.pp_size,
            first_slot=index, num_micro_batches=plan.num_micro_batches,
        )  # fmt: skip
        loads = [sum(placed.item.length for placed in content) for content in filled.micro_batches]
        is_full = plan.num_micro_batches is not None
        rows = plan.micro_batch_tokens if is_full else round_up(max(loads), ROW_TILE * plan.cp_size)
        rounds.append(PackedRound(sum(loads), len(filled.replicas[0]) * rows))
    return rounds


class _Batches:
    """A job's global batches one after another, as `SyntheticRun` has them."""

    def __init__(self, load: JobLoad, seed: int) -> None:
        self._sequences = [_sequence(length) for length in data_lengths(load)]
        self._plan = BatchPlan(len(self._sequences), load.batch_size, seed, max_steps=10**6)
        self._step = 0

    def next(self) -> list[Item]:
        self._step += 1
        return batch_items([self._sequences[i] for i in self._plan.indices(self._step - 1)])


def _sequence(length: int) -> TokenSequence:
    tokens = np.broadcast_to(np.int32(0), length + 1)
    return TokenSequence(tokens, np.broadcast_to(np.True_, length + 1))


def typical_window(rounds: Sequence[PackedRound], size: int, first: int) -> int:
    """Where the `size` rounds in a row begin that are most like the mean of all.

    A few rounds from anywhere hold up to 15 % more or less, where batches wait for room.

    Args:
        first: the earliest round that may be one of them.
    """
    tokens, padded = (statistics.fmean(values) for values in zip(*rounds, strict=True))

    def distance(begin: int) -> float:
        window = rounds[begin : begin + size]
        own = [statistics.fmean(values) for values in zip(*window, strict=True)]
        return abs(own[0] / tokens - 1) + abs(own[1] / padded - 1)

    return min(range(first, len(rounds) - size + 1), key=distance)
