"""Nano-batches on a device: its queues, its memory, and lanes that take turns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch
from tlora_megatron.parallel import groups
from tlora_megatron.parallel.collectives import NoCollectives
from tlora_megatron.parallel.groups import host_threads
from tlora_megatron.parallel.lane_tape import SideStream
from tlora_megatron.parallel.lanes import Lane, current_lane
from tlora_megatron.parallel.overlap import (
    NO_LIMIT,
    VARIABLE,
    LaneRoom,
    lane_room,
    set_queues,
    shown_in_order,
    take_turns,
)


@pytest.mark.parametrize(
    ("given", "overlaps", "expected"),
    [
        (None, False, "1"),
        (None, True, "32"),
        ("1", False, "1"),
        ("1", True, "32"),
        ("8", False, "8"),
        ("8", True, "8"),
    ],
)
def test_the_user_decides_but_for_one_queue_under_nano_batches(
    monkeypatch: pytest.MonkeyPatch, given: str | None, overlaps: bool, expected: str
) -> None:
    monkeypatch.setenv(VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(VARIABLE)
    set_queues(overlaps=overlaps)
    assert os.environ[VARIABLE] == expected


def test_started_cuda_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    set_queues(overlaps=True)
    assert not caplog.text
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_queues(overlaps=True)
    assert "CUDA started with CUDA_DEVICE_MAX_CONNECTIONS=1, which must be 32" in caplog.text


def test_one_queue_is_shown_once_cuda_has_read_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started_with = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: started_with.append(os.environ[VARIABLE]))
    monkeypatch.setenv(VARIABLE, "32")
    with shown_in_order():
        assert os.environ[VARIABLE] == "1"
    assert os.environ[VARIABLE] == "32"
    assert started_with == ["32"]


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
def test_lanes_fit_beside_peak_and_tenth(num_ready: int, lane_bytes: int, most: float) -> None:
    room = lane_room(GPU, num_ready=num_ready, lane_bytes=lane_bytes)
    assert room == LaneRoom(most, 40)


def test_within_the_margin_nothing_new_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (-6, 100))
    assert lane_room(GPU, num_ready=2, lane_bytes=0) == LaneRoom(1, 4)


def test_a_cpu_sets_no_limit() -> None:
    assert lane_room(torch.device("cpu"), num_ready=1, lane_bytes=1 << 40) == NO_LIMIT


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Lanes set it as they go."""
    with torch.no_grad():
        yield


class Stream(SideStream):
    """Counts how often the main stream was made the current one again."""

    def __init__(self) -> None:
        self.left = 0

    def leave(self) -> None:
        self.left += 1


def make_lanes(count: int) -> list[Lane]:
    views = [cast(MicroBatchView, object()) for _ in range(count)]
    collectives = NoCollectives()
    return [
        Lane(index, view, collectives, Stream(), gathers=False) for index, view in enumerate(views)
    ]


def walk(seen: list[tuple[int, int]], *, fail_at: Any = None, error: Any = None) -> Any:
    """Two layers; fails where it is told to."""

    def body(lane: Lane) -> int:
        try:
            for layer in range(2):
                lane.begin_compute(torch.ones(2, 1))
                assert current_lane() is lane
                assert current_micro_batch() is lane.view
                seen.append((lane.index, layer))
                if (lane.index, layer) == fail_at:
                    raise error
            return lane.index * 10
        finally:
            seen.append((lane.index, -1))

    return body


def test_lanes_alternate() -> None:
    seen: list[tuple[int, int]] = []
    assert take_turns(make_lanes(3), walk(seen)) == [0, 10, 20]
    assert [step for step in seen if step[1] >= 0] == [(i, k) for k in range(2) for i in range(3)]


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("fail_at", [(0, 0), (1, 0), (2, 1)])
def test_an_error_in_one_ends_all(fail_at: tuple[int, int], error: BaseException) -> None:
    lanes, seen = make_lanes(3), cast(list[tuple[int, int]], [])
    with pytest.raises(type(error)):
        take_turns(lanes, walk(seen, fail_at=fail_at, error=error))
    assert {index for index, layer in seen if layer == -1} == {0, 1, 2}, "all are unwound"
    assert seen.count((0, -1)) == 1
    assert current_lane() is None
    assert current_micro_batch() is None
    assert cast(Stream, lanes[0].stream).left == 1
    assert take_turns(make_lanes(2), walk([])) == [0, 10], "the next step runs"


@pytest.mark.parametrize(
    ("ranks", "most", "expected"), [(None, 4, 4), ("1", 64, 12), ("4", 8, 3), ("32", 8, 1)]
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, most: int, expected: int
) -> None:
    monkeypatch.setattr(groups.os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert host_threads(most) == expected
