"""Carries rows to the ranks that hold their experts, and results back.

A rank of the group holds a run of the experts, in rank order. It sends each rank the rows of that
rank's experts, in one all-to-all, and gets the rows that meet its own. On its side they lie expert
by expert, those of an expert adapter by adapter, and those of both source rank by source rank. The
host waits once for the numbers of rows; the way back asks nothing.

Every rank of the group must come to the same layers equally often, in the same order.

Shapes: E experts, P ranks, L = E / P experts of a rank, S adapters, R rows here, Q rows that
arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns


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
