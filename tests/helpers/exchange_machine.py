"""Executes the steps of `parallel.copy_engine` for all processes, in a random order.

What a GPU does over time takes time here too: a copy or a sum reads and writes piece by piece, a
phase raises one flag after another. Each lane of each process is a stream; at every turn one that
is not waiting goes on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tlora_megatron.ops.lora.cuda_arguments import MAX_RANKS
from tlora_megatron.parallel.copy_engine import Copy, Exchange, Lane, Operation, Place, Step

Values = NDArray[np.float32]
_ELEMENT_BYTES = 4


class Deadlock(AssertionError):
    """Every stream that has not ended waits."""


class Machine:
    """The areas and flags of a lane on every process."""

    def __init__(self, size: int, slot_bytes: int) -> None:
        self.lanes = [Lane(rank=r, size=size, slot_bytes=slot_bytes) for r in range(size)]
        elements = self.lanes[0].area_bytes // _ELEMENT_BYTES
        self.areas = [np.full(elements, np.nan, np.float32) for _ in range(size)]
        self.flags = np.zeros((size, 2, MAX_RANKS), int)

    def stream(
        self, rank: int, calls: Sequence[tuple[Operation, Values]], results: list[Values]
    ) -> Iterator[bool]:
        """Runs one process's calls; yields after each thing done, whether it now waits."""
        lane = self.lanes[rank]
        for operation, x in calls:
            whole = x.nbytes * (lane.size if operation == "all_gather" else 1)
            if operation == "all_reduce":
                out = x
            else:
                size = whole // _ELEMENT_BYTES
                out = np.full(
                    size // lane.size if operation == "reduce_scatter" else size, np.nan, np.float32
                )
            for step in self.steps(lane, operation, whole):
                yield from self._step(rank, step, {"x": x, "out": out})
            results.append(out.copy())
            x[:] = np.nan  # the caller's memory is free for others

    def steps(self, lane: Lane, operation: Operation, num_bytes: int) -> list[Step]:
        return lane.steps(operation, num_bytes)

    def _step(self, rank: int, step: Step, tensors: dict[str, Values]) -> Iterator[bool]:
        def at(place: Place, size: int) -> Values:
            memory = self.areas[place.base] if isinstance(place.base, int) else tensors[place.base]
            begin = place.offset // _ELEMENT_BYTES
            assert begin + size <= len(memory), (step, size)
            return memory[begin : begin + size]

        if isinstance(step, Exchange):
            yield from self._exchange(rank, step.phase)
            return
        size = step.num_bytes // _ELEMENT_BYTES
        if isinstance(step, Copy):
            source, targets = at(step.source, size), [at(step.target, size)]
            sources = [source]
        else:
            lane = self.lanes[rank]
            slots = [at(lane.slot(rank, sender), size) for sender in range(lane.size)]
            slots[rank] = at(step.own, size)
            sources = [slots[rank]] if step.alone else slots
            targets = [at(p, size) for p in (step.target, step.also) if p is not None]
        half = size // 2
        for part in (slice(0, half), slice(half, size)):
            total = sources[0][part].copy()
            for source in sources[1:]:
                total += source[part]
            yield False
            for target in targets:
                target[part] = total
            yield False

    def _exchange(self, rank: int, phase: int) -> Iterator[bool]:
        others = [r for r in range(len(self.lanes)) if r != rank]
        for other in others:
            assert not self.flags[other, phase, rank], "a flag was raised before it was lowered"
            self.flags[other, phase, rank] = 1
            yield False
        for other in others:
            while not self.flags[rank, phase, other]:
                yield True
            self.flags[rank, phase, other] = 0
            yield False


def run(streams: Sequence[Iterator[bool]], seed: int) -> None:
    """Runs streams to their ends; how much faster one is than another is drawn too.

    Raises:
        Deadlock: if none can go on.
    """
    draw = random.Random(seed)
    speeds = {stream: draw.choice([1, 1, 10, 100]) for stream in streams}
    ready, waiting = dict(speeds), set[Iterator[bool]]()
    while ready:
        able = [stream for stream in ready if stream not in waiting]
        if not able:
            raise Deadlock
        stream = draw.choices(able, [ready[stream] for stream in able])[0]
        waits = next(stream, None)
        if waits is None:
            del ready[stream]
        if waits:
            waiting.add(stream)
        else:
            waiting.clear()  # what it did may be what others wait for
