"""The order in which lanes take turns, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import greenlet
import torch

from tlora_megatron.parallel.lane_tape import Tape
from tlora_megatron.parallel.lanes import Lane, Turn


def take_turns(lanes: Sequence[Lane], body: Callable[[Lane], Any]) -> list[Any]:
    """Runs `body(lane)` for all lanes, from column-parallel linear to column-parallel linear.

    Returns:
        What each returned. Main has waited for all of them.
    """
    results: list[Any] = [None] * len(lanes)

    def run(lane: Lane) -> None:
        lane.stream.to_side()
        results[lane.index] = body(lane)

    threads = [greenlet.greenlet(run) for _ in lanes]
    for lane in lanes:
        lane.stream.begin()
    try:
        while not all(thread.dead for thread in threads):
            for lane, thread in zip(lanes, threads, strict=True):
                if not thread.dead:
                    with Turn(lane):
                        thread.switch(lane)
    except BaseException:
        for thread in threads:
            if not thread.dead:
                thread.throw(greenlet.GreenletExit)
        lanes[0].stream.leave()
        raise
    for lane in lanes:
        lane.stream.to_main()
    return results


def take_turns_back(
    lanes: Sequence[Lane], tapes: Sequence[Tape], douts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs tapes backward; returns the gradients of what they began with. Empties them."""
    for lane in lanes:
        lane.stream.begin()
    try:
        for lane, tape, dout in zip(lanes, tapes, douts, strict=True):
            lane.backward_begin(tape, dout)
        while tapes[0].halves:
            for lane, tape in zip(lanes, tapes, strict=True):
                lane.backward_half(tape.halves.pop())
        return [lane.backward_end() for lane in lanes]
    finally:
        lanes[0].stream.leave()
