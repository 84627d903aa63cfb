"""Sizes that kernels support, their tiles, and work lists that hold every row's work once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cuda_cases import FUSED_AND_Q, QKV, WHOLE
from tlora_megatron.ops.lora.cuda_arguments import gemm_tile, is_supported
from tlora_megatron.ops.lora.linear_ops import OutputColumns
from tlora_megatron.ops.lora.tiling import (
    RANK_CHUNK,
    RankLayout,
    portion_borders,
    rank_chunks,
    row_runs,
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
    found = portion_borders(np.array(runs, dtype=np.int64).reshape(len(runs), 6))
    assert found.parts.tolist() == borders
    for run, count, place in zip(runs, found.counts, found.places, strict=True):
        own = [r for r in runs if r.slot == run.slot]
        changes = [b.part for a, b in itertools.pairwise(own) if a.portion != b.portion]
        assert found.parts[place : place + count].tolist() == changes


H100_CLUSTERS = 66


def test_a_gemm_never_has_more_column_tiles_than_the_kernel_counts() -> None:
    for columns in (*range(8, 65_536, 1000), 65_536):
        tile = gemm_tile(8192, columns, H100_CLUSTERS)
        assert -(-columns // tile.columns) <= 256


@pytest.mark.parametrize(
    ("columns", "sizes", "first_column", "supported"),
    [
        (QKV, (512, 136), 0, True),
        (WHOLE, (200, 136), 32, True),
        (FUSED_AND_Q, (512, 136), 0, True),
        (WHOLE, (200, 132), 0, False),
        (WHOLE, (204, 136), 0, False),
        (WHOLE, (200, 136), 16, False),
        ((replace(QKV[0], begin=32),), (512, 136), 0, False),
        ((replace(QKV[0], width=96),), (512, 136), 0, False),
        ((replace(QKV[0], stride=224),), (448, 136), 0, False),
        (QKV[:1] * 4, (512, 136), 0, True),
        (QKV[:1] * 5, (512, 136), 0, False),
        (WHOLE, (65536, 136), 0, True),
        (WHOLE, (65544, 136), 0, False),
        (WHOLE, (200, 65544), 0, False),
    ],
)
def test_is_supported(
    columns: tuple[OutputColumns, ...], sizes: tuple[int, int], first_column: int, supported: bool
) -> None:
    size_out, size_in = sizes
    factors = SimpleNamespace(
        columns=columns,
        size_in=size_in,
        size_out=size_out,
        first_column=first_column,
        is_aligned=True,
    )
    assert is_supported(factors) is supported
    factors.is_aligned = False
    assert not is_supported(factors)
