"""Estimates rounds of so many sequences that single ones no longer matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tlora_megatron.planner.rounds.load import ExpectedRounds
from tlora_megatron.planner.rounds.packer import RoundShape
from tlora_megatron.planner.workload import JobLoad

_FLUID_ROUNDS = 32
FILL = 0.97
"""Share of the room that full micro-batches use if sequences are small beside it."""
_DUST = 1e-6
"""Share of a sequence that is left over when a batch is done."""


class Flow(NamedTuple):
    """Large rounds, however many replicas share the rows of a micro-batch's turn."""

    rounds: tuple[tuple[int, float, float], ...]
    """By round, micro-batches of a replica, rows and sequences."""
    sequences: tuple[float, ...]
    """Sequences of each job in the mean round."""


def fluid_flow(jobs: Sequence[JobLoad], shape: RoundShape) -> Flow:
    """Fills large rounds: each job gets equally many sequences, or the rest of its batch.

    It depends on the product of a shape's capacity and replicas only.
    """
    means = [job.lengths.mean for job in jobs]
    left = [0.0] * len(jobs)
    total = [0.0] * len(jobs)
    rounds = []
    for _ in range(_FLUID_ROUNDS):
        left = [n if n > _DUST else job.batch_size for n, job in zip(left, jobs, strict=True)]
        wanted = _dot(left, means)
        count = shape.micro_batches(wanted)
        room = FILL * shape.capacity * count * shape.dp_size
        share = _fair_share(left, means, min(wanted, room))
        taken = [n if n < share else share for n in left]
        rounds.append((count, _dot(taken, means), sum(taken)))
        left = [n - t for n, t in zip(left, taken, strict=True)]
        total = [n + t for n, t in zip(total, taken, strict=True)]
        if not any(left):
            break  # the next rounds are the same again
    return Flow(tuple(rounds), tuple(n / len(rounds) for n in total))


def fluid_rounds(jobs: Sequence[JobLoad], shape: RoundShape, flow: Flow) -> ExpectedRounds:
    """Rounds of a shape, given its flow."""
    fullest = []
    for count, tokens, sequences in flow.rounds:
        bins = count * shape.dp_size
        beyond = tokens / sequences / 2 if bins > 1 else 0.0
        fullest.append((count, min(float(shape.capacity), tokens / bins + beyond)))
    filled = list(zip(flow.sequences, jobs, strict=True))
    return ExpectedRounds(
        fullest=tuple(fullest),
        job_tokens=tuple(n * job.lengths.mean for n, job in filled),
        job_sequences=flow.sequences,
        steps=tuple(n / job.batch_size for n, job in filled),
    )


def _fair_share(left: Sequence[float], means: Sequence[float], tokens: float) -> float:
    """The number of sequences that each job may add so that all together have `tokens` rows."""
    rate = sum(means)
    share = 0.0
    for most, mean in sorted(zip(left, means, strict=True)):
        step = min(most - share, tokens / rate)
        share += step
        tokens -= step * rate
        rate -= mean
        if tokens <= 0 or rate <= 0:
            break
    return share


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
