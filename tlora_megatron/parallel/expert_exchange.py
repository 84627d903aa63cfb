"""Carries rows to the ranks that hold their experts, and results back.

A rank of the group holds a run of the experts, in rank order. It sends each rank the rows of that
rank's experts, in one all-to-all, and gets the rows that meet its own. On its side they lie expert
by expert, those of an expert source rank by source rank. The host waits once for the numbers of
rows; the way back asks nothing.

Every rank of the group must come to the same layers equally often, in the same order.

Shapes: E experts, P ranks, L = E / P experts of a rank, R rows here, Q rows that arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Journey(NamedTuple):
    """One micro-batch's rows at one layer, on the way to their experts and back."""

    counts_L: Tensor
    """int64: rows of each of this rank's experts."""
    exchange: ExpertExchange
    sent: list[int]
    """Rows to each rank; empty without a group."""
    received: list[int]
    order_Q: Tensor | None
    """Puts rows that came rank by rank in the order of experts."""

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

    def begin(self, counts_E: Tensor) -> Journey:
        """Tells all ranks how many rows they get; collective, and waits for the device.

        Args:
            counts_E: int64, this rank's rows for each expert of the layer.
        """
        if self.size == 1:
            return Journey(counts_E, self, [], [], None)
        received_PL = torch.empty_like(counts_E).view(self.size, -1)
        dist.all_to_all_single(received_PL, counts_E.view(self.size, -1), group=self.group)
        sums = torch.stack([counts_E.view(self.size, -1).sum(1), received_PL.sum(1)])
        sent, received = sums.tolist()
        experts = torch.arange(received_PL.shape[1], device=counts_E.device).repeat(self.size)
        arrived_Q = experts.repeat_interleave(received_PL.flatten(), output_size=sum(received))
        order_Q = arrived_Q.argsort(stable=True)
        return Journey(received_PL.sum(0), self, sent, received, order_Q)
