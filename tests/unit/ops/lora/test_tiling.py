"""Work lists of the fused kernels: every row's work stands in them exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_megatron.ops.lora.tiling import (
    RANK_CHUNK,
    ROW_TILE,
    RankLayout,
    max_chunks,
    portion_borders,
    rank_chunks,
    row_runs,
    run_table,
    tile_plan,
)

Case = tuple[tuple[int, ...], RankLayout]
LENGTHS = st.one_of(
    st.just(0), st.integers(1, 40), st.sampled_from([255, 256, 257, 512]), st.integers(1, 1500)
)
RANKS = st.one_of(st.just(0), st.integers(1, 64), st.sampled_from([15, 16, 17, 256]))
fast = settings(max_examples=100, deadline=None)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Segments' ends with the null slot's last, and a layout of 0-6 slots and 1-3 targets."""
    num_targets = draw(st.integers(1, 3))
    ranks = draw(st.lists(st.tuples(*[RANKS] * num_targets), max_size=6))
    lengths = draw(st.lists(LENGTHS, min_size=len(ranks) + 1, max_size=len(ranks) + 1).filter(sum))
    return tuple(itertools.accumulate(lengths)), RankLayout(ranks=tuple(ranks))


def segments(ends: tuple[int, ...]) -> list[range]:
    """Rows of every slot, the null slot left out."""
    return [range(b, e) for b, e in itertools.pairwise((0, *ends[:-1]))]


@given(cases())
@fast
def test_arenas_hold_each_factor_once_without_gaps(case: Case) -> None:
    _, layout = case
    rows_a: list[int] = []
    rows_b: list[list[int]] = [[] for _ in range(layout.num_targets)]
    for slot, ranks in enumerate(layout.ranks):
        for target, rank in enumerate(ranks):
            room = RANK_CHUNK * rank_chunks(rank)
            assert rank <= room < rank + RANK_CHUNK
            rows_a += range(layout.a_begin[slot][target], layout.a_begin[slot][target] + room)
            begin = layout.b_begin[slot][target]
            rows_b[target] += range(begin, begin + room)
    assert rows_a == list(range(layout.a_rows))
    assert rows_b == [list(range(rows)) for rows in layout.b_rows] or not layout.ranks


@given(cases())
@fast
def test_a_row_with_an_adapter_lies_in_one_pair(case: Case) -> None:
    ends, layout = case
    plan = tile_plan(ends, layout)
    rows = [(pair.slot, row) for pair in plan.pairs for row in range(pair.begin, pair.end)]
    expected = [
        (slot, row)
        for slot, segment in enumerate(segments(ends))
        if any(layout.ranks[slot])
        for row in segment
    ]
    assert rows == expected
    for pair in plan.pairs:
        assert pair.begin // ROW_TILE == (pair.end - 1) // ROW_TILE == pair.tile
    assert list(plan.pairs) == sorted(plan.pairs)


@given(cases(), st.sampled_from([16, 64, 300, 512]), st.integers(1, 4))
@fast
def test_runs_cover_each_segment_s_window_once(case: Case, rows: int, parts: int) -> None:
    ends, layout = case
    bounds = [ends[-1] * i // parts for i in range(parts + 1)]
    seen: list[tuple[int, int]] = []
    for window in itertools.pairwise(bounds):
        runs = row_runs(ends, layout, rows, window)
        for slot, of_slot in itertools.groupby(runs, key=lambda run: run.slot):
            own = list(of_slot)
            assert [run.part for run in own] == list(range(len(own)))
            assert {run.parts for run in own} == {len(own)}
            for left, right in itertools.pairwise(own):
                assert left.end == right.begin
                assert (right.begin - segments(ends)[slot].start) % rows == 0
        for run in runs:
            assert window[0] <= run.begin < run.end <= window[1]
            assert run.end - run.begin <= rows
        seen += [(run.slot, row) for run in runs for row in range(run.begin, run.end)]
    expected = [
        (slot, row)
        for slot, segment in enumerate(segments(ends))
        if any(layout.ranks[slot])
        for row in segment
    ]
    assert sorted(seen) == expected


@given(cases(), st.data(), st.sampled_from([16, 64, 300]), st.booleans())
@fast
def test_runs_and_borders_of_portions_are_those_of_each_alone(
    case: Case, data: st.DataObject, rows: int, in_window: bool
) -> None:
    ends, layout = case
    inside = [row for segment in segments(ends) for row in segment[1:]]
    cuts = sorted(set(data.draw(st.lists(st.sampled_from(inside), max_size=9)))) if inside else []
    window = (ends[-1] // 3, 2 * ends[-1] // 3) if in_window else (0, ends[-1])
    runs = row_runs(ends, layout, rows, window, cuts)
    expected: list[tuple[int, ...]] = []
    borders: list[int] = []
    for slot, segment in enumerate(segments(ends)):
        bounds = [segment.start, *(c for c in cuts if c in segment[1:]), segment.stop]
        part = 0
        for begin, end in itertools.pairwise(bounds):
            one = (*[0] * slot, *[end - begin] * (len(ends) - slot))
            alone = row_runs(one, layout, rows, (window[0] - begin, window[1] - begin))
            borders += [part] if part and alone else []
            expected += [
                (slot, begin + run.begin, begin + run.end, part + i) for i, run in enumerate(alone)
            ]
            part += len(alone)
    assert [tuple(run[:4]) for run in runs] == expected
    table = run_table(runs)
    found = portion_borders(table)
    assert found.parts.tolist() == borders
    for run, count, place in zip(runs, found.counts, found.places, strict=True):
        own = [r for r in runs if r.slot == run.slot]
        changes = [b.part for a, b in itertools.pairwise(own) if a.portion != b.portion]
        assert found.parts[place : place + count].tolist() == changes


@given(cases())
@fast
def test_max_chunks_is_never_exceeded(case: Case) -> None:
    ends, layout = case
    assert tile_plan(ends, layout).num_chunks <= max_chunks(ends[-1], layout)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_max_chunks_is_not_far_off(num_slots: int) -> None:
    """Segments of one rank that straddle as many tiles as they can take most of the room."""
    layout = RankLayout(ranks=((16, 64),) * num_slots)
    ends = (*(1 + 513 * (i + 1) for i in range(num_slots)),)
    plan = tile_plan((*ends, ends[-1]), layout)
    assert max_chunks(ends[-1], layout) <= 2 * plan.num_chunks
