"""Fixtures of several unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


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
