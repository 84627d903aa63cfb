"""Slabs: shards of all ranks join to the whole adapter, for every target and layout."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.layout_sites import SPEC, join_shards, sites_of_ranks
from tests.helpers.tiny_models import random_factors
from tlora_megatron.config.job import HF_TARGETS, MEGATRON_TARGETS, LoraSpec
from tlora_megatron.layers.slab import (
    AdapterSlab,
    Copier,
    Fill,
    factor_names,
    factor_shape,
    initial_factor,
)
from tlora_megatron.layers.slab_layout import slab_layout

TARGETS = {
    **{target: (target,) for target in (*HF_TARGETS, *MEGATRON_TARGETS)},
    "all of Hugging Face": HF_TARGETS,
    "all of Megatron": MEGATRON_TARGETS,
    "mixed": ("down_proj", "linear_qkv", "gate_proj", "o_proj"),
}
SIZES = (1, 2, 4)


@pytest.mark.parametrize("pp_size", [1, 4])
@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("targets", TARGETS)
def test_shards_join_to_the_whole(targets: str, tp_size: int, pp_size: int) -> None:
    lora = LoraSpec(rank=5, target_modules=TARGETS[targets])
    factors = random_factors(SPEC, lora)
    layouts = [slab_layout(sites, lora) for sites in sites_of_ranks(SPEC, tp_size, pp_size)]
    join_shards(layouts, factors, SPEC)


def test_parts_that_are_copied_one_by_one_make_the_same_buffer() -> None:
    lora = LoraSpec(rank=5, target_modules=TARGETS["mixed"])
    factors, copied = random_factors(SPEC, lora), list[int]()

    def copy(target: torch.Tensor, fill: Fill) -> None:
        values = torch.full_like(target, torch.nan)
        fill(values)
        target.copy_(values)
        copied.append(values.numel())

    layouts = [slab_layout(sites, lora) for sites in sites_of_ranks(SPEC, 2)]
    for expected in join_shards(layouts, factors, SPEC):
        slab = AdapterSlab(expected.layout, torch.device("cpu"))
        slab.load(factors.__getitem__, "exp_avg", Copier(copy, threads=2, numel=400))
        assert torch.equal(slab.exp_avg, expected.master)
    assert sum(copied) == 2 * expected.layout.numel
    assert max(copied) <= 400, "several factors share a copy"
    assert len(copied) < 2 * len(expected.layout.factors)


def test_fresh_factors_follow_from_seed_and_name() -> None:
    lora = LoraSpec(rank=6, target_modules=TARGETS["mixed"])
    factors = {name: initial_factor(SPEC, name, lora, 3) for name in factor_names(SPEC, lora)}
    for name, factor in factors.items():
        assert tuple(factor.shape) == factor_shape(SPEC, name, lora)
        assert torch.equal(factor, initial_factor(SPEC, name, lora, 3))
        if name.endswith("lora_b"):
            assert not factor.any()
            continue
        # As PEFT: kaiming_uniform_ with a = sqrt(5).
        bound = math.sqrt(6 / ((1 + 5) * factor.shape[1]))
        assert 0.8 * bound < factor.abs().max() <= bound
        assert abs(factor.mean()) < 0.2 * bound
        assert not torch.equal(factor, initial_factor(SPEC, name, lora, 4))
    first = {float(factor[0, 0]) for name, factor in factors.items() if name.endswith("lora_a")}
    assert len(first) == len(factors) // 2
