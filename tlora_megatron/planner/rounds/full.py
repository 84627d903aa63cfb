"""Sizes of rounds to try for a trainer that fixes the number of micro-batches and their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.rounds.model import RoundModel
from tlora_megatron.planner.workload import JobLoad

_STAGE_DEPTH = 4
"""Most micro-batches for each stage, as `tlora train` has them: a job steps once a round at most,
so long rounds keep jobs with small batches waiting for the others."""
_MOST_EMPTY = 1.5
"""Room of a round, over all batches together, beyond which a smaller size is surely better."""
_TILE = 128


class FullSize(NamedTuple):
    """Size of a round whose micro-batches are all computed whole."""

    micro_batch_tokens: int
    num_micro_batches: int


def full_sizes(
    rounds: RoundModel, jobs: Sequence[JobLoad], layout: Plan, budgets: Sequence[int]
) -> Iterator[FullSize]:
    """Budgets with the numbers of micro-batches that they fill best, each pair once.

    Budgets that just hold all batches come in addition: padding is computed like anything else.

    Args:
        rounds: of the same jobs.
        budgets: ascending; the first one holds the longest sequence. One alone is kept to.
    """
    tokens = sum(job.batch_tokens for job in jobs)
    seen: set[FullSize] = set()
    for number, budget in enumerate(budgets):
        wanted = tokens / (budget * layout.dp_size)
        for count in _counts(layout, wanted):
            if number and count > _MOST_EMPTY * wanted:
                continue
            seen.add(FullSize(budget, count))
    if len(budgets) > 1:
        seen.update(_just_enough(rounds, layout, budgets[0]))
    yield from sorted(seen)


def _counts(layout: Plan, wanted: float) -> set[int]:
    """Numbers of micro-batches next to the one that would hold all batches."""
    unit, most = _unit(layout), _most(layout)
    below, above = (max(1, part(wanted / unit)) * unit for part in (math.floor, math.ceil))
    counts = {min(below, most), min(above, most)}
    return counts if layout.pp_size > 1 else counts | {1}


def _just_enough(rounds: RoundModel, layout: Plan, least: int) -> Iterator[FullSize]:
    """Budgets that hold all batches in the mean round, and in every round that was looked at."""
    step = _TILE * layout.tp_size * layout.cp_size
    unit = layout.pp_size
    for count in range(unit, _most(layout) + 1, unit):
        for rows in rounds.rows_for_all(count * layout.dp_size):
            budget = math.ceil(rows / step) * step
            if budget >= least:
                yield FullSize(budget, count)


def _unit(layout: Plan) -> int:
    """The number whose multiples an interleaved schedule takes, which runs whole groups."""
    return layout.pp_size if layout.vpp_size > 1 else 1


def _most(layout: Plan) -> int:
    """Most micro-batches; several without a pipeline only even out the replicas' attention."""
    return _STAGE_DEPTH * layout.pp_size if max(layout.pp_size, layout.dp_size) > 1 else 1
