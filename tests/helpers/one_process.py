"""Megatron's groups of a world of one process, for tests that build its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state

from tlora_megatron.integrations.megatron.process_groups import current_groups, initialize_parallel
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.parallel.groups import ParallelGroups


@contextmanager
def one_process_groups() -> Iterator[ParallelGroups]:
    """Makes the groups of this process alone, and takes them down behind the block."""
    layout = ParallelLayout()
    initialize_parallel(layout)
    yield current_groups(layout)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
