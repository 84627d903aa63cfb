"""Cuts into nano-batches: by hand, against brute force, and what a document costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.layout_sites import SPEC
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.ops.routing import Document
from tlora_megatron.parallel.nano_cuts import RowCosts, balanced_cuts


@pytest.mark.parametrize(
    ("costs", "jobs", "parts", "cuts"),
    [
        ([4, 4, 4, 4], [0, 1, 2, 3], 2, (0, 2, 4)),
        ([4, 4, 4, 4], [0, 1, 2, 3], 4, (0, 1, 2, 3, 4)),
        ([4, 4, 4, 4], [0, 1, 2, 3], 1, (0, 4)),
        # The job's border costs 1/16 more than the even cut: taken.
        ([4, 4, 4, 4.5, 4, 4, 4, 3.5], [0, 0, 0, 1, 1, 1, 1, 1], 2, (0, 4, 8)),
        ([8, 1, 7.5, 7.5], [0, 1, 1, 1], 2, (0, 1, 4)),
        ([4, 4, 1, 7.5], [0, 0, 1, 1], 2, (0, 2, 4)),
        # Jobs of 12 and 4: a cut between them is half as much again as an even one.
        ([4, 4, 4, 4], [0, 0, 0, 1], 2, (0, 2, 4)),
        # One long document: more parts make it no shorter, and no cut beside a little rest.
        ([90, 10, 10, 10], [0, 1, 1, 2], 4, (0, 1, 4)),
        ([20, 90, 20], [0, 0, 0], 3, (0, 1, 2, 3)),
        ([1, 90, 1], [0, 0, 0], 3, (0, 3)),
        # 10 % more than the least largest part, two parts instead of three.
        ([10, 1, 9], [0, 1, 2], 3, (0, 1, 3)),
        ([5], [0], 3, (0, 1)),
        ([], [], 3, (0,)),
    ],
)
def test_by_hand(costs: list[float], jobs: list[int], parts: int, cuts: tuple[int, ...]) -> None:
    assert balanced_cuts(costs, jobs, parts) == cuts


def test_refuses_no_parts() -> None:
    with pytest.raises(ValueError, match="num_parts must be at least 1, got 0"):
        balanced_cuts([1.0], [0], 0)


def _largest(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[begin:end]) for begin, end in itertools.pairwise(cuts))


def _brute_force(costs: list[float], num_parts: int) -> float:
    inner = range(1, len(costs))
    return min(
        _largest(costs, (0, *cut, len(costs)))
        for count in range(min(num_parts, len(costs)))
        for cut in itertools.combinations(inner, count)
    )


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.floats(0.01, 100), st.booleans()), min_size=1, max_size=9),
    num_parts=st.integers(1, 5),
    tolerance=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_properties_against_brute_force(
    lengths: list[tuple[float, bool]], num_parts: int, tolerance: float
) -> None:
    costs = [cost for cost, _ in lengths]
    jobs = list(itertools.accumulate(int(new) for _, new in lengths))
    cuts = balanced_cuts(costs, jobs, num_parts, tolerance=tolerance)
    assert cuts[0] == 0
    assert cuts[-1] == len(costs)
    assert all(begin < end for begin, end in itertools.pairwise(cuts))
    assert len(cuts) - 1 <= num_parts
    limit = _brute_force(costs, num_parts) * (1 + tolerance)
    assert _largest(costs, cuts) <= limit * (1 + 1e-9)
    if len(cuts) > 2:
        fewer = _brute_force(costs, len(cuts) - 2)
        assert fewer > limit * (1 - 1e-6), "fewer parts keep within the tolerance too"


def test_cost_of_a_document() -> None:
    costs = RowCosts(row=100.0, pair=2.0, adapters=(7.0, 0.0))
    assert costs.document(0, 10) == 10 * 107 + 2 * 55
    assert costs.document(1, 10) == 10 * 100 + 2 * 55
    assert costs.document(2, 10) == 10 * 100 + 2 * 55  # padding


def test_rank_and_targets_make_a_job_dearer() -> None:
    loras = [
        LoraSpec(rank=4),
        LoraSpec(rank=16),
        LoraSpec(rank=17),
        LoraSpec(rank=16, target_modules=("q_proj", "v_proj")),
    ]
    costs = RowCosts.of(SPEC, loras)
    shapes = [SPEC.target_shape(target) for target in loras[0].target_modules]
    assert costs.row == 2 * sum(columns * inner for columns, inner in shapes)
    assert costs.adapters[0] == costs.adapters[1] == 16 * sum(map(sum, shapes))
    assert costs.adapters[2] == 2 * costs.adapters[1]
    narrow = sum(sum(SPEC.target_shape(target)) for target in ("q_proj", "v_proj"))
    assert costs.adapters[3] == 16 * narrow


def test_a_dear_job_gets_fewer_documents_a_part() -> None:
    costs = RowCosts(row=10.0, pair=0.0, adapters=(30.0, 0.0))
    documents = [Document(slot=0, length=8)] * 4 + [Document(slot=1, length=8)] * 8
    assert costs.cut(documents, 2) == (0, 3, 12)
    equal = RowCosts(row=10.0, pair=0.0, adapters=(0.0, 0.0))
    assert equal.cut(documents, 2) == (0, 6, 12)
