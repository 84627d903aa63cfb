"""Collectives over a tensor's rows, started at once, and rows carried to their experts' ranks.

A rank of the group holds a run of the experts, in rank order. It sends each rank the rows of that
rank's experts, in one all-to-all, and gets the rows that meet its own. On its side they lie expert
by expert, those of an expert adapter by adapter, and those of both source rank by source rank. The
host waits once for the numbers of rows; the way back asks nothing.

Every rank of the group must come to the same layers equally often, in the same order.

Shapes: E experts, P ranks, L = E / P experts of a rank, S adapters, R rows here, Q rows that
arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns

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


class Journey(NamedTuple):
    """One micro-batch's rows at one layer, on the way to their experts and back."""

    runs: ExpertRuns
    """The rows that this rank's experts compute."""
    exchange: ExpertExchange
    sent: list[int]
    """Rows to each rank; empty without a group."""
    received: list[int]
    order_Q: Tensor | None
    """Puts rows that came rank by rank in the order of experts and adapters."""

    def there(self, x: Tensor) -> Tensor:
        """Takes `[R, ...]` in the order of all experts to `[Q, ...]` in that of this rank's."""
        if self.order_Q is None:
            return x
        return self._exchange(x, self.received, self.sent)[self.order_Q]

    def back(self, y: Tensor) -> Tensor:
        """Takes `[Q, ...]` back to `[R, ...]`."""
        if self.order_Q is None:
            return y
        by_rank = torch.empty_like(y)
        by_rank[self.order_Q] = y
        return self._exchange(by_rank, self.sent, self.received)

    def _exchange(self, x: Tensor, outputs: list[int], inputs: list[int]) -> Tensor:
        out = x.new_empty(sum(outputs), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), outputs, inputs, group=self.exchange.group)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertExchange:
    """The ranks among which the experts of a layer are divided."""

    group: dist.ProcessGroup | None = None
    size: int = 1

    def begin(self, counts_ES: Tensor) -> Journey:
        """Tells all ranks how many rows they get; collective, and waits for the device.

        Args:
            counts_ES: int64, this rank's rows of each adapter for each expert of the layer; as many
                columns on all ranks.
        """
        if self.size == 1:
            return Journey(ExpertRuns(counts_ES), self, [], [], None)
        sent_PX = counts_ES.contiguous().view(self.size, -1)
        received_PX = torch.empty_like(sent_PX)
        dist.all_to_all_single(received_PX, sent_PX, group=self.group)
        sent, received = torch.stack([sent_PX.sum(1), received_PX.sum(1)]).tolist()
        pairs = torch.arange(received_PX.shape[1], device=counts_ES.device).repeat(self.size)
        arrived_Q = pairs.repeat_interleave(received_PX.flatten(), output_size=sum(received))
        order_Q = arrived_Q.argsort(stable=True)
        runs = ExpertRuns(received_PX.sum(0).view(-1, counts_ES.shape[1]))
        return Journey(runs, self, sent, received, order_Q)
