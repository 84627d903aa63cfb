"""Memory for snapshots: ranges that do not meet, and never more than was allowed."""

from __future__ import annotations

import random

import pytest
import torch

from tlora_megatron.training.saving.snapshot import Arena, HostMemory, save_memory_numel


def test_ranges_do_not_meet_and_are_used_again() -> None:
    arena, taken, random_ = Arena(1000), list[range](), random.Random(0)
    for _ in range(500):
        if taken and random_.random() < 0.5:
            arena.give_back(taken.pop(random_.randrange(len(taken))))
        elif (new := arena.take(random_.randint(1, 400))) is not None:
            assert 0 <= new.start < new.stop <= arena.numel
            assert all(new.stop <= old.start or old.stop <= new.start for old in taken)
            taken.append(new)
    for held in taken:
        arena.give_back(held)
    assert arena.take(1000) == range(1000)
    assert arena.take(1) is None


def test_more_than_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="numel must be at most 128, got 129"):
        Arena(100).take(129)


@pytest.mark.parametrize(
    ("memory_gb", "numel"), [(1.0, 640 + 6400), (1e-5, 6400), (26e-6, 6500), (1e-12, 6400)]
)
def test_all_jobs_once_but_no_more_than_allowed(memory_gb: float, numel: int) -> None:
    """The largest always finds room."""
    assert save_memory_numel([640, 6337], memory_gb) == numel


def test_by_default_all_jobs_find_room_on_an_idle_host() -> None:
    assert save_memory_numel([64, 64], None) == 128


def test_memory_beside_no_gpu_is_plain() -> None:
    memory = HostMemory(10, torch.device("cpu"))
    assert memory.flat().shape == (10,)
    memory.close()
