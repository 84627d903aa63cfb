"""Megatron's process groups over replicas of unlike layouts, and smaller context-parallel groups.

A micro-batch names how many ranks share it (`MicroBatchView.cp_size`). Megatron makes groups of one
size; attention takes those of the others from here.

`parallel_state` takes the ranks of all groups from rank generators, each one grid over the world.
While `initialize_model_parallel` runs, a generator takes their place that joins the groups of as
many grids as there are replicas. All processes then make all groups in one order, and each keeps
its own: sizes and ranks that Megatron asks for later are those of the process's own replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core
import torch.distributed as dist
from megatron.core import parallel_state

from tlora_megatron.model.layout import Deployment, ParallelLayout, ReplicaLayout

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


_GENERATOR = "RankGenerator"


def lay_out_replicas(deployment: Deployment) -> None:
    """Makes Megatron's groups for unlike replicas; collective over the world.

    Raises:
        NotImplementedError: if this Megatron-core lays groups out in another way.
    """
    if not hasattr(parallel_state, _GENERATOR):
        raise _unknown_core()
    with _grids_of(deployment):
        parallel_state.initialize_model_parallel()
    if deployment.placed(dist.get_rank()).layout.grid != current_sizes()[:3]:
        raise _unknown_core()


def _unknown_core() -> NotImplementedError:
    return NotImplementedError(
        "parallel.replicas must have a Megatron-core that takes its groups from RankGenerator "
        f"(0.16 to 0.20), got {megatron.core.__version__}; give parallel.tp_size instead"
    )


@contextmanager
def _grids_of(deployment: Deployment) -> Iterator[None]:
    """Has `parallel_state` take the ranks of groups from the grids of all replicas."""
    one_grid: Any = getattr(parallel_state, _GENERATOR)

    class _Grids(one_grid):
        """The groups of all replicas, each a grid of its own."""

        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            self._grids = [
                one_grid(**(sizes | _grid(r.layout) | {"rank_offset": r.first_rank}))
                for r in deployment.placed_replicas()
            ]

        def get_ranks(self, token: str) -> list[list[int]]:
            return [ranks for grid in self._grids for ranks in grid.get_ranks(token)]

    setattr(parallel_state, _GENERATOR, _Grids)
    try:
        yield
    finally:
        setattr(parallel_state, _GENERATOR, one_grid)


def _grid(layout: ReplicaLayout) -> dict[str, int]:
    """Sizes of one replica's grid, of dense layers and, where there are none, of experts."""
    tp_size, pp_size, cp_size = layout.grid
    return {"tp": tp_size, "pp": pp_size, "cp": cp_size, "ep": 1, "dp": 1}


def current_sizes() -> tuple[int, ...]:
    """Returns the sizes of this process's groups: TP, PP, CP, expert ranks, ranks that cut one."""
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
