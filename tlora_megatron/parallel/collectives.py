"""Collectives over a tensor's rows: started at once, waited for where the result is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

# torch 2.13 renamed them and warns of the old names, which 2.12 and before have only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Waitable(Protocol):
    """A handle that `torch.distributed` returns for one collective, or for several together."""

    def wait(self) -> object:
        """Makes the current stream wait; on a CPU, the host."""
        ...


class Pending(NamedTuple):
    """A collective under way."""

    result: torch.Tensor
    work: Waitable | None
    source: torch.Tensor | None = None
    """Kept alive until the collective has read it."""

    def wait(self) -> torch.Tensor:
        """Returns the result; on a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Starts summing `x` over a group, in place; without a group there is nothing to sum."""
    if group is None or dist.get_world_size(group) == 1:
        return Pending(x, None)
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


def reduce_scatter_rows(x_TK: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Starts summing `x` over a group; the result is this rank's run of rows, `[T / size, K]`."""
    size = dist.get_world_size(group)
    source = x_TK.contiguous()
    result = x_TK.new_empty(x_TK.shape[0] // size, *x_TK.shape[1:])
    return Pending(result, _reduce_scatter(result, source, group=group, async_op=True), source)


def gather_rows(x_TK: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Starts gathering every rank's rows in rank order, `[T * size, ...]`."""
    source = x_TK.contiguous()
    result = x_TK.new_empty(x_TK.shape[0] * dist.get_world_size(group), *x_TK.shape[1:])
    return Pending(result, _all_gather(result, source, group=group, async_op=True), source)


def gather_together(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> list[Pending]:
    """Starts `gather_rows` of several tensors, on GPUs as one launch.

    A launch costs the host as much as several kernels do, and a small transfer costs the device
    little beside a large one.
    """
    if not tensors[0].is_cuda:
        return [gather_rows(x, group) for x in tensors]
    with dist._coalescing_manager(group=group, async_ops=True) as together:
        pending = [gather_rows(x, group) for x in tensors]
    return [p._replace(work=together) for p in pending]


def all_gather_rows(x_TK: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns every rank's rows in rank order, `[T * size, K]`."""
    result = x_TK.new_empty(x_TK.shape[0] * dist.get_world_size(group), *x_TK.shape[1:])
    _all_gather(result, x_TK.contiguous(), group=group)
    return result
