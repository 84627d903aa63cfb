"""The CUDA kernels' work lists of sums: what neighbours do not change, and their memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cuda_cases import GATE_UP
from tlora_megatron.ops.lora.cuda_work_items import (
    DOWN,
    UP,
    SumInput,
    SumSizes,
    sum_inputs,
    sum_items,
)
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.lora.tiling import PlanTensors, RankLayout

CPU = torch.device("cpu")
RANKS = st.one_of(st.just(0), st.integers(1, 64), st.sampled_from([15, 17, 128, 129, 256]))
fast = settings(max_examples=60, deadline=None)
PORTIONS = st.lists(st.integers(1, 700), min_size=1, max_size=4)


@given(st.tuples(RANKS, RANKS).filter(any), PORTIONS, st.data())
@fast
def test_a_job_s_sums_are_the_same_in_every_packing(
    ranks: tuple[int, int], portions: list[int], data: st.DataObject
) -> None:
    """Neighbours change no rows, parts, portions, places or orders of adding."""
    others = data.draw(st.lists(st.tuples(st.tuples(RANKS, RANKS), PORTIONS), max_size=4))
    place = data.draw(st.integers(0, len(others)))
    packing = [*others[:place], (ranks, portions), *others[place:]]
    beside = plan_of(packing, padding=data.draw(st.integers(0, 300)))
    assert own_sums(beside, place) == own_sums(plan_of([(ranks, portions)], padding=0), 0)


def test_runs_do_not_follow_from_the_targets_of_neighbours() -> None:
    """Columns of q, k and v of a fused linear, whichever of them have adapters."""
    query, key, value = (
        OutputColumns(groups=8, stride=768, begin=begin, width=width)
        for width, begin in ((512, 0), (128, 512), (128, 640))
    )

    def runs(*columns: OutputColumns) -> list[int]:
        sizes = SumSizes(columns, 4096, 6144)
        inputs = sum_inputs(sizes, 8192, 8192, (0, 8192), 132, (DOWN, UP))
        return [each.rows_per_run for each in inputs]

    assert runs(query, value) == runs(key) == runs(query, key, value)


def plan_of(packing: list[tuple[tuple[int, int], list[int]]], padding: int) -> PlanTensors:
    """A plan of slots' ranks and portions."""
    slots = [list(itertools.accumulate(lengths)) for _, lengths in packing]
    ends = list(itertools.accumulate(slot[-1] for slot in slots))
    cuts = [
        end - slot[-1] + inner for slot, end in zip(slots, ends, strict=True) for inner in slot[:-1]
    ]
    layout = RankLayout(tuple(ranks for ranks, _ in packing))
    return PlanTensors((*ends, ends[-1] + padding), layout, CPU, cuts=cuts)


def own_sums(plan: PlanTensors, slot: int) -> list[tuple[object, ...]]:
    """A slot's items of short runs, with rows and arena rows from its own first, and borders."""
    all_rows, out_size = (0, plan.num_rows), GATE_UP[0].groups * GATE_UP[0].stride
    inputs = [
        SumInput(kind=DOWN, columns=(), in_columns=136, rows_per_run=256, window=all_rows),
        SumInput(kind=UP, columns=GATE_UP, in_columns=out_size, rows_per_run=256, window=all_rows),
    ]
    found = sum_items(plan, inputs)
    begin, arena = (0, *plan.ends)[slot], plan.layout.a_begin[slot][0]
    own = []
    for item in found.items.tolist():
        if item[9] != slot:
            continue
        counter, borders = item[13], found.borders.tolist()
        several = item[11] > 1 and borders
        inner = borders[slice(*borders[2 * counter : 2 * counter + 2])] if several else []
        rows = item[0] - begin, item[1] - begin
        own.append((*rows, *item[2:8], item[8] - arena, *item[10:12], item[14], tuple(inner)))
    return sorted(own)


@pytest.mark.parametrize("slots", [1, 8, 1024])
def test_workspace_does_not_grow_with_the_number_of_adapters(slots: int) -> None:
    """Of segments with several runs there are few; the others keep no parts."""
    ends = tuple(8192 * (i + 1) // slots for i in range(slots))
    plan = PlanTensors((*ends, 8192), RankLayout(((16,),) * slots), CPU)
    whole = SumInput(kind=DOWN, columns=(), in_columns=28672, rows_per_run=4096, window=(0, 8192))
    assert sum_items(plan, [whole]).workspace <= 5 * 224 * 8
