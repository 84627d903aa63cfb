"""Lays Megatron's process groups out over replicas of unlike layouts.

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

from tlora_megatron.model.replicas.deployment import Deployment, ReplicaLayout

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
    if not _are_groups_of(deployment.placed(dist.get_rank()).layout):
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


def _are_groups_of(layout: ReplicaLayout) -> bool:
    return layout.grid == (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
