"""A bank that keeps room: the same arenas as one that is filled anew, whoever comes and goes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.helpers.layout_sites import SPEC, sites_of_ranks
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank, BankShape
from tlora_megatron.ops.lora.linear_ops import SiteFactors

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
CPU = torch.device("cpu")


def shape(kept_ranks: int) -> BankShape:
    return BankShape(targets=frozenset(TARGETS), kept_ranks=kept_ranks)


def tables(bank: AdapterBank) -> list[dict[int, SiteFactors]]:
    return [bank.fused_factors, bank.s_lora_a_factors, bank.block_diagonal_factors]


def assert_same(found: AdapterBank, expected: AdapterBank) -> None:
    for ours, theirs in zip(tables(found), tables(expected), strict=True):
        assert ours.keys() == theirs.keys()
        for one, other in zip(ours.values(), theirs.values(), strict=True):
            assert one.layout == other.layout
            assert torch.equal(one.lora_a, other.lora_a)
            assert all(map(torch.equal, one.lora_b, other.lora_b))
            assert one.is_aligned == other.is_aligned
            for a, b in ((one.grad_a, other.grad_a), (one.grad_b, other.grad_b)):
                addresses = [
                    [[None if g is None else g.data_ptr() for g in slot] for slot in grads]
                    for grads in (a, b)
                ]
                assert addresses[0] == addresses[1]


@pytest.mark.parametrize("sharding", ["fold", "s_lora", "rank_exchange"])
@pytest.mark.parametrize("kept_ranks", [8, 64])
def test_kept_room_holds_what_new_arenas_would(sharding: str, kept_ranks: int) -> None:
    sites = [replace(site, lora_sharding=sharding) for site in sites_of_ranks(SPEC, 2)[1]]
    kept = AdapterBank(sites, shape(kept_ranks), dtype=torch.bfloat16, device=CPU)
    draw = random.Random(kept_ranks)
    present: list[Adapter] = []
    for number in range(20):
        if present and draw.random() < 0.4:
            present.pop(draw.randrange(len(present)))
        else:
            targets = tuple(draw.sample(TARGETS, draw.randint(1, len(TARGETS))))
            lora = LoraSpec(rank=draw.choice([2, 4, 20]), target_modules=targets)
            slab = kept.new_slab(lora)
            slab.master.normal_()
            present.append(Adapter(name=str(number), lora=lora, slab=slab))
        kept.install(present)
        anew = AdapterBank(sites, shape(0), dtype=torch.bfloat16, device=CPU)
        anew.install(present)
        assert_same(kept, anew)
        for slot, adapter in enumerate(present):
            adapter.slab.master.mul_(2)
            kept.refresh(slot)
            anew.refresh(slot)
        assert_same(kept, anew)


def test_a_job_outside_the_shape_is_refused() -> None:
    block = LoraSpec(
        rank=4, target_modules=("q_proj",), parametrization="block_diagonal", num_blocks=2
    )
    shape(0).check_holds("a", LoraSpec(target_modules=("q_proj",)))
    with pytest.raises(ValueError, match=r"job 'a' must be among .*, got up_proj; it holds"):
        shape(0).check_holds("a", LoraSpec(target_modules=("q_proj", "up_proj")))
    with pytest.raises(ValueError, match=r"holds block_diagonal adapters on nothing"):
        shape(0).check_holds("a", block)
