"""Cells of unlike replicas: who holds them, how they lie in slabs, and the sums over them, which
threads make that stand for ranks.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.launch import HANG_S
from tests.helpers.layout_sites import SPEC
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers import slab_cells
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import factor_names, factor_shape
from tlora_megatron.layers.slab_cells import SlabCells
from tlora_megatron.layers.slab_layout import SlabLayout, slab_layout
from tlora_megatron.model.layout import Deployment, LoraSharding, ReplicaLayout
from tlora_megatron.parallel.collectives import Pending
from tlora_megatron.parallel.groups import ReplicaCells, all_cells

SPECS = replace(SPEC, num_layers=12)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EVERYWHERE = LoraSpec(rank=4, target_modules=TARGETS)


def held_by(deployment: Deployment, rank: int) -> tuple[SlabLayout, SlabCells]:
    """One rank's slab and its cells, without groups."""
    replica = deployment.placed(rank)
    tp_rank, pp_rank, _ = replica.place_of(rank)
    layout = replica.layout.parallel_layout(len(deployment.replicas))
    slab = slab_layout(stage_sites(SPECS, layout, tp_rank=tp_rank, pp_rank=pp_rank), EVERYWHERE)
    mine = [c for c in all_cells(deployment, SPECS.num_layers) if rank in c.holders]
    held = tuple((cell, None) for cell in mine)
    cells = ReplicaCells(deployment.atoms, layout.tp_size, tp_rank, held)
    return slab, SlabCells(slab, cells)


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


LORA = LoraSpec(rank=2, target_modules=("q_proj", "o_proj", "linear_fc1", "down_proj"))
SIZES = (1, 1, 2, 4)


class Exchange:
    """Collectives of threads, each of which is a rank; a group is the tuple of its ranks."""

    def __init__(self) -> None:
        self._rank = threading.local()
        self._changed = threading.Condition()
        self._given: dict[Any, dict[int, torch.Tensor]] = {}
        self._calls: Counter[Any] = Counter()

    def enter(self, rank: int) -> None:
        self._rank.number = rank

    def gather(self, x: torch.Tensor, group: Sequence[int]) -> list[torch.Tensor]:
        rank = self._rank.number
        with self._changed:
            call = self._calls[rank, group]
            self._calls[rank, group] += 1
            everyone = self._given.setdefault((group, call), {})
            everyone[rank] = x.clone()
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(everyone) == len(group), HANG_S)
        return [everyone[member] for member in group]

    def all_reduce(self, x: torch.Tensor, *, group: Sequence[int]) -> None:
        x.copy_(torch.stack(self.gather(x, group)).sum(0))

    def reduce_scatter_rows(self, x: torch.Tensor, group: Sequence[int]) -> Pending:
        place = group.index(self._rank.number)
        return Pending(torch.stack(self.gather(x, group)).sum(0)[place : place + 1], None)

    def all_gather_rows(self, x: torch.Tensor, group: Sequence[int]) -> torch.Tensor:
        return torch.cat(self.gather(x, group))


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    made = Exchange()
    monkeypatch.setattr(slab_cells.dist, "all_reduce", made.all_reduce)
    monkeypatch.setattr(slab_cells, "reduce_scatter_rows", made.reduce_scatter_rows)
    monkeypatch.setattr(slab_cells, "all_gather_rows", made.all_gather_rows)
    return made


class Case(NamedTuple):
    deployment: Deployment
    lora: LoraSpec = LORA
    sharding: LoraSharding = "fold"

    def slab(self, rank: int) -> SlabLayout:
        replica = self.deployment.placed(rank)
        tp_rank, pp_rank, _ = replica.place_of(rank)
        layout = replace(replica.layout.parallel_layout(1), lora_sharding=self.sharding)
        return slab_layout(stage_sites(SPEC, layout, tp_rank=tp_rank, pp_rank=pp_rank), self.lora)


def tp_group(deployment: Deployment, rank: int) -> tuple[int, ...]:
    replica = deployment.placed(rank)
    place = replica.place_of(rank)[1:]
    return tuple(r for r in replica.ranks if replica.place_of(r)[1:] == place)


def summed(case: Case, grads: Sequence[torch.Tensor], exchange: Exchange) -> None:
    """Sums every rank's gradient in place, each rank on a thread."""
    deployment = case.deployment

    def run(rank: int) -> None:
        exchange.enter(rank)
        replica = deployment.placed(rank)
        cells = all_cells(deployment, SPEC.num_layers)
        held = tuple(
            (cell, cell.holders if len(cell.holders) > 1 else None)  # type: ignore[arg-type]
            for cell in cells
            if rank in cell.holders
        )
        place = replica.place_of(rank)
        mine = ReplicaCells(deployment.atoms, replica.layout.tp_size, place[0], held)
        group: Any = tp_group(deployment, rank)
        SlabCells(case.slab(rank), mine).sum_over_replicas(grads[rank], group)

    with ThreadPoolExecutor(deployment.world_size) as pool:
        list(pool.map(run, range(deployment.world_size)))


def whole_sums(case: Case, grads: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Places every rank's slab into whole tensors, zeros elsewhere, and sums them."""
    names = factor_names(SPEC, case.lora)
    whole = {name: torch.zeros(factor_shape(SPEC, name, case.lora)) for name in names}
    for rank, grad in enumerate(grads):
        slab = case.slab(rank)
        for factor, view in zip(slab.factors, slab.views(grad), strict=True):
            part = torch.zeros_like(whole[factor.name])
            factor.place(part, view)
            whole[factor.name] += part
    return whole


def drawn_deployment(seed: int) -> Deployment:
    draw = random.Random(seed)
    return Deployment.of(
        ReplicaLayout(
            tp_size=draw.choice(SIZES), pp_size=draw.choice(SIZES), cp_size=draw.choice((1, 1, 2))
        )
        for _ in range(draw.randint(2, 4))
    )


BLOCKS = LoraSpec(rank=8, parametrization="block_diagonal", num_blocks=4)
ALIKE = Deployment.parse("1xTP2+PP2 + 1xTP2+CP2 + 1xTP2@64")
"""Cut alike over TP, so that any sharding is allowed."""
CASES = [
    *(Case(drawn_deployment(seed)) for seed in range(8)),
    *(Case(ALIKE, lora, "s_lora") for lora in (LORA, BLOCKS)),
    Case(ALIKE, BLOCKS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_whole_tensors(case: Case, exchange: Exchange) -> None:
    grads = [
        torch.randint(-9, 10, (case.slab(rank).numel,)).float()
        for rank in range(case.deployment.world_size)
    ]
    expected = whole_sums(case, grads)
    summed(case, grads, exchange)
    for rank, grad in enumerate(grads):
        slab = case.slab(rank)
        for factor, view in zip(slab.factors, slab.views(grad), strict=True):
            part = torch.empty(factor.shape)
            factor.take(expected[factor.name], part)
            assert torch.equal(view, part), f"{factor.name} of rank {rank}"
