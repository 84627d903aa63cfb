"""Groups of fewer neighbouring context-parallel ranks than Megatron's own groups have.

A micro-batch names how many ranks share it (`MicroBatchView.cp_size`). Megatron makes groups of one
size; attention takes those of the others from here.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from tlora_megatron.model.layout import ParallelLayout

_whole: Any = None
"""Megatron's context-parallel group that the narrower ones divide; None = there are none."""
_narrower: dict[int, Any] = {}
"""This process's group of 2, 4, ... ranks, below all of them."""


def make_narrower_groups(layout: ParallelLayout) -> None:
    """Makes groups of 2, 4, ... of each replica's context-parallel ranks; collective.

    A second call for the same Megatron groups does nothing. One rank alone needs no group.
    """
    global _whole, _narrower
    whole = parallel_state.get_context_parallel_group()
    if _whole is whole:
        return
    _whole, _narrower = whole, {}
    size = 2
    while size < layout.cp_size:
        own, _ = dist.new_subgroups_by_enumeration(_neighbours(layout, size))
        _narrower[size] = own
        size *= 2


def _neighbours(layout: ParallelLayout, size: int) -> list[list[int]]:
    """Ranks of all groups of one size: Megatron counts TP ranks fastest, CP ranks next."""
    span, step = layout.tp_size * layout.cp_size, layout.tp_size
    return [
        [first + tp_rank + step * (begin + rank) for rank in range(size)]
        for first in range(0, layout.world_size, span)
        for tp_rank in range(step)
        for begin in range(0, layout.cp_size, size)
    ]


def groups_by_size(whole: Any, cp_size: int) -> dict[int, Any]:
    """Returns this process's groups by their number of context-parallel ranks, above 1."""
    return {cp_size: whole} | (_narrower if whole is _whole else {})
