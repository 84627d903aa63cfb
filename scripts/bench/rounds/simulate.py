"""Rounds of a mix without a GPU: the run's own packer, and the planner's speed of a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.bench.rounds.mixes import BATCH, Lengths, batches
from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import Item, Round, batch_items, fill_bins
from tlora_megatron.training.packing.recompute_cut import RoundRule, fill_by_time, round_ends_ps
from tlora_megatron.training.round_depth import choose_depth

DEPTHS = {"tokens": 1, "time 1": 1, "time 2": 2, "time 4": 4, "auto": None}
"""Depth by mode, None where it is chosen. By tokens are rounds with `run.round_depth: 1`; `auto` is
one of those by time."""
_STEPS = 12
"""Global batches of every job that a simulation is as long as."""
_PS = 1e-12

Fill = Callable[[Sequence[list[Item]], int], tuple[Round, list[list[Item]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The time of all rounds of a mix."""

    step_s: float
    """Seconds in which the replicas do the work of one global batch of every job."""
    busy_share: float
    smallest_steps_per_s: float
    """Batches a second of the job that has the fewest rows in one."""
    depth: int


def simulate(mix: Lengths, rates: Sequence[ReplicaRate], mode: str) -> Result:
    """Runs rounds until as much work is done as some batches of every job are.

    Not as many rows: rounds of unlike depth take short and long sequences in unlike shares.
    """
    jobs = [batches(lengths, seed) for seed, lengths in enumerate(mix.values())]
    depth = DEPTHS[mode] or choose_depth(jobs, rates)[-1].depth
    fill = _by_tokens(rates) if mode == "tokens" else _by_time(rates, depth)
    step_ps = sum(
        BATCH * sum(map(rates[0].sequence_ps, lengths)) / len(lengths) for lengths in mix.values()
    )
    queues: list[list[Item]] = [[] for _ in jobs]
    begun, number, busy_ps, time_ps = [0] * len(jobs), 0, 0, 0
    while busy_ps < _STEPS * step_ps:
        for slot, batch in enumerate(jobs):
            if not queues[slot]:
                queues[slot] = batch_items([sequence_of(n) for n in batch(begun[slot])])
                begun[slot] += 1
        filled, queues = fill(queues, number)
        ends = round_ends_ps(filled, rates)
        busy_ps, time_ps = busy_ps + sum(ends), time_ps + max(ends)
        number += 1
    smallest = min(range(len(jobs)), key=lambda slot: sum(list(mix.values())[slot]))
    done = begun[smallest] - len(queues[smallest]) / BATCH
    return Result(
        step_s=step_ps * _PS * time_ps / busy_ps,
        busy_share=busy_ps / (time_ps * len(rates)),
        smallest_steps_per_s=done / (time_ps * _PS),
        depth=depth,
    )


def _by_tokens(rates: Sequence[ReplicaRate]) -> Fill:
    def fill(queues: Sequence[list[Item]], number: int) -> tuple[Round, list[list[Item]]]:
        return fill_bins(
            queues, capacity=rates[0].longest, dp_size=len(rates), pp_size=1, first_slot=number
        )

    return fill


def _by_time(rates: Sequence[ReplicaRate], depth: int) -> Fill:
    rule = RoundRule(rates=tuple(rates), depth=depth, stages=(1,) * len(rates))

    def fill(queues: Sequence[list[Item]], number: int) -> tuple[Round, list[list[Item]]]:
        return fill_by_time(queues, rule, first_slot=number)

    return fill


def sequence_of(rows: int) -> TokenSequence:
    """A sequence that takes so many rows."""
    tokens = np.broadcast_to(np.int32(0), rows + 1)
    return TokenSequence(tokens, np.broadcast_to(np.True_, rows + 1))
