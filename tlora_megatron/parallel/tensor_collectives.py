"""Collectives of one tensor-parallel group over a nano-batch's rows, behind one small interface.

The caller decides what computes beside them: a call is enqueued on the current stream, and its
result may be used there as soon as it returns; the host never waits. `lane` is the nano-batch's
index: lanes have buffers, signals and streams of their own, so that none waits for another.

Shapes: T rows, H features, n processes of the group.

"""

from __future__ import annotations

import logging
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist

from tlora_megatron.parallel.copy_engine import CopyEngineCollectives
from tlora_megatron.parallel.peer_memory import obstacle

logger = logging.getLogger(__name__)

Kind = Literal["auto", "gloo", "nccl", "copy_engine", "skipped"]
DEFAULT_MAX_BYTES = 128 << 20
"""The sum of 8,192 rows of 8,192 features in bf16: half of the largest micro-batch measured."""


class TensorCollectives(Protocol):
    """Sums and gathers over one tensor-parallel group.

    Every process of the group makes the same calls, with equal shapes, and a lane's in one order.
    """

    name: str
    lane_bytes: int
    """Memory that `prepare` takes for each lane."""

    def prepare(self, num_lanes: int) -> None:
        """Makes lanes 0 to `num_lanes` - 1 usable; all processes call it. Waits for the device."""

    def all_reduce(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        """Returns the sum over the group, `[T, H]`; x may be overwritten and returned."""

    def reduce_scatter(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        """Returns this process's run of the sum's rows, `[T / n, H]`; n must divide T."""

    def all_gather(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        """Returns every process's rows in rank order, `[T * n, H]`."""

    def close(self) -> None:
        """Gives buffers back; every process must call it, and nothing after it."""


class GroupCollectives:
    """The process group's own collectives: NCCL's, or those of another backend."""

    name = "nccl"
    lane_bytes = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)

    def prepare(self, num_lanes: int) -> None:
        """Does nothing: a communicator runs one collective after another."""

    def all_reduce(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        x_TH = x_TH.contiguous()
        dist.all_reduce(x_TH, group=self.group)
        return x_TH

    def reduce_scatter(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        result = x_TH.new_empty(_rows_each(x_TH, self.size), *x_TH.shape[1:])
        _reduce_scatter(result, x_TH.contiguous(), group=self.group)
        return result

    def all_gather(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        result = x_TH.new_empty(len(x_TH) * self.size, *x_TH.shape[1:])
        _all_gather(result, x_TH.contiguous(), group=self.group)
        return result

    def close(self) -> None:
        """Releases the group: gloo aborts at exit if one outlives `destroy_process_group`."""
        del self.group


class RankOrderCollectives(GroupCollectives):
    """Sums in rank order in fp32 or wider, rounded once: a row's bits do not depend on T.

    The all-reduce is a reduce-scatter and an all-gather, as over NVLink. Synchronous on a CPU.
    """

    name = "gloo"

    def all_reduce(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        flat = x_TH.reshape(-1)
        padding = -flat.numel() % self.size
        own = self._own_slice(torch.nn.functional.pad(flat, (0, padding)))
        return super().all_gather(own, lane)[: flat.numel()].view(x_TH.shape)

    def reduce_scatter(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        rows = _rows_each(x_TH, self.size)
        return self._own_slice(x_TH.reshape(-1)).view(rows, *x_TH.shape[1:])

    def _own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this process's of `n` equal slices of the sum."""
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat, group=self.group)
        wide = torch.promote_types(flat.dtype, torch.float32)
        first, *others = parts.view(self.size, -1).unbind()
        total = first.to(wide, copy=True)
        for part in others:
            total += part
        return total.to(flat.dtype)


class SkippedCollectives:
    """Communicates nothing: right shapes, this process's numbers. For measuring, or one process."""

    name = "skipped"
    lane_bytes = 0

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self._gathered: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def prepare(self, num_lanes: int) -> None:
        """Does nothing."""

    def all_reduce(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        return x_TH

    def reduce_scatter(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        rows = _rows_each(x_TH, self.size)
        return x_TH[self.rank * rows : (self.rank + 1) * rows]

    def all_gather(self, x_TH: torch.Tensor, lane: int) -> torch.Tensor:
        """Returns the first x of its shape, n times.

        Kept, because a new copy would take time that copy engines do not take from multiprocessors.
        """
        if self.size == 1:
            return x_TH
        key = (x_TH.shape, x_TH.dtype)
        if key not in self._gathered:
            self._gathered[key] = x_TH.detach().repeat(self.size, *[1] * (x_TH.dim() - 1))
        return self._gathered[key]

    def close(self) -> None:
        self._gathered.clear()


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

    Raises:
        ValueError: if `kind` names none, or one that cannot run here.
    """
    if kind not in get_args(Kind):
        raise ValueError(
            f"tensor_collectives must be one of {', '.join(get_args(Kind))}, got {kind!r}"
        )
    if group is None or dist.get_world_size(group) == 1:
        return SkippedCollectives(1, 0)
    if kind == "skipped":
        return SkippedCollectives(dist.get_world_size(group), dist.get_rank(group))
    if device.type == "cpu":
        if kind not in ("auto", "gloo"):
            raise ValueError(f"tensor_collectives must be auto on a CPU, got {kind!r}")
        return RankOrderCollectives(group)
    if kind == "gloo":
        raise ValueError(f"tensor_collectives must not be gloo on {device.type}: it is a CPU's")
    return _on_gpus(group, device, kind, max_bytes)


def _on_gpus(
    group: dist.ProcessGroup, device: torch.device, kind: Kind, max_bytes: int
) -> TensorCollectives:
    if kind == "nccl":
        return GroupCollectives(group)
    reason = obstacle(group, device)
    if reason is None:
        return CopyEngineCollectives(group, device, max_bytes)
    if kind == "copy_engine":
        raise ValueError(f"tensor_collectives must be nccl here, got copy_engine: {reason}")
    logger.info("tensor collectives: nccl, since %s", reason)
    return GroupCollectives(group)


# torch 2.13 renamed them and warns of the old names, which 2.12 and before have only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _rows_each(x_TH: torch.Tensor, size: int) -> int:
    assert len(x_TH) % size == 0, f"{size} processes must divide the rows, got {len(x_TH)}"
    return len(x_TH) // size
