"""The order in which lanes take turns, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import greenlet
import torch

from tlora_megatron.parallel.nano.lane_tape import AutogradTape, VjpTape
from tlora_megatron.parallel.nano.lanes import Lane, Turn


def take_turns(
    lanes: Sequence[Lane], body: Callable[[Lane], Any], *, after_main: bool = True
) -> list[Any]:
    """Runs `body(lane)` for all lanes, which take turns at every column-parallel linear.

    Args:
        after_main: begin after all that main has been given; False where lanes continue with
            tensors of their own streams.

    Returns:
        The result of each lane; main must `join` before it reads them.
    """
    results: list[Any] = [None] * len(lanes)

    def run(lane: Lane) -> None:
        if after_main:
            lane.stream.to_side()
        else:
            lane.stream.resume()
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
    finally:
        for thread in threads:
            if not thread.dead:  # another one has failed
                thread.throw(greenlet.GreenletExit)
        lanes[0].stream.leave()
    return results


def take_turns_back(
    lanes: Sequence[Lane],
    tapes: Sequence[AutogradTape | VjpTape],
    douts: Sequence[torch.Tensor],
    *,
    after_main: bool = True,
) -> list[torch.Tensor]:
    """Runs tapes backward and empties them.

    Args:
        douts: gradients of the layers' results; the caller keeps them until main has joined.
        after_main: see `take_turns`.

    Returns:
        Gradients of the layers' inputs; main must `join` before it reads them.
    """
    for lane in lanes:
        lane.stream.begin()
    try:
        for lane, tape, dout in zip(lanes, tapes, douts, strict=True):
            lane.backward_begin(tape, dout, after_main=after_main)
        while tapes[0].sublayers:
            for lane, tape in zip(lanes, tapes, strict=True):
                lane.backward_sublayer(tape)
        return [lane.backward_end() for lane in lanes]
    finally:
        lanes[0].stream.leave()


def join(lanes: Sequence[Lane]) -> None:
    """Makes main wait for all that lanes were given."""
    for lane in lanes:
        lane.join()
