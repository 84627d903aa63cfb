"""The backward pass of flash attention in calls whose bits depend on a document alone.

FlashAttention-2 adds a query's gradient over blocks of keys by atomics, in any order. Its
deterministic kernel adds block j into part `j mod n` and then the parts in order, where
`n = ceil(multiprocessors / (documents * heads))`: who shares the call decides n, too. Here n is a
constant of a document's class, and its length alone decides that:

    length               the call                                                  n
    at most the limit    all neighbours of the class, empty documents appended     1
    longer               one document, empty ones appended                         of fewest waves

Nothing else in the kernels reads the batch. Shapes: T rows, N query heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tlora_megatron.ops.routing.host_copy import to_device

Kernel = Callable[..., tuple[torch.Tensor, ...]]
"""`kernel(dout, saved, cumulative, longest)` returns dq, dk and dv of as many rows as it gets."""


class DocumentRun(NamedTuple):
    """Neighbouring documents that share a call."""

    begin: int
    """First row."""
    lengths: tuple[int, ...]

    @property
    def end(self) -> int:
        """Row behind the last."""
        return self.begin + sum(self.lengths)


class BackwardCall(NamedTuple):
    """One call of the backward kernel."""

    begin: int
    end: int
    cumulative: torch.Tensor
    """int32: begins of the documents, counted from row `begin`, and the end of the last."""
    longest: int


def document_runs(
    lengths: Sequence[int], is_padding: Sequence[bool], long_document: int
) -> tuple[DocumentRun, ...]:
    """Divides a micro-batch's documents into calls; padding, whose gradients are 0, is in none."""
    runs: list[DocumentRun] = []
    begin, is_open = 0, False
    for length, skipped in zip(lengths, is_padding, strict=True):
        is_short = length <= long_document
        if not skipped:
            if is_short and is_open:
                runs[-1] = DocumentRun(runs[-1].begin, (*runs[-1].lengths, length))
            else:
                runs.append(DocumentRun(begin, (length,)))
        is_open = is_short and not skipped
        begin += length
    return tuple(runs)


def num_empty_documents(run: DocumentRun, heads: int, multiprocessors: int, limit: int) -> int:
    """Counts empty documents that give the kernel the number of parts of the run's class.

    They cost next to nothing: their thread blocks end at once.
    """
    if run.lengths[0] > limit:
        return _documents_of_a_long_call(heads, multiprocessors) - 1
    return max(0, -(-multiprocessors // heads) - len(run.lengths))


def num_parts(documents: int, heads: int, multiprocessors: int) -> int:
    """Returns the parts in which the kernel sums a query's gradient, n above."""
    return -(-multiprocessors // (documents * heads))


@functools.cache
def _documents_of_a_long_call(heads: int, multiprocessors: int) -> int:
    """Returns the documents, with empty ones, at which a long one's thread blocks end first.

    A head's n blocks share its work, and a multiprocessor runs one: alone a document of 32 heads
    gets 5 * 32 blocks, two waves on 132 multiprocessors; beside an empty one 3 * 32, one wave.
    """

    def time(documents: int) -> tuple[float, int]:
        parts = num_parts(documents, heads, multiprocessors)
        return -(-parts * heads // multiprocessors) / parts, parts

    return min(range(1, -(-multiprocessors // heads) + 1), key=time)


def backward_calls(
    runs: Sequence[DocumentRun], heads: int, long_document: int, device: torch.device
) -> tuple[BackwardCall, ...]:
    """Returns the calls of a micro-batch on a GPU."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    calls = []
    for run in runs:
        empty = num_empty_documents(run, heads, multiprocessors, long_document)
        begins = torch.tensor((0, *run.lengths, *(0,) * empty)).cumsum(0).to(torch.int32)
        calls.append(BackwardCall(run.begin, run.end, to_device(begins, device), max(run.lengths)))
    return tuple(calls)


def backward_in_calls(
    dout_TND: torch.Tensor,
    saved: Sequence[torch.Tensor],
    calls: Sequence[BackwardCall],
    kernel: Kernel,
) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk and dv of all rows; zeros in those that no call has.

    Args:
        saved: queries, keys, values, the output and a number a head and query, `[N, T]`.
    """
    with deterministic_kernels():
        if len(calls) == 1 and not calls[0].begin:
            # Rows behind the last document are never read: no slices, no copies.
            grads = kernel(dout_TND, saved, calls[0].cumulative, calls[0].longest)
            for grad in grads:
                grad[calls[0].end :] = 0
            return grads
        whole = tuple(torch.zeros_like(x) for x in saved[:3])
        for begin, end, cumulative, longest in calls:
            *parts, lse_NT = saved
            own = (*(x[begin:end] for x in parts), lse_NT[:, begin:end].contiguous())
            grads = kernel(dout_TND[begin:end], own, cumulative, longest)
            for all_rows, grad in zip(whole, grads, strict=True):
                all_rows[begin:end] = grad
        return whole


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Asks torch for kernels without atomics; what the process asked for before comes back.

    `warn_only` would leave the atomics in place, and torch would fill all new memory with NaN.
    """
    modes = (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
    )
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(modes[0], warn_only=modes[1])
        torch._C._set_deterministic_fill_uninitialized_memory(modes[2])
