"""Classes of documents of exact attention: a document's parts follow from its length alone."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tlora_megatron.ops.frozen.attention_plan import (
    Classes,
    DocumentRun,
    classes_of,
    document_runs,
    long_shape,
    num_parts,
    rows_of_none,
)

SHORT, LONG = 16, 20
LENGTHS = st.lists(st.integers(1, 2 * LONG), max_size=12)
HEADS = st.sampled_from([(1, 1), (4, 1), (16, 4), (28, 4), (32, 8), (48, 8), (200, 8)])


def classes(heads: int, key_heads: int) -> Classes:
    return classes_of(heads, key_heads, 132, SHORT, LONG)


def splits(run: DocumentRun, heads: int) -> int:
    """Parts in which the kernel sums a query's gradient, by its own formula."""
    documents = len(run.lengths) * (heads // run.shape.heads)
    return num_parts(max(documents, run.shape.fewest) * run.shape.heads, 132)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 2 * LONG), HEADS)
def test_the_parts_of_a_document_follow_from_its_length(
    before: list[int], after: list[int], own: int, heads: tuple[int, int]
) -> None:
    class_of = classes(*heads).of
    lengths = [*before, own, *after]
    runs = document_runs(lengths, [False] * len(lengths), class_of)
    first = sum(before)
    mine = next(run for run in runs if run.begin <= first < run.end)
    assert splits(mine, heads[0]) == class_of(own).parts
    if own > LONG:
        assert mine == DocumentRun(first, (own,), class_of(own))
    assert [n for run in runs for n in run.lengths] == lengths


@pytest.mark.parametrize(
    ("heads", "parts", "own_heads", "documents"),
    [
        ((32, 8), 4, 8, 5),  # four documents of 8 heads and an empty one: 40 pairs
        ((16, 4), 8, 2, 9),
        ((16, 16), 8, 2, 9),
        ((40, 8), 3, 20, 3),
        ((8, 2), 15, 1, 9),
        ((4, 1), 33, 4, 1),
        ((128, 8), 1, 128, 2),
        ((1, 1), 132, 1, 1),
        ((200, 8), 1, 200, 1),
    ],
)
def test_a_long_document_is_divided_for_the_fewest_waves(
    heads: tuple[int, int], parts: int, own_heads: int, documents: int
) -> None:
    shape = classes(*heads).long
    assert shape[:3] == (parts, own_heads, documents)
    assert parts * heads[0] <= max(132, heads[0]), "blocks that work, at most one a multiprocessor"


def test_other_numbers_of_parts_can_be_asked_for() -> None:
    assert long_shape(32, 8, 132, parts=3)[:3] == (3, 32, 2)
    assert long_shape(32, 8, 132, parts=5)[:3] == (5, 32, 1)


@pytest.mark.parametrize(
    ("heads", "short", "parts", "most"),
    [((32, 8), 16, 2, 4), ((16, 4), 8, 2, 8), ((8, 2), 4, 4, 5), ((4, 1), 2, 7, 5)],
)
def test_few_heads_divide_sooner(heads: tuple[int, int], short: int, parts: int, most: int) -> None:
    found = classes(*heads)
    assert found.short_document == short
    assert (found.middle.parts, found.middle.most) == (parts, most)


def test_many_heads_are_not_divided_below_the_longest_class() -> None:
    found = classes(64, 8)
    assert found.middle == found.short
    runs = document_runs([5, 18, 30, 9], [False] * 4, found.of)
    assert [run.lengths for run in runs] == [(5, 18), (30,), (9,)]


def test_padding_is_in_no_call() -> None:
    class_of = classes(32, 8).of
    lengths = [5, 9, 17, 18, 19, 20, 17, 30, 7, 64]
    runs = document_runs(lengths, [False] * 9 + [True], class_of)
    assert [run.lengths for run in runs] == [(5, 9), (17, 18, 19, 20), (17,), (30,), (7,)]
    assert rows_of_none(runs, 240) == ((142, 240),)
    longest_first = sorted(runs, key=lambda run: -run.block_work)
    assert [run.lengths[0] for run in longest_first] == [30, 17, 17, 5, 7]
    assert rows_of_none(longest_first, 142) == ()
    runs = document_runs([64, 5, 6, 7], [True, False, True, False], class_of)
    assert rows_of_none(runs, 90) == ((0, 64), (69, 75), (82, 90))
    assert document_runs([64], [True], class_of) == ()
    assert rows_of_none((), 64) == ((0, 64),)
