"""How many nano-batches a GPU has memory for."""

from __future__ import annotations

import pytest
import torch

from tlora_megatron.parallel.overlap import NO_LIMIT, LaneRoom, lane_room

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 free, 60 in the allocator's hands, of which it has given away 50 at most."""
    stats = {"allocated_bytes.all.peak": 50, "reserved_bytes.all.current": 60}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)


@pytest.mark.parametrize(
    ("num_ready", "lane_bytes", "most"),
    [(2, 0, float("inf")), (2, 35, 3), (2, 36, 2), (1, 10, 4), (4, 1000, 4)],
)
def test_lanes_fit_beside_the_peak_and_a_tenth_of_it(
    num_ready: int, lane_bytes: int, most: float
) -> None:
    room = lane_room(GPU, num_ready=num_ready, lane_bytes=lane_bytes)
    assert room == LaneRoom(most, 40)


def test_within_the_margin_nothing_new_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (-6, 100))
    assert lane_room(GPU, num_ready=2, lane_bytes=0) == LaneRoom(1, 4)


def test_a_cpu_sets_no_limit() -> None:
    assert lane_room(torch.device("cpu"), num_ready=1, lane_bytes=1 << 40) == NO_LIMIT
