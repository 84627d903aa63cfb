"""Worker: one linear under each LoRA sharding, in one layout, against its definition and fold.

Arguments: variants `tp=2` or `tp=2,sp=1`, all over this world. Every rank holds its part of the
same whole tensors; what comes back is joined and compared by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.black_box_worker import (
    LENGTHS,
    LORAS,
    Linear,
    Making,
    in_each_layout,
    relative,
)
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.parallel.groups import ParallelGroups

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
SHARDINGS: tuple[LoraSharding, ...] = get_args(LoraSharding)
MIXED = (
    LoraSpec(rank=5, alpha=8, target_modules=("q_proj", "o_proj", "up_proj", "down_proj")),
    LoraSpec(rank=4, dropout=0.3, parametrization="block_diagonal", num_blocks=2),
    LoraSpec(rank=1, alpha=3, use_rslora=True),
    LoraSpec(rank=8, alpha=5, parametrization="block_diagonal", num_blocks=4),
)
"""Block-diagonal jobs beside standard ones, one of which has fewer rank rows than TP has ranks."""
ONLY_BLOCKS = tuple(replace(lora, parametrization="block_diagonal", num_blocks=2, rank=4, alpha=4)
                    for lora in MIXED)  # fmt: skip
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2}


def check(linear: Linear, sharding: LoraSharding) -> None:
    """Against the fp64 definition, then against fold with block-diagonal jobs beside."""
    found, expected = linear.well(LORAS, sharding), linear.definition()
    assert found.keys() == expected.keys()
    compare(linear, f"{sharding} and the definition", found, expected)
    for loras, what in ((MIXED, "mixed"), (ONLY_BLOCKS, "blocks only")):
        pair = linear.well(loras, sharding), linear.well(loras, "fold")
        compare(linear, f"{sharding} and fold, {what}", *pair)


def compare(
    linear: Linear, what: str, found: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    errors = {name: relative(found[name], expected[name].double()) for name in found}
    worst = max(errors, key=errors.__getitem__)
    if dist.get_rank() == 0:
        print(f"{linear.making} {linear.dtype}: {what}: {worst} is off by {errors[worst]:.1e}")
    assert errors[worst] < TOLERANCE[linear.dtype], f"{linear.making} {what}: {errors}"


def check_isolation(linear: Linear, sharding: LoraSharding) -> None:
    """NaN in one job's rows, forward and backward, leaves all others' bits as they are."""
    begin = LENGTHS[0]
    rows = slice(begin, begin + LENGTHS[1])
    case = linear.case
    sick = case._replace(x=case.x.clone(), dy=case.dy.clone())
    sick.x[rows], sick.dy[rows] = torch.nan, torch.nan
    for loras in (LORAS, MIXED):
        well, ill = linear.well(loras, sharding), linear.run(loras, sharding, sick)
        own = [name for name in well if name.startswith("1:")]
        assert all(ill[name].isnan().any() for name in own)
        for name in well.keys() - {*own, "y", "dx"}:
            assert torch.equal(well[name], ill[name]), f"{linear.making.linear} {sharding} {name}"
        for name, taken in (("y", linear.cut.y), ("dx", linear.cut.x)):
            others = torch.ones(len(case.x), dtype=torch.bool)
            others[rows] = False
            others = others[taken[0]]
            assert torch.equal(well[name][others], ill[name][others]), f"{sharding} {name}"


def check_all(variant: str, groups: ParallelGroups) -> None:
    for name in LINEARS:
        making = Making("own", name, bias=name in ("linear_proj", "linear_fc1"))
        linear = Linear(making, groups)
        for sharding in SHARDINGS:
            check(linear, sharding)
            check_isolation(linear, sharding)
        linear = Linear(making, groups, torch.bfloat16)
        for sharding in SHARDINGS[1:]:
            pair = linear.well(MIXED, sharding), linear.well(MIXED, "fold")
            compare(linear, f"{variant}: {sharding} and fold", *pair)


if __name__ == "__main__":
    in_each_layout(check_all)
