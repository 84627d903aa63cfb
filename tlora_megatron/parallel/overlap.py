"""How a model runs nano-batches: their turns, streams, hardware queues and room in memory.

Running out of memory cannot be caught: others of the group wait in collectives.

With one queue kernels start in launch order over all streams, as Megatron asks for. In nano-batches
what waits for another GPU must hold up its own stream alone, so they get as many queues as there
are. On 4 H200s one queue takes copy engines' hidden share from 92-97 % to below 45 %. Which of
CUDA's first calls reads the variable is not documented: it is set before all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import greenlet
import torch
from torch import Tensor

from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.collectives import TensorCollectives
from tlora_megatron.parallel.lane_tape import AutogradTape, SideStream, VjpTape, make_side_stream
from tlora_megatron.parallel.lanes import Lane, turn

_MARGIN = 0.1
"""Share of the peak that stays free. Whole rounds on an H200 reserve 1.02 to 1.04 of what they
allocate; lanes allocate on streams of their own, whose cached blocks no other lane can use. What
that adds has not been measured."""


class LaneRoom(NamedTuple):
    """The memory that is left for more nano-batches."""

    most: float
    """Nano-batches; inf = memory is no limit."""
    spare_bytes: float
    """Free beside the highest peak so far; inf where nothing counts it."""


NO_LIMIT = LaneRoom(float("inf"), float("inf"))


def lane_room(device: torch.device, *, num_ready: int, lane_bytes: int) -> LaneRoom:
    """Returns how many nano-batches this process's device has memory for.

    Args:
        num_ready: number of lanes that have their memory already.
        lane_bytes: memory that each further one takes.
    """
    if device.type != "cuda":
        return NO_LIMIT
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    peak = stats["allocated_bytes.all.peak"]
    # What the allocator has cached counts as free: peaks are made of it.
    spare = free + stats["reserved_bytes.all.current"] - peak
    left = spare - _MARGIN * peak
    if left < 0:
        return LaneRoom(1, spare)
    more = left // lane_bytes if lane_bytes else float("inf")
    return LaneRoom(num_ready + more, spare)


logger = logging.getLogger(__name__)

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_IN_ORDER, _BESIDE = "1", "32"


def set_queues(*, overlaps: bool) -> None:
    """Sets CUDA_DEVICE_MAX_CONNECTIONS, unless the user did.

    A 1 is replaced for nano-batches all the same, because Megatron's own launchers set it.
    """
    given = os.environ.get(VARIABLE)
    if not overlaps:
        os.environ.setdefault(VARIABLE, _IN_ORDER)
    elif given in (None, _IN_ORDER):
        os.environ[VARIABLE] = _BESIDE
        if given is not None and torch.cuda.is_initialized():
            logger.warning(
                "nano-batches hide less than they could: CUDA started with %s=%s, which must be %s",
                VARIABLE, given, _BESIDE,
            )  # fmt: skip


@contextmanager
def shown_in_order() -> Iterator[None]:
    """Shows 1 to code that insists on it, while CUDA has what `set_queues` set."""
    true = os.environ.get(VARIABLE)
    if true is None:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.init()  # what the code below would do, with the variable as it shows
    os.environ[VARIABLE] = _IN_ORDER
    try:
        yield
    finally:
        os.environ[VARIABLE] = true


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
                    with turn(lane):
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
    douts: Sequence[Tensor],
    *,
    after_main: bool = True,
) -> list[Tensor]:
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


class Overlap:
    """The number of nano-batches of a model, and the streams and collectives that they run with."""

    def __init__(self, collectives: TensorCollectives, device: torch.device) -> None:
        self.num_nano_batches = 1
        self.collectives = collectives
        self._device = device
        self._streams: list[SideStream] = []

    def streams(self, count: int) -> list[SideStream]:
        """Returns one side stream for each nano-batch, the same every time."""
        if len(self._streams) < count:
            self.collectives.prepare(count)
        while len(self._streams) < count:
            self._streams.append(make_side_stream(self._device))
        return self._streams[:count]

    def lanes(self, views: Sequence[MicroBatchView], *, gathers: bool) -> list[Lane]:
        """Returns a lane for each nano-batch of one micro-batch."""
        streams = self.streams(len(views))
        return [
            Lane(index, view, self.collectives, stream, gathers=gathers)
            for index, (view, stream) in enumerate(zip(views, streams, strict=True))
        ]
