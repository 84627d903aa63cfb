"""The backward pass of flash attention in calls whose bits depend on a document alone.

`attention_plan` divides a micro-batch into calls. They run beside each other on a few streams, the
one with the longest thread blocks first, so that no call's last blocks leave the GPU idle.

Shapes: T rows, N query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tlora_megatron.ops.frozen.attention_plan import (
    Classes,
    DocumentRun,
    document_runs,
    rows_of_none,
)
from tlora_megatron.ops.host_copy import to_device

Kernel = Callable[..., tuple[torch.Tensor, ...]]
"""`kernel(dout, saved, cumulative, longest)` returns dq, dk and dv of as many rows as it gets."""

NUM_STREAMS = 4
"""Streams that calls run on, the current one among them."""


class BackwardCall(NamedTuple):
    """One call of the backward kernel."""

    begin: int
    end: int
    cumulative: torch.Tensor
    """int32: begins of the kernel's documents, counted from row `begin`, and the end of the last.
    Where heads are divided, all rows follow once for each of the `documents`."""
    longest: int
    documents: int = 1
    """Documents of the kernel that heads are divided among; 1 = they are not divided."""


class BackwardCalls(NamedTuple):
    """All calls of a micro-batch."""

    calls: tuple[BackwardCall, ...]
    """In the order of their launch."""
    gaps: tuple[tuple[int, int], ...]
    """Rows of padding."""


def backward_calls(
    lengths: Sequence[int],
    is_padding: Sequence[bool],
    heads: int,
    classes: Classes,
    device: torch.device,
    num_rows: int,
) -> BackwardCalls:
    """Returns the calls of a micro-batch's documents.

    Args:
        heads: query heads.
        num_rows: of the micro-batch, those behind the last document too.
    """
    runs = document_runs(lengths, is_padding, classes.of)
    longest_first = sorted(runs, key=lambda run: -run.block_work)
    calls = tuple(_call(run, heads, device) for run in longest_first)
    return BackwardCalls(calls, rows_of_none(runs, num_rows))


def _call(run: DocumentRun, heads: int, device: torch.device) -> BackwardCall:
    documents = heads // run.shape.heads
    lengths = run.lengths * documents
    empty = max(0, run.shape.fewest - len(lengths))
    begins = torch.tensor((0, *lengths, *(0,) * empty)).cumsum(0).to(torch.int32)
    return BackwardCall(run.begin, run.end, to_device(begins, device), max(run.lengths), documents)


def backward_in_calls(
    dout_TND: torch.Tensor,
    saved: Sequence[torch.Tensor],
    calls: BackwardCalls,
    kernel: Kernel,
) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk and dv of all rows; zeros in those that no call has.

    Args:
        saved: queries, keys, values, the output and a number a head and query, `[N, T]`.
    """
    with deterministic_kernels():
        grads = _grads_of_calls(dout_TND, saved, calls, kernel)
    for begin, end in calls.gaps:
        for grad in grads:
            grad[begin:end] = 0
    return grads


def _grads_of_calls(
    dout_TND: torch.Tensor, saved: Sequence[torch.Tensor], calls: BackwardCalls, kernel: Kernel
) -> tuple[torch.Tensor, ...]:
    first = calls.calls[0] if calls.calls else None
    if first and len(calls.calls) == 1 and not first.begin and first.documents == 1:
        # Rows behind the last document are never read: no slices, no copies.
        return kernel(dout_TND, saved, first.cumulative, first.longest)
    grads = tuple(torch.empty_like(x) for x in saved[:3])
    works = [
        functools.partial(_write_call, grads, dout_TND, saved, call, kernel) for call in calls.calls
    ]
    run_beside_each_other(works, dout_TND.device)
    return grads


def _write_call(
    grads: Sequence[torch.Tensor],
    dout_TND: torch.Tensor,
    saved: Sequence[torch.Tensor],
    call: BackwardCall,
    kernel: Kernel,
) -> None:
    """Writes a call's rows of the gradients."""
    *parts, lse_NT = saved
    rows = slice(call.begin, call.end)
    into = [grad[rows] for grad in grads]
    dout, *own = (x[rows] for x in (dout_TND, *parts))
    lse = lse_NT[:, rows]
    if call.documents > 1:
        _divided_by_heads(into, dout, (*own, lse), call, kernel)
        return
    found = kernel(dout, (*own, lse.contiguous()), call.cumulative, call.longest)
    for mine, grad in zip(into, found, strict=True):
        mine.copy_(grad)


def _divided_by_heads(
    into: Sequence[torch.Tensor],
    dout_TND: torch.Tensor,
    saved: Sequence[torch.Tensor],
    call: BackwardCall,
    kernel: Kernel,
) -> None:
    """Runs one document as several that follow each other, each with some of its heads."""
    q_TND, k_TGD, v_TGD, out_TND, lse_NT = saved
    count, heads = call.documents, q_TND.shape[1]
    q, out, dout = (_documents_of(x, count) for x in (q_TND, out_TND, dout_TND))
    k, v = (_key_documents_of(x, count, heads) for x in (k_TGD, v_TGD))
    lse = lse_NT.unflatten(0, (count, -1)).transpose(0, 1).flatten(1).contiguous()
    found = kernel(dout, (q, k, v, out, lse), call.cumulative, call.longest)
    for mine, grad in zip(into, found, strict=True):
        _put_back(mine, grad, count)


def _documents_of(x_TND: torch.Tensor, count: int) -> torch.Tensor:
    """`[count * T, N / count, D]`: the first heads of all rows, then the next ones."""
    return x_TND.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)


def _key_documents_of(x_TGD: torch.Tensor, count: int, heads: int) -> torch.Tensor:
    """Keys or values of `_documents_of`.

    Where a document has a part of a group only, each query head gets keys of its own: the kernel
    would round a group's gradient after each part, and does so once after all heads in `_put_back`.
    """
    groups = x_TGD.shape[1]
    if count <= groups:
        return _documents_of(x_TGD, count)
    x_GTD = x_TGD.transpose(0, 1)
    each = x_GTD[:, None, :, None].expand(-1, count // groups, -1, heads // count, -1)
    return each.flatten(0, 2)


def _put_back(into_TND: torch.Tensor, grad: torch.Tensor, count: int) -> None:
    """Undoes `_documents_of`, or `_key_documents_of` for their gradients."""
    groups = into_TND.shape[1]
    if count <= groups:
        target = into_TND.unflatten(1, (count, -1)).transpose(0, 1)
        target.copy_(grad.unflatten(0, (count, -1)))
        return
    each = grad.unflatten(0, (groups, count // groups, -1))
    into_TND.copy_(each.sum(dim=(1, 3)).transpose(0, 1))


def run_beside_each_other(works: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Gives works to streams in turn, the first to the current one, which then waits for all.

    Nothing needs `record_stream`: the current stream waits before any tensor of its own is freed,
    and what a work allocates is freed, and given out again, on the stream of that work. With
    CUDA_DEVICE_MAX_CONNECTIONS=1 works follow one another, more or less.
    """
    if device.type != "cuda" or min(len(works), NUM_STREAMS) < 2:
        for work in works:
            work()
        return
    main = torch.cuda.current_stream(device)
    sides = _side_streams(device)[: min(len(works), NUM_STREAMS) - 1]
    forked = main.record_event()
    for side in sides:
        side.wait_event(forked)
    streams = (main, *sides)
    try:
        for index, work in enumerate(works):
            with torch.cuda.stream(streams[index % len(streams)]):
                work()
    finally:
        for side in sides:
            main.wait_stream(side)


@functools.cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Streams of this process beside any current one; every fork takes the same."""
    return tuple(torch.cuda.Stream(device) for _ in range(NUM_STREAMS - 1))


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
