"""Collectives over a tensor's rows, started at once, and rows carried to their experts' ranks.

A rank of the group holds a run of the experts, in rank order. It sends each rank the rows of that
rank's experts, in one all-to-all, and gets the rows that meet its own: expert by expert, those of
an expert adapter by adapter, and those of both source rank by source rank. The host waits once for
the numbers of rows; the way back asks nothing. Ranks come to layers equally often, in one order.

`TensorCollectives` enqueue on the current stream, where the result may be used at once; the host
never waits. `lane` is the nano-batch's index: lanes have buffers, signals and streams of their own.

Shapes: E experts, P ranks, L = E / P experts of a rank, S adapters, R rows here, Q rows that
arrive; T rows, H features, n processes of the group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.experts.branch import ExpertRuns
from tlora_megatron.parallel.copy_engine import CopyEngineCollectives, obstacle

# torch 2.13 renamed them and warns of the old names, which 2.12 and before have only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(NamedTuple):
    """A collective under way."""

    result: Tensor
    work: Any
    """torch's handle of it, or of several together; None = it is done, or on this stream."""
    source: Tensor | None = None
    """Kept alive until the collective has read it."""

    def wait(self) -> Tensor:
        """Returns the result; on a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Starts summing `x` over a group, in place; without a group there is nothing to sum."""
    if group is None or dist.get_world_size(group) == 1:
        return Pending(x, None)
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


def reduce_scatter_rows(x_TK: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Starts summing `x` over a group; the result is this rank's run of rows, `[T / size, K]`."""
    size = dist.get_world_size(group)
    source = x_TK.contiguous()
    result = x_TK.new_empty(x_TK.shape[0] // size, *x_TK.shape[1:])
    return Pending(result, _reduce_scatter(result, source, group=group, async_op=True), source)


def gather_rows(x_TK: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Starts gathering every rank's rows in rank order, `[T * size, ...]`."""
    source = x_TK.contiguous()
    result = x_TK.new_empty(x_TK.shape[0] * dist.get_world_size(group), *x_TK.shape[1:])
    return Pending(result, _all_gather(result, source, group=group, async_op=True), source)


def gather_together(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Pending]:
    """Starts `gather_rows` of several tensors, on GPUs as one launch.

    A launch costs the host as much as several kernels do, and a small transfer costs the device
    little beside a large one.
    """
    if not tensors[0].is_cuda:
        return [gather_rows(x, group) for x in tensors]
    with dist._coalescing_manager(group=group, async_ops=True) as together:
        pending = [gather_rows(x, group) for x in tensors]
    return [p._replace(work=together) for p in pending]


def all_gather_rows(x_TK: Tensor, group: dist.ProcessGroup | None) -> Tensor:
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


logger = logging.getLogger(__name__)

Kind = Literal["auto", "nccl", "copy_engine"]
DEFAULT_MAX_BYTES = 128 << 20
"""The sum of 8,192 rows of 8,192 features in bf16: half of the largest micro-batch measured."""


class TensorCollectives(Protocol):
    """Sums and gathers over one tensor-parallel group.

    Every process of the group makes the same calls, with equal shapes, and a lane's in one order.
    """

    name: str
    lane_bytes: int = 0
    """Memory that `prepare` takes for each lane."""

    def prepare(self, num_lanes: int) -> None:
        """Makes lanes 0 to `num_lanes` - 1 usable; all processes call it. Waits for the device."""
        return  # most need nothing

    def all_reduce(self, x_TH: Tensor, lane: int) -> Tensor:
        """Returns the sum over the group, `[T, H]`; x may be overwritten and returned."""

    def reduce_scatter(self, x_TH: Tensor, lane: int) -> Tensor:
        """Returns this process's run of the sum's rows, `[T / n, H]`; n must divide T."""

    def all_gather(self, x_TH: Tensor, lane: int) -> Tensor:
        """Returns every process's rows in rank order, `[T * n, H]`."""

    def close(self) -> None:
        """Gives buffers back; every process must call it, and nothing after it."""


class GroupCollectives(TensorCollectives):
    """The process group's own collectives: NCCL's, or those of another backend.

    Lanes need no preparation: a communicator runs one collective after another.
    """

    name = "nccl"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)

    def all_reduce(self, x_TH: Tensor, lane: int) -> Tensor:
        x_TH = x_TH.contiguous()
        dist.all_reduce(x_TH, group=self.group)
        return x_TH

    def reduce_scatter(self, x_TH: Tensor, lane: int) -> Tensor:
        result = x_TH.new_empty(_rows_each(x_TH, self.size), *x_TH.shape[1:])
        _reduce_scatter(result, x_TH.contiguous(), group=self.group)
        return result

    def all_gather(self, x_TH: Tensor, lane: int) -> Tensor:
        return all_gather_rows(x_TH, self.group)

    def close(self) -> None:
        """Releases the group: gloo aborts at exit if one outlives `destroy_process_group`."""
        del self.group


class RankOrderCollectives(GroupCollectives):
    """Sums in rank order in fp32 or wider, rounded once: a row's bits do not depend on T.

    The all-reduce is a reduce-scatter and an all-gather, as over NVLink. Synchronous on a CPU.
    """

    name = "gloo"

    def all_reduce(self, x_TH: Tensor, lane: int) -> Tensor:
        flat = x_TH.reshape(-1)
        padding = -flat.numel() % self.size
        own = self._own_slice(torch.nn.functional.pad(flat, (0, padding)))
        return super().all_gather(own, lane)[: flat.numel()].view(x_TH.shape)

    def reduce_scatter(self, x_TH: Tensor, lane: int) -> Tensor:
        rows = _rows_each(x_TH, self.size)
        return self._own_slice(x_TH.reshape(-1)).view(rows, *x_TH.shape[1:])

    def _own_slice(self, flat: Tensor) -> Tensor:
        """Returns this process's of `n` equal slices of the sum."""
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat, group=self.group)
        wide = torch.promote_types(flat.dtype, torch.float32)
        first, *others = parts.view(self.size, -1).unbind()
        total = first.to(wide, copy=True)
        for part in others:
            total += part
        return total.to(flat.dtype)


class NoCollectives(TensorCollectives):
    """Those of one process: what it has is the sum, and all there is."""

    name = "none"

    def all_reduce(self, x_TH: Tensor, lane: int) -> Tensor:
        return x_TH

    reduce_scatter = all_gather = all_reduce

    def close(self) -> None:
        return


def make_tensor_collectives(
    group: dist.ProcessGroup | None,
    device: torch.device,
    kind: Kind = "auto",
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> TensorCollectives:
    """Makes the collectives of a tensor-parallel group; every process of it calls this alike.

    Args:
        group: None or of one process = nothing is communicated.
        kind: `auto` = the best that runs here: gloo on a CPU, copy engines where the GPUs reach
            each other's memory, otherwise NCCL; the log says which and why.
        max_bytes: bytes that copy engines carry at once, best the largest x of a call (the gathered
            one of an all-gather). A lane holds about as much memory; a larger x takes several
            rounds.
    """
    if group is None or dist.get_world_size(group) == 1:
        return NoCollectives()
    if device.type == "cpu":
        if kind != "auto":
            raise ValueError(f"tensor_collectives must be auto on a CPU, got {kind!r}")
        return RankOrderCollectives(group)
    if kind == "nccl":
        return GroupCollectives(group)
    reason = obstacle(group, device)
    if reason is None:
        return CopyEngineCollectives(group, device, max_bytes)
    if kind == "copy_engine":
        raise ValueError(f"tensor_collectives must be nccl here, got copy_engine: {reason}")
    logger.info("tensor collectives: nccl, since %s", reason)
    return GroupCollectives(group)


def _rows_each(x_TH: Tensor, size: int) -> int:
    assert len(x_TH) % size == 0, f"{size} processes must divide the rows, got {len(x_TH)}"
    return len(x_TH) // size
