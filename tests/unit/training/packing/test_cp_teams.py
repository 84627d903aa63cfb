"""A replica's part of a round among teams of its context-parallel ranks, and the packed rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tlora_megatron.model.cp_dispatch import CpRates, CpTeam
from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.model.layout import ParallelLayout, RecomputeTable
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano_cuts import cut_by_length
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import Item, RoundShape
from tlora_megatron.training.packing.portions import rank_ends_ps
from tlora_megatron.training.packing.round_packer import PackedRound, RoundPacker

BUDGET = 256
RATES = CpRates(
    (
        ReplicaRate(token_ps=200, square_ps=2, fixed_ps=5, longest=BUDGET // 2),
        ReplicaRate(token_ps=120, square_ps=1, fixed_ps=10, longest=BUDGET),
    )
)
LENGTHS = (150, 20, 20, 20, 20)
ITEMS = [
    Item(TokenSequence(np.zeros(rows + 1, np.int32), np.ones(rows + 1, bool)), index, 0, 1.0)
    for index, rows in enumerate(LENGTHS)
]


def packed_on(cp_rank: int, table: RecomputeTable | None = None) -> PackedRound:
    nobody: Any = None
    groups = ParallelGroups(
        layout=ParallelLayout(cp_size=2), tp_rank=0, pp_rank=0, cp_rank=cp_rank, dp_rank=0,
        tp_group=nobody, dp_cp_group=nobody, model_group=nobody, device=torch.device("cpu"),
    )  # fmt: skip
    packer = RoundPacker(
        groups=groups,
        micro_batch_tokens=BUDGET,
        shape=RoundShape(recompute=table),
        active=(True,),
        dropout_keys=(1,),
        num_nano_batches=1,
        cut=cut_by_length,
        cp_rates=RATES,
    )
    return packer.pack_round([ITEMS], first_slot=0)


def test_ranks_share_the_long_sequence_and_have_short_ones_of_their_own() -> None:
    """Each row is on one rank, in views that name their ranks and kernels' rows of a whole rank."""
    rounds = [packed_on(rank) for rank in range(2)]
    assert rounds[0].round == rounds[1].round
    assert rounds[0].round.teams == ((CpTeam(0, 2), CpTeam(0, 1), CpTeam(1, 1)),)
    assert rounds[0].round.num_tokens == sum(LENGTHS)
    for rank, packed in enumerate(rounds):
        views = [m.packed.view for m in packed.micro_batches]
        assert [(v.cp_rank, v.cp_size, v.num_tokens) for v in views] == [(rank, 2, 80), (0, 1, 48)]
        assert {v.row_budget for v in views} == {BUDGET // 2}
    targets = sum(len(m.packed.target_rows) for r in rounds for m in r.micro_batches)
    assert targets == sum(LENGTHS)
    assert (
        rank_ends_ps(rounds[0].round, RATES)
        == [10 + RATES.of(2).sequence_ps(150) + 5 + 2 * RATES.of(1).sequence_ps(20)] * 2
    )


def test_recompute_goes_by_the_rows_of_a_rank() -> None:
    table = RecomputeTable((("none", 60), ("full", BUDGET)))
    packed = packed_on(0, table)
    found = [(m.packed.view.num_tokens, m.packed.view.recompute) for m in packed.micro_batches]
    assert found == [(80, "full"), (32, "full"), (32, "full")]
    lighter = packed_on(0, RecomputeTable((("none", 64), ("full", BUDGET))))
    assert [m.packed.view.recompute for m in lighter.micro_batches] == ["full", "none", "none"]
