"""Fixtures of several unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tlora_megatron.parallel.groups import ParallelGroups


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """An initialised process group of this process alone."""
    import torch.distributed as dist  # not at the top: many tests do without torch

    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if owned:
        dist.destroy_process_group()


@pytest.fixture
def groups(world_of_one: None) -> ParallelGroups:
    """The groups of this process alone, on the CPU."""
    import torch
    import torch.distributed as dist

    from tlora_megatron.model.layout import ParallelLayout
    from tlora_megatron.parallel.groups import ParallelGroups

    world = dist.group.WORLD
    assert world is not None
    return ParallelGroups(
        layout=ParallelLayout(),
        tp_rank=0,
        pp_rank=0,
        cp_rank=0,
        dp_rank=0,
        tp_group=world,
        dp_cp_group=world,
        model_group=world,
        device=torch.device("cpu"),
    )
