"""The CUDA kernels' work lists: each does all the work once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cuda_cases import FUSED_AND_Q, GATE_UP, QKV, WHOLE
from tests.helpers.item_machine import kernel_width
from tests.helpers.kernel_case import make_rows
from tlora_megatron.ops.lora.cuda_work_items import (
    DOWN,
    UP,
    SumInput,
    SumSizes,
    rows_per_run,
    sum_inputs,
    sum_items,
)
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.lora.tiling import (
    PlanTensors,
    RankLayout,
    plan_tensors,
)

CPU = torch.device("cpu")
IN_SIZE = 136
LENGTHS = st.one_of(
    st.just(0), st.integers(1, 40), st.sampled_from([255, 256, 257, 512]), st.integers(1, 1500)
)
RANKS = st.one_of(st.just(0), st.integers(1, 64), st.sampled_from([15, 17, 128, 129, 256]))
fast = settings(max_examples=60, deadline=None)


@st.composite
def plans(draw: st.DrawFn) -> tuple[PlanTensors, tuple[OutputColumns, ...]]:
    columns = draw(st.sampled_from([WHOLE, QKV, GATE_UP, FUSED_AND_Q]))
    ranks = draw(st.lists(st.tuples(*[RANKS] * len(columns)), min_size=1, max_size=6))
    lengths = draw(st.lists(LENGTHS, min_size=len(ranks) + 1, max_size=len(ranks) + 1).filter(sum))
    ends = tuple(itertools.accumulate(lengths))
    return PlanTensors(ends, RankLayout(tuple(ranks)), CPU), columns


def short_runs(
    plan: PlanTensors, columns: tuple[OutputColumns, ...], window: tuple[int, int]
) -> tuple[SumInput, SumInput]:
    """x over a window and dy over all rows, in short runs."""
    out_size = columns[0].groups * columns[0].stride
    all_rows = (0, plan.num_rows)
    return (
        SumInput(kind=DOWN, columns=(), in_columns=IN_SIZE, rows_per_run=256, window=window),
        SumInput(kind=UP, columns=columns, in_columns=out_size, rows_per_run=256, window=all_rows),
    )


@given(plans(), st.data())
@fast
def test_parts_of_sums_lie_apart_and_count_for_themselves(
    made: tuple[PlanTensors, tuple[OutputColumns, ...]], data: st.DataObject
) -> None:
    plan, columns = made
    window = data.draw(st.integers(0, plan.num_rows)), plan.num_rows
    found = sum_items(plan, short_runs(plan, columns, window))
    room = []
    blocks: dict[int, list[np.ndarray]] = {}
    for item in found.items:
        count, part, parts, workspace, counter, kind = (int(item[i]) for i in (6, *range(10, 15)))
        first_row = window[0] if kind == DOWN else 0
        assert first_row <= item[0] < item[1] <= plan.num_rows
        assert 0 <= counter < len(found.items)
        if parts > 1:
            units = kernel_width(count) // 2
            begin = workspace + part * units
            room.append((begin, begin + units))
            blocks.setdefault(counter, []).append(item)
    room.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(room))
    assert sum(end - begin for begin, end in room) == found.workspace
    assert not room or (room[0][0], room[-1][1]) == (0, found.workspace)
    for group in blocks.values():
        assert sorted(item[10] for item in group) == list(range(group[0][11]))
        same = [(*item[4:10], *item[11:15]) for item in group]
        assert same == same[:1] * len(group)


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
    """A slot's items of sums, with rows and arena rows from its own first, and its borders."""
    found = sum_items(plan, short_runs(plan, GATE_UP, (0, plan.num_rows)))
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


@pytest.mark.parametrize("features", [8, 4096, 6144, 14336, 28672, 57344])
@pytest.mark.parametrize("num_rows", [1, 2048, 8192, 16384, 131072])
def test_a_run_is_whole_steps_of_rows(num_rows: int, features: int) -> None:
    size = rows_per_run(num_rows, features, 264)
    assert isinstance(size, int)
    assert size % 64 == 0
    assert 128 <= size <= 4096
    assert size <= rows_per_run(2 * num_rows, features, 264)


def test_sites_with_equal_layouts_share_a_plan() -> None:
    ranks = ((8, 16), (0, 4))
    rows = make_rows((100, 20), 8)
    first = plan_tensors(rows, RankLayout(ranks), CPU)
    assert plan_tensors(rows, RankLayout(ranks), CPU) is first
    assert plan_tensors(rows, RankLayout(ranks[::-1]), CPU) is not first
    assert plan_tensors(make_rows((100, 20), 8), RankLayout(ranks), CPU) is not first
