"""Shares a replica's part of a round out among teams of its context-parallel ranks."""

from __future__ import annotations

import itertools
from functools import partial

from tlora_megatron.model.cp_dispatch import (
    CpRates,
    CpTeam,
    Cut,
    share_among_teams,
    team_ends_ps,
)
from tlora_megatron.model.dispatch import cut
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.training.packing.packing import (
    MicroBatchItems,
    Round,
    in_packed_order,
)
from tlora_megatron.training.packing.recompute_cut import cut_by_recompute


def form_teams(content: Round, rates: CpRates, table: RecomputeTable | None = None) -> Round:
    """Cuts the part of every replica anew, each micro-batch for the team that is to run it.

    Which items a replica has stays as it is. A team's micro-batch holds its share of the rows that
    one of the whole replica holds, so that a rank never has more of them.

    Args:
        table: the recompute of micro-batches by the rows of whole replicas.
    """
    cut_for = partial(_cut_evenly, rates) if table is None else partial(_cut, rates, table)
    formed = [_form(own, rates, cut_for) for own in content.replicas]
    return Round(
        replicas=tuple(items for items, _ in formed), teams=tuple(teams for _, teams in formed)
    )


def _form(
    whole: tuple[MicroBatchItems, ...], rates: CpRates, cut_for: Cut
) -> tuple[tuple[MicroBatchItems, ...], tuple[CpTeam, ...]]:
    placed = list(itertools.chain(*whole))
    shares = share_among_teams([p.item.length for p in placed], rates, cut_for)
    items = (in_packed_order([placed[i] for i in places]) for places in shares.places)
    return tuple(items), shares.teams


def _cut_evenly(rates: CpRates, lengths: list[int], size: int) -> list[list[int]]:
    return cut(lengths, rates.of(size).longest)


def _cut(rates: CpRates, table: RecomputeTable, lengths: list[int], size: int) -> list[list[int]]:
    return cut_by_recompute(lengths, table.of_share(size, rates.cp_size))


def rank_ends_ps(filled: Round, rates: CpRates) -> list[int]:
    """Predicted time of each rank for its part of a round, a replica after the other."""
    assert filled.teams is not None, "the round has been shared out among teams"
    ends = []
    for own, teams in zip(filled.replicas, filled.teams, strict=True):
        lengths = [[placed.item.length for placed in items] for items in own]
        ends += team_ends_ps(list(zip(teams, lengths, strict=True)), rates)
    return ends
