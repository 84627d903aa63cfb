"""Lanes take turns at column-parallel linears; what goes wrong in one leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.collectives import SkippedCollectives
from tlora_megatron.parallel.lane_tape import SideStream
from tlora_megatron.parallel.lanes import Lane, current_lane
from tlora_megatron.parallel.overlap import take_turns


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
    collectives = SkippedCollectives(1, 0)
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
