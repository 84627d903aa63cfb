"""Cells: every element of every factor is in exactly one, and all its holders pack it alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.layout_sites import SPEC
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import factor_names, factor_shape
from tlora_megatron.layers.slab_cells import SlabCells
from tlora_megatron.layers.slab_layout import SlabLayout, slab_layout
from tlora_megatron.model.deployment import Deployment, ReplicaLayout
from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.parallel.groups import HeldCell, ReplicaCells, all_cells

SPECS = dataclasses.replace(SPEC, num_layers=12)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
REPLICAS = st.builds(
    ReplicaLayout,
    tp_size=st.sampled_from((1, 2, 4)),
    pp_size=st.sampled_from((1, 2, 3, 4)),
    cp_size=st.sampled_from((1, 2)),
)
CHOICES = st.one_of(
    st.lists(st.sampled_from(TARGETS), min_size=1, unique=True),
    st.lists(st.sampled_from(FUSED), min_size=1, unique=True),
)


def held_by(
    deployment: Deployment, rank: int, lora: LoraSpec, sharding: LoraSharding = "fold"
) -> tuple[SlabLayout, SlabCells]:
    """One rank's slab and its cells, without groups."""
    replica = deployment.placed(rank)
    tp_rank, pp_rank, _ = replica.place_of(rank)
    layout = dataclasses.replace(
        replica.layout.parallel_layout(len(deployment.replicas)), lora_sharding=sharding
    )
    slab = slab_layout(stage_sites(SPECS, layout, tp_rank=tp_rank, pp_rank=pp_rank), lora)
    mine = [c for c in all_cells(deployment, SPECS.num_layers) if rank in c.holders]
    held = tuple(HeldCell(cell, None) for cell in mine)
    cells = ReplicaCells(deployment.atoms, layout.tp_size, tp_rank, held)
    return slab, SlabCells(slab, cells)


def numbered(lora: LoraSpec) -> dict[str, torch.Tensor]:
    """Whole factors whose elements are all different, from 1."""
    found, begin = {}, 1
    for name in factor_names(SPECS, lora):
        shape = factor_shape(SPECS, name, lora)
        found[name] = torch.arange(begin, begin + math.prod(shape)).view(shape)
        begin += math.prod(shape)
    return found


def filled(slab: SlabLayout, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One rank's part of whole factors, flat."""
    return torch.cat([factor.shard_of(whole[factor.name]).flatten() for factor in slab.factors])


def packed_cells(
    deployment: Deployment, lora: LoraSpec, sharding: LoraSharding = "fold"
) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Every cell as each of its holders packs it, by first layer and atom."""
    whole = numbered(lora)
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for rank in range(deployment.world_size):
        slab, cells = held_by(deployment, rank, lora, sharding)
        flat = filled(slab, whole)
        for part, (cell, _) in zip(cells.parts, cells.cells.held, strict=True):
            packed = flat.new_zeros(part.numel)
            part.pack(flat, packed)
            found.setdefault((cell.first_layer, cell.atom), []).append(packed)
            back = torch.zeros_like(flat)
            part.unpack(packed, back)
            assert torch.equal(back[back > 0].sort().values, packed.sort().values)
    return found


@given(st.lists(REPLICAS, min_size=1, max_size=4), CHOICES)
def test_every_element_is_in_one_cell_which_all_holders_pack_alike(
    replicas: list[ReplicaLayout], targets: list[str]
) -> None:
    deployment = Deployment.of(replicas)
    lora = LoraSpec(rank=3, target_modules=tuple(targets))
    found = packed_cells(deployment, lora)
    for alike in found.values():
        assert all(torch.equal(alike[0], other) for other in alike)
    together = torch.cat([alike[0] for alike in found.values()]).sort().values
    expected = sum(whole.numel() for whole in numbered(lora).values())
    assert torch.equal(together, torch.arange(1, expected + 1))


@given(st.lists(REPLICAS, min_size=1, max_size=5))
def test_a_cell_is_held_by_one_place_of_each_replica(replicas: list[ReplicaLayout]) -> None:
    deployment = Deployment.of(replicas)
    for cell in all_cells(deployment, SPECS.num_layers):
        assert list(cell.holders) == sorted(set(cell.holders))
        for replica in deployment.placed_replicas():
            mine = [rank for rank in replica.ranks if rank in cell.holders]
            assert len(mine) == replica.layout.cp_size
            assert len({replica.place_of(rank)[:2] for rank in mine}) == 1


@pytest.mark.parametrize("sharding", ["s_lora", "fold"])
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_alike_cuts_share_whatever_sharding(sharding: LoraSharding, num_blocks: int) -> None:
    kind = "standard" if num_blocks == 1 else "block_diagonal"
    lora = LoraSpec(rank=8, parametrization=kind, num_blocks=num_blocks, target_modules=TARGETS)
    found = packed_cells(Deployment.parse("1xTP2+PP2 + 1xTP2+CP2 + 1xTP2@64"), lora, sharding)
    assert len(found) == 4  # two stages, two tensor-parallel ranks
    for alike in found.values():
        assert len(alike) == 4
        assert all(torch.equal(alike[0], other) for other in alike)


def test_the_replicated_parts_of_all_ranks_are_the_head_of_the_slab() -> None:
    lora = LoraSpec(rank=4, target_modules=TARGETS)
    slab, cells = held_by(Deployment.parse("1xTP2 + 1xTP4 + 1xTP1"), 1, lora)
    places = torch.arange(slab.numel)
    packed = [places.new_zeros(part.numel) for part in cells.replicated]
    for part, into in zip(cells.replicated, packed, strict=True):
        part.pack(places, into)
    assert len(packed) == 4
    assert torch.equal(torch.cat(packed).sort().values, torch.arange(slab.replicated_numel))


def test_a_part_is_few_views_however_many_layers() -> None:
    lora = LoraSpec(rank=4, target_modules=TARGETS)
    _, cells = held_by(Deployment.parse("1xTP4 + 1xTP1"), 4, lora)
    assert len(cells.parts) == 4
    assert all(len(part.runs) == 2 * len(TARGETS) for part in cells.parts)


def test_a_cell_that_is_a_whole_slab_is_not_copied() -> None:
    lora = LoraSpec(rank=4, target_modules=TARGETS)
    deployment = Deployment.parse("1xPP2 + 1xTP1")
    assert [part.is_slab for part in held_by(deployment, 0, lora)[1].parts] == [True]
    assert [part.is_slab for part in held_by(deployment, 2, lora)[1].parts] == [False, False]


def test_features_that_no_atom_divides_are_refused() -> None:
    lora = LoraSpec(rank=4, target_modules=("o_proj",))
    slab = slab_layout(
        stage_sites(SPECS, ReplicaLayout().parallel_layout(2), tp_rank=0, pp_rank=0), lora
    )
    with pytest.raises(ValueError, match=r"features of layers.0.o_proj.lora_\w must be a multiple"):
        SlabCells(slab, ReplicaCells(5, 1, 0, ()))
