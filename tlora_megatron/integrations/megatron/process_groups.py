"""Megatron's process groups: joined, laid out for a layout, and as this package's values.

Megatron lays one grid over the world. For replicas of unlike layouts, its rank generators are
exchanged while it makes its groups: by ones that join the groups of as many grids as there are
replicas. All processes then make all groups in one order, and each keeps its own: sizes and ranks
that Megatron asks for later are those of the process's own replica.

A micro-batch names how many context-parallel ranks share it (`MicroBatchView.cp_size`). Megatron
makes groups of one size; attention takes those of the others from here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tlora_megatron.model.layout import Deployment, ExpertPlace, ParallelLayout
from tlora_megatron.parallel.groups import ExpertGroups, ParallelGroups, make_replica_cells
from tlora_megatron.parallel.overlap import set_queues

_laid_out: Deployment | None = None
"""The unlike replicas that Megatron's groups are of; None = one grid over the world, or none."""


def initialize_parallel(
    layout: ParallelLayout, *, overlaps: bool = False, deployment: Deployment | None = None
) -> None:
    """Joins the process group that torchrun's environment describes and lays Megatron's groups out.

    NCCL with one GPU a process where there is CUDA, else gloo. Without torchrun it is a world of
    one. A second call with the same layout does nothing; another layout makes new groups.

    Args:
        overlaps: nano-batches will hide each other's communication (`parallel.overlap`).
        deployment: unlike replicas, of one of which `layout` is; None = all are alike.
    """
    set_queues(overlaps=overlaps)
    if torch.cuda.is_available():
        _bind_gpu()
    else:
        from tlora_megatron.integrations.megatron import cpu

        cpu.install()
    if not dist.is_initialized():
        # Groups of a process group that was left are gone, but Megatron would still name them.
        parallel_state.destroy_model_parallel()
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        size = int(os.environ.get("WORLD_SIZE", "1"))
        _init_process_group(size, {} if "RANK" in os.environ else alone)
    world_size = layout.world_size if deployment is None else deployment.world_size
    if dist.get_world_size() != world_size:
        raise ValueError(
            f"world size must be {world_size} for {deployment or layout}, "
            f"got {dist.get_world_size()}"
        )
    _lay_out_groups(layout, deployment)
    # Nothing here draws from these generators, but Megatron's layers enter their contexts.
    model_parallel_cuda_manual_seed(0)


def _bind_gpu() -> None:
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ValueError(
            f"processes a node must be at most its {gpus} GPUs, got local rank {local_rank}"
        )
    torch.cuda.set_device(local_rank)


def join_process_group(store: dist.Store, rank: int, world_size: int) -> None:
    """Joins a process group whose processes meet in a store; nothing is read from the environment.

    It comes before `initialize_parallel`, in a process that has no group yet.
    """
    if torch.cuda.is_available():
        _bind_gpu()
    parallel_state.destroy_model_parallel()
    _init_process_group(world_size, {"store": store, "rank": rank, "world_size": world_size})


def _init_process_group(world_size: int, place: Mapping[str, Any]) -> None:
    """Joins with the backend of this machine.

    Args:
        place: a store, rank and size; empty = as torchrun's environment says.
    """
    options: dict[str, Any] = {"backend": "gloo"}
    if torch.cuda.is_available():
        options = {"backend": "nccl"}
        if world_size > 1:
            # Alone, most of Megatron's two dozen groups are never used: opening and closing all of
            # their communicators takes 11 s on an H200.
            options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(**options, **place)


def _lay_out_groups(layout: ParallelLayout, deployment: Deployment | None) -> None:
    global _laid_out
    before, _laid_out = _laid_out, deployment
    sizes = (
        layout.tp_size, layout.pp_size, layout.cp_size, layout.ep_size, layout.expert_tp,
    )  # fmt: skip
    if parallel_state.model_parallel_is_initialized():
        if current_sizes() == sizes and before == deployment:
            return
        parallel_state.destroy_model_parallel()
    if deployment is not None:
        lay_out_replicas(deployment)
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.expert_tp_size,
    )


_GENERATOR = "RankGenerator"


def lay_out_replicas(deployment: Deployment) -> None:
    """Makes Megatron's groups for unlike replicas; collective over the world.

    Raises:
        NotImplementedError: if this Megatron-core lays groups out in another way.
    """
    is_known = hasattr(parallel_state, _GENERATOR)
    if is_known:
        with _grids_of(deployment):
            parallel_state.initialize_model_parallel()
        is_known = deployment.placed(dist.get_rank()).layout.grid == current_sizes()[:3]
    if not is_known:
        raise NotImplementedError(
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
            self._grids = []
            for replica in deployment.placed_replicas():
                tp_size, pp_size, cp_size = replica.layout.grid
                own = {"tp": tp_size, "pp": pp_size, "cp": cp_size, "ep": 1, "dp": 1}
                self._grids.append(one_grid(**sizes | own | {"rank_offset": replica.first_rank}))

        def get_ranks(self, token: str) -> list[list[int]]:
            return [ranks for grid in self._grids for ranks in grid.get_ranks(token)]

    setattr(parallel_state, _GENERATOR, _Grids)
    try:
        yield
    finally:
        setattr(parallel_state, _GENERATOR, one_grid)


def current_sizes() -> tuple[int, ...]:
    """Returns the sizes of this process's groups: TP, PP, CP, expert ranks, ranks that cut one."""
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )


def current_groups(
    layout: ParallelLayout,
    deployment: Deployment | None = None,
    *,
    num_layers: int = 0,
    with_experts: bool = False,
) -> ParallelGroups:
    """Returns this process's place in Megatron's initialised parallel state.

    Args:
        deployment: unlike replicas; collective over the world, as their cells have groups.
        num_layers: of the model, which unlike replicas may cut into unlike stages.
    """
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dp_rank, cells = parallel_state.get_data_parallel_rank(), None
    if deployment is not None:
        dp_rank = deployment.placed(dist.get_rank()).index
        cells = make_replica_cells(deployment, num_layers)
    return ParallelGroups(
        layout=layout,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=dp_rank,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        model_group=parallel_state.get_model_parallel_group(),
        device=device,
        deployment=deployment,
        cells=cells,
        experts=_expert_groups(layout) if with_experts else None,
    )


def _expert_groups(layout: ParallelLayout) -> ExpertGroups:
    """Returns this process's place among those that hold routed experts."""
    holders = parallel_state.get_model_parallel_group()
    if layout.expert_holders > layout.tp_size:
        holders = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    ranks = dist.get_world_size() // layout.pp_size
    return ExpertGroups(
        place=ExpertPlace(
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        ),
        dp_rank=parallel_state.get_expert_data_parallel_rank(),
        tp_group=parallel_state.get_expert_tensor_parallel_group(),
        dp_group=parallel_state.get_expert_data_parallel_group(),
        holder_group=holders,
        is_holder=dist.get_rank() % ranks < layout.expert_holders,
    )


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
