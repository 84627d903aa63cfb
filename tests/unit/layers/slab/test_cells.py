"""Cells: who holds them, and how they lie in slabs; their sums are in test_sum_over_replicas.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.layout_sites import SPEC
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab_cells import SlabCells
from tlora_megatron.layers.slab_layout import SlabLayout, slab_layout
from tlora_megatron.model.deployment import Deployment, ReplicaLayout
from tlora_megatron.parallel.groups import HeldCell, ReplicaCells, all_cells

SPECS = dataclasses.replace(SPEC, num_layers=12)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REPLICAS = st.builds(
    ReplicaLayout,
    tp_size=st.sampled_from((1, 2, 4)),
    pp_size=st.sampled_from((1, 2, 3, 4)),
    cp_size=st.sampled_from((1, 2)),
)
LORA = LoraSpec(rank=4, target_modules=TARGETS)


def held_by(deployment: Deployment, rank: int) -> tuple[SlabLayout, SlabCells]:
    """One rank's slab and its cells, without groups."""
    replica = deployment.placed(rank)
    tp_rank, pp_rank, _ = replica.place_of(rank)
    layout = replica.layout.parallel_layout(len(deployment.replicas))
    slab = slab_layout(stage_sites(SPECS, layout, tp_rank=tp_rank, pp_rank=pp_rank), LORA)
    mine = [c for c in all_cells(deployment, SPECS.num_layers) if rank in c.holders]
    held = tuple(HeldCell(cell, None) for cell in mine)
    cells = ReplicaCells(deployment.atoms, layout.tp_size, tp_rank, held)
    return slab, SlabCells(slab, cells)


@given(st.lists(REPLICAS, min_size=1, max_size=5))
def test_a_cell_is_held_by_one_place_of_each_replica(replicas: list[ReplicaLayout]) -> None:
    deployment = Deployment.of(replicas)
    for cell in all_cells(deployment, SPECS.num_layers):
        assert list(cell.holders) == sorted(set(cell.holders))
        for replica in deployment.placed_replicas():
            mine = [rank for rank in replica.ranks if rank in cell.holders]
            assert len(mine) == replica.layout.cp_size
            assert len({replica.place_of(rank)[:2] for rank in mine}) == 1


def test_the_replicated_parts_of_all_ranks_are_the_head_of_the_slab() -> None:
    slab, cells = held_by(Deployment.parse("1xTP2 + 1xTP4 + 1xTP1"), 1)
    places = torch.arange(slab.numel)
    packed = [places.new_zeros(part.numel) for part in cells.replicated]
    for part, into in zip(cells.replicated, packed, strict=True):
        part.pack(places, into)
    assert len(packed) == 4
    assert torch.equal(torch.cat(packed).sort().values, torch.arange(slab.replicated_numel))


def test_a_part_is_few_views_however_many_layers() -> None:
    _, cells = held_by(Deployment.parse("1xTP4 + 1xTP1"), 4)
    assert len(cells.parts) == 4
    assert all(len(part.runs) == 2 * len(TARGETS) for part in cells.parts)


def test_a_cell_that_is_a_whole_slab_is_not_copied() -> None:
    deployment = Deployment.parse("1xPP2 + 1xTP1")
    assert [part.is_slab for part in held_by(deployment, 0)[1].parts] == [True]
    assert [part.is_slab for part in held_by(deployment, 2)[1].parts] == [False, False]


def test_features_that_no_atom_divides_are_refused() -> None:
    lora = LoraSpec(rank=4, target_modules=("o_proj",))
    slab = slab_layout(
        stage_sites(SPECS, ReplicaLayout().parallel_layout(2), tp_rank=0, pp_rank=0), lora
    )
    with pytest.raises(ValueError, match=r"features of layers.0.o_proj.lora_\w must be a multiple"):
        SlabCells(slab, ReplicaCells(5, 1, 0, ()))
