"""Routing: what ranks hold, joined, is the packed order; attention by brute force; sums of runs."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.interpreter import DEVICE, RUNS
from tlora_megatron.ops.routing import (
    Document,
    MicroBatchView,
    bind_current,
    current_micro_batch,
    pack_micro_batch,
    use_micro_batch,
)

CPU = torch.device("cpu")
DOCUMENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 13), st.integers(0, 50)), max_size=7
).map(lambda raw: [Document(slot=s, length=n, first_token=f) for s, n, f in sorted(raw)])
CP_SIZES = st.sampled_from([1, 2, 4])
NUM_SLOTS = 4
fast = settings(max_examples=60, deadline=None)


def views_of(documents: list[Document], cp_size: int) -> list[MicroBatchView]:
    """All context-parallel ranks' views, padded to whole sixteens."""
    used = sum(d.length for d in documents)
    num_tokens = -(-max(used, 1) // 16) * 16
    return [
        pack_micro_batch(
            documents,
            num_slots=NUM_SLOTS,
            num_tokens=num_tokens,
            dropout_keys=(11, 12, 13, 14),
            cp_rank=cp_rank,
            cp_size=cp_size,
        )
        for cp_rank in range(cp_size)
    ]


def packed_rows(view: MicroBatchView) -> list[tuple[int, int, int, int]]:
    """By definition, (document's first row, position in it, slot, token index) of packed rows."""
    rows = []
    for document in view.documents:
        begin = len(rows)
        rows += [
            (begin, position, document.slot, document.first_token + position)
            for position in range(document.length)
        ]
    return rows


@given(DOCUMENTS, CP_SIZES)
@fast
def test_ranks_joined_give_the_packed_order(documents: list[Document], cp_size: int) -> None:
    views = views_of(documents, cp_size)
    whole = packed_rows(views[0])
    held = torch.cat([view.local_rows() for view in views])
    assert sorted(held.tolist()) == list(range(len(whole)))
    assert {view.num_tokens for view in views} == {len(whole) // cp_size}
    for view in views:
        order = view.packed_order(CPU)
        joined = held if order is None else held[order]
        assert joined.tolist() == list(range(len(whole)))


@given(DOCUMENTS, CP_SIZES)
@fast
def test_rows_know_their_position_slot_and_token(documents: list[Document], cp_size: int) -> None:
    for view in views_of(documents, cp_size):
        whole = packed_rows(view)
        expected = [whole[row] for row in view.local_rows().tolist()]
        assert view.positions(CPU).tolist() == [position for _, position, _, _ in expected]
        assert view.rows.row_slots(CPU).tolist() == [slot for _, _, slot, _ in expected]
        assert view.rows.token_index.tolist() == [token for _, _, _, token in expected]


@given(DOCUMENTS, CP_SIZES)
@fast
def test_attention_spans_by_brute_force(documents: list[Document], cp_size: int) -> None:
    for view in views_of(documents, cp_size):
        whole = packed_rows(view)
        seen = []
        for q_len, k_begin, k_len in zip(*view.attention, strict=True):
            last_keys = range(k_len - q_len + 1, k_len + 1)
            seen += [list(range(k_begin, k_begin + last)) for last in last_keys]
        for row, keys in zip(view.local_rows().tolist(), seen, strict=True):
            document_begin = whole[row][0]
            assert keys == list(range(document_begin, row + 1))


@given(DOCUMENTS)
@fast
def test_a_row_s_key_follows_from_job_and_token_alone(documents: list[Document]) -> None:
    keys: dict[tuple[int, int], int] = {}
    for cp_size in (1, 2, 4):
        for view in views_of(documents, cp_size):
            rows = view.rows
            pairs = zip(rows.row_slots(CPU).tolist(), rows.token_index.tolist(), strict=True)
            for pair, key in zip(pairs, rows.row_keys(CPU).tolist(), strict=True):
                if pair[0] < NUM_SLOTS:
                    assert keys.setdefault(pair, key) == key
    assert len(set(keys.values())) == len(keys)


def test_context_parallel_ranks_share_causal_attention_evenly() -> None:
    views = views_of([Document(slot=0, length=64)], 4)
    pairs = [
        sum(q * k - q * (q - 1) // 2 for q, _, k in zip(*view.attention, strict=True))
        for view in views
    ]
    assert sum(pairs) == 64 * 65 // 2
    assert len(set(pairs)) == 1


@pytest.mark.parametrize(
    ("documents", "options", "match"),
    [
        ([(1, 2), (0, 2)], {}, r"documents must be in ascending order of slot, got \[1, 0\]"),
        ([(0, 9)], {}, r"documents must fit into num_tokens=8, got 9 tokens"),
        ([(0, 2)], {"num_tokens": 6, "cp_size": 2}, r"num_tokens must be a multiple of 4, got 6"),
        ([(0, 2)], {"token_budget": 7}, r"num_tokens must be at most token_budget=7, got 8"),
    ],
)
def test_refusals(documents: list[tuple[int, int]], options: dict[str, int], match: str) -> None:
    packed = [Document(slot=slot, length=length) for slot, length in documents]
    with pytest.raises(ValueError, match=match):
        pack_micro_batch(packed, **{"num_slots": 2, "num_tokens": 8, **options})


def test_the_bound_micro_batch_nests_and_ends_with_its_block() -> None:
    first, second = (views_of([Document(slot=s, length=4)], 1)[0] for s in (0, 1))
    assert current_micro_batch() is None
    with use_micro_batch(first):
        with use_micro_batch(second):
            assert current_micro_batch() is second
        assert current_micro_batch() is first
        with pytest.raises(KeyError), use_micro_batch(second):
            raise KeyError
        assert current_micro_batch() is first
    assert current_micro_batch() is None


def test_a_bound_function_sees_the_micro_batch_of_its_making() -> None:
    first, second = (views_of([Document(slot=s, length=4)], 1)[0] for s in (0, 1))
    with use_micro_batch(first):
        recompute = bind_current(lambda extra: (current_micro_batch(), extra))
    assert recompute(1) == (first, 1)
    with use_micro_batch(second):
        assert recompute(2) == (first, 2)
        assert current_micro_batch() is second


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8),
        ({"token_budget": 20}, 20),
        ({"token_budget": 20, "cp_size": 2}, 10),
        ({"token_budget": 20, "num_parts": 3}, 7),
    ],
)
def test_kernels_are_cut_for_the_budget_of_the_run(options: dict[str, int], expected: int) -> None:
    view = pack_micro_batch([Document(slot=0, length=3)], num_slots=1, num_tokens=8, **options)
    assert view.rows.row_budget == expected


@RUNS
@pytest.mark.parametrize("first", [0, 1, 333])
def test_the_kernel_adds_a_run_in_an_order_of_its_own(first: int) -> None:
    module = importlib.import_module("tlora_megatron.ops.frozen.cross_entropy_triton")
    generator = torch.Generator().manual_seed(0)
    own = torch.rand(2500, generator=generator)
    values = torch.cat([torch.rand(first, generator=generator), own, torch.tensor([torch.nan])])
    ends = torch.tensor([first, first + 2500, first + 2500, first + 2501])
    sums = module.launch_segment_sums(values.to(DEVICE), ends.to(DEVICE))
    alone = module.launch_segment_sums(own.to(DEVICE), torch.tensor([2500], device=DEVICE))
    assert torch.equal(sums[1], alone[0])
    assert sums[1].item() == pytest.approx(own.double().sum().item(), rel=1e-7)
    assert sums[2].item() == 0
    assert sums[3].isnan()
