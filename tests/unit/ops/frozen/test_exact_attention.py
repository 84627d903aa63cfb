"""Calls of attention's backward pass: a document's class, splits and gradients are its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen import packed_attention
from tlora_megatron.ops.frozen.exact_attention import (
    DocumentRun,
    backward_calls,
    backward_in_calls,
    deterministic_kernels,
    document_runs,
    num_empty_documents,
    num_parts,
)
from tlora_megatron.ops.frozen.packed_attention import attend_spans
from tlora_megatron.ops.routing.segments import Document, pack_micro_batch

LONG = 20
LENGTHS = st.lists(st.integers(1, 2 * LONG), max_size=12)


def splits(run: DocumentRun, heads: int, multiprocessors: int) -> int:
    """Parts in which the kernel sums a query's gradient, by its own formula."""
    documents = len(run.lengths) + num_empty_documents(run, heads, multiprocessors, LONG)
    return num_parts(documents, heads, multiprocessors)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 2 * LONG), st.sampled_from([1, 4, 16, 32, 200]))
def test_the_splits_of_a_document_follow_from_its_length(
    before: list[int], after: list[int], own: int, heads: int
) -> None:
    alone = document_runs([own], [False], LONG)
    lengths = [*before, own, *after]
    runs = document_runs(lengths, [False] * len(lengths), LONG)
    first = sum(before)
    mine = next(run for run in runs if run.begin <= first < run.end)
    assert splits(mine, heads, 132) == splits(alone[0], heads, 132)
    if own > LONG:
        assert mine == DocumentRun(first, (own,))
    else:
        assert splits(mine, heads, 132) == 1
    assert [n for run in runs for n in run.lengths] == lengths


@pytest.mark.parametrize(
    ("heads", "parts"), [(32, 3), (16, 5), (8, 9), (4, 33), (128, 1), (1, 132), (200, 1)]
)
def test_a_long_document_is_divided_for_the_fewest_waves(heads: int, parts: int) -> None:
    assert splits(DocumentRun(0, (LONG + 1,)), heads, 132) == parts


def test_padding_is_in_no_call() -> None:
    runs = document_runs([5, 30, 7, 8, 64], [False] * 4 + [True], LONG)
    assert runs == (DocumentRun(0, (5,)), DocumentRun(5, (30,)), DocumentRun(35, (7, 8)))
    assert document_runs([64], [True], LONG) == ()


def reference_kernel(
    dout: Tensor, saved: Sequence[Tensor], cumulative: Tensor, longest: int
) -> tuple[Tensor, ...]:
    """Gradients of the documents that `cumulative` names, NaN in rows of none."""
    q, k, v, out, lse = saved
    assert out.shape == q.shape
    assert lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()
    begins = cumulative.tolist()
    lengths = [b - a for a, b in itertools.pairwise(begins)]
    assert max(lengths) == longest
    used = [x[: begins[-1]].detach().requires_grad_() for x in (q, k, v)]
    view = pack_micro_batch(
        [Document(slot=0, length=n) for n in lengths if n], num_slots=1, num_tokens=begins[-1]
    )
    result = attend_spans(*used, view, 0.5)
    grads = torch.autograd.grad(result, used, dout[: begins[-1]])
    whole = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    for into, grad in zip(whole, grads, strict=True):
        into[: begins[-1]] = grad
    return whole


@pytest.mark.parametrize("lengths", [(5, 7, 9), (5, 30, 7, 8, 22), (30,)], ids=str)
@pytest.mark.parametrize("padding", [0, 13])
def test_gradients_of_all_calls_are_those_of_one(
    lengths: tuple[int, ...], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132),
    )
    total, heads = sum(lengths) + padding, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(total, n, 8, generator=generator, dtype=torch.float64)
        for n in (heads, 2, 2, heads)
    )
    dout[sum(lengths) :] = 0  # padding has no loss
    view = pack_micro_batch(
        [Document(slot=0, length=n) for n in lengths], num_slots=1, num_tokens=total
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend_spans(*leaves, view, 0.5)
    expected = torch.autograd.grad(out, leaves, dout)
    runs = document_runs(view.attention.q_lens, [d.slot == 1 for d in view.documents], LONG)
    calls = backward_calls(runs, heads, LONG, torch.device("cpu"))
    saved = (q, k, v, out.detach(), torch.zeros(heads, total))
    found = backward_in_calls(dout, saved, calls, reference_kernel)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_a_micro_batch_has_its_calls_only_where_it_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132),
    )
    q = torch.zeros(4, 16, 8)
    documents = [Document(slot=0, length=1)] * 3
    for exactness in (None, Exactness()):
        view = pack_micro_batch(documents, num_slots=1, num_tokens=4, exactness=exactness)
        lengths = packed_attention._lengths(view, q)
        if exactness is None:
            assert lengths.backward_calls is None
            assert lengths.max_queries == 1
            continue
        assert lengths.backward_calls is not None
        (call,) = lengths.backward_calls
        assert call.cumulative.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3]
        assert (call.begin, call.end, lengths.max_queries, lengths.max_keys) == (0, 3, 2, 2)


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_what_the_process_asked_for_comes_back(mode: bool, warn_only: bool) -> None:
    """`warn_only`, which tests of trainers set, would leave atomics in place."""
    enabled = torch.are_deterministic_algorithms_enabled
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    before = enabled(), only_warns()
    try:
        with deterministic_kernels():
            assert (enabled(), only_warns()) == (True, False)
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert (enabled(), only_warns()) == before
        assert torch.utils.deterministic.fill_uninitialized_memory is fills
    finally:
        torch.use_deterministic_algorithms(False)
