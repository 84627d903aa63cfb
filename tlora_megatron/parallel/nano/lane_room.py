"""Estimates for how many nano-batches a GPU has memory, before more of them are tried.

Running out of memory cannot be caught: the process that does is in the middle of collectives, and
the others of its group wait in them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_MARGIN = 0.1
"""Share of the peak that stays free. Whole rounds on an H200 reserve 1.02 to 1.04 of what they
allocate; lanes allocate on streams of their own, whose cached blocks no other lane can use. What
that adds has not been measured."""


class LaneRoom(NamedTuple):
    """The memory that is left for more nano-batches."""

    most: float
    """Nano-batches; inf = memory is no limit."""
    spare_bytes: float
    """Free beside the highest peak so far; inf where nothing counts it."""


NO_LIMIT = LaneRoom(float("inf"), float("inf"))


def lane_room(device: torch.device, *, num_ready: int, lane_bytes: int) -> LaneRoom:
    """Returns how many nano-batches this process's device has memory for.

    Args:
        num_ready: number of lanes that have their memory already.
        lane_bytes: memory that each further one takes.
    """
    if device.type != "cuda":
        return NO_LIMIT
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    peak = stats["allocated_bytes.all.peak"]
    # What the allocator has cached counts as free: peaks are made of it.
    spare = free + stats["reserved_bytes.all.current"] - peak
    left = spare - _MARGIN * peak
    if left < 0:
        return LaneRoom(1, spare)
    more = left // lane_bytes if lane_bytes else float("inf")
    return LaneRoom(num_ready + more, spare)
