"""Exact attention: a document's parts follow from its length alone, the backward in calls has the
gradients of one, and rows of CPU products stay apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.helpers.launch import python
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen import exact_attention, packed_attention
from tlora_megatron.ops.frozen.attention_plan import (
    Classes,
    DocumentRun,
    classes_of,
    document_runs,
    num_parts,
    rows_of_none,
)
from tlora_megatron.ops.frozen.exact_attention import (
    backward_calls,
    backward_in_calls,
    deterministic_kernels,
    run_beside_each_other,
)
from tlora_megatron.ops.frozen.packed_attention import attend_spans
from tlora_megatron.ops.routing import Document, pack_micro_batch

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


def number_a_query(out_TND: Tensor) -> Tensor:
    """Stands for the logarithms `[N, T]` that the forward pass saves."""
    return out_TND.double()[:, :, 0].T.contiguous()


def reference_kernel(
    dout: Tensor, saved: Sequence[Tensor], cumulative: Tensor, longest: int
) -> tuple[Tensor, ...]:
    """Gradients of the documents that `cumulative` names, NaN in rows of none."""
    q, k, v, out, lse = saved
    assert out.shape == q.shape
    assert lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()
    assert torch.equal(lse, number_a_query(out))
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


@pytest.mark.parametrize(
    "lengths", [(5, 7, 9), (5, 30, 7, 8, 22), (30,), (18, 19, 18, 19, 20, 3), (40, 17)], ids=str
)
@pytest.mark.parametrize("padding", [0, 13])
@pytest.mark.parametrize("heads", [(4, 2), (8, 2), (16, 4), (32, 8), (24, 24)], ids=str)
def test_gradients_of_all_calls_are_those_of_one(
    heads: tuple[int, int], lengths: tuple[int, ...], padding: int
) -> None:
    total = sum(lengths) + padding
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(total, n, 4, generator=generator, dtype=torch.float64)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    dout[sum(lengths) :] = 0  # padding has no loss
    view = pack_micro_batch(
        [Document(slot=0, length=n) for n in lengths], num_slots=1, num_tokens=total
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend_spans(*leaves, view, 0.5)
    expected = torch.autograd.grad(out, leaves, dout)
    classes = classes_of(*heads, 132, SHORT, LONG)
    is_padding = [d.slot == 1 for d in view.documents]
    calls = backward_calls(
        view.attention.q_lens, is_padding, heads[0], classes, torch.device("cpu"), total
    )
    saved = (q, k, v, out.detach(), number_a_query(out.detach()))
    found = backward_in_calls(dout, saved, calls, reference_kernel)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_a_micro_batch_has_calls_only_where_it_asks(
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
        lengths = packed_attention._lengths(view, q, 2)
        if exactness is None:
            assert lengths.backward_calls is None
            assert lengths.max_queries == 1
            continue
        assert lengths.backward_calls is not None
        (call,) = lengths.backward_calls.calls
        assert call.cumulative.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3]
        assert (call.begin, call.end, lengths.max_queries, lengths.max_keys) == (0, 3, 2, 2)
        assert lengths.backward_calls.gaps == ((3, 4),)


class Stream:
    """Stands for a stream: keeps what it is told, in one order of all."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def record_event(self) -> str:
        self.told.append(f"{self.name} forks")
        return "fork"

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for CUDA's streams; what they are told is in the list."""
    told: list[str] = []
    main, *sides = (Stream(name, told) for name in ("main", "a", "b", "c"))

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        told.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(exact_attention, "_side_streams", lambda device: tuple(sides))
    return told


def test_works_lie_between_a_fork_and_a_join(told: list[str]) -> None:
    works = [partial(told.append, f"work {index}") for index in range(5)]
    run_beside_each_other(works, torch.device("cuda", 0))
    assert told == [
        "main forks", "a waits for fork", "b waits for fork", "c waits for fork",
        "on main", "work 0", "on a", "work 1", "on b", "work 2", "on c", "work 3",
        "on main", "work 4",
        "main waits for a", "main waits for b", "main waits for c",
    ]  # fmt: skip


def test_streams_join_when_a_work_fails(told: list[str]) -> None:
    """Or memory of the current stream would be given out while another one writes it."""
    works = [partial(told.append, "work 0"), partial(divmod, 1, 0)]
    with pytest.raises(ZeroDivisionError):
        run_beside_each_other(works, torch.device("cuda", 0))
    assert told[-2:] == ["on a", "main waits for a"]


def test_one_work_needs_no_other_stream(told: list[str]) -> None:
    run_beside_each_other([partial(told.append, "work")], torch.device("cuda", 0))
    assert told == ["work"]


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


_PRODUCTS = """
import os
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
from tlora_megatron.ops.exactness import keep_rows_apart
keep_rows_apart()
import torch
for dtype in (torch.bfloat16, torch.float16):
    for inner in (31, 65, 97):
        x = torch.randn(64, inner).to(dtype)
        x[32] = float("nan")
        finite = (x @ torch.randn(inner, 32).to(dtype)).isfinite().all(dim=1)
        assert finite.sum() == 63, (dtype, inner, finite.logical_not().nonzero().flatten())
"""


@pytest.mark.slow
def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    python("-c", _PRODUCTS)
