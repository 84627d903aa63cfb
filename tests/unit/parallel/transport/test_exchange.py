"""Collectives over peer memory: right in every order that GPUs may run their steps in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from tlora_megatron.ops.lora.cuda_arguments import MAX_RANKS
from tlora_megatron.parallel.copy_engine import (
    Copy,
    Exchange,
    Lane,
    Operation,
    Place,
    Step,
    slot_bytes,
)

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


OPERATIONS: tuple[Operation, ...] = get_args(Operation)
SLOT = 512
Call = tuple[Operation, list[Values]]


def expected(operation: Operation, values: list[Values]) -> list[Values]:
    """Every process's result, summed in rank order."""
    size = len(values)
    if operation == "all_gather":
        return [np.concatenate(values)] * size
    total = values[0].copy()
    for value in values[1:]:
        total += value
    if operation == "all_reduce":
        return [total] * size
    return np.split(total, size)


def draw_calls(size: int, count: int, seed: int) -> list[Call]:
    draw = random.Random(seed)
    values = np.random.default_rng(seed)
    calls = []
    for _ in range(count):
        operation = draw.choice(OPERATIONS)
        # Up to three rounds; an all-reduce's may be cut anywhere, others' are whole rows.
        elements = draw.choice([1, 3, 4, 5, 127, 128, 129, 300])
        elements *= 1 if operation == "all_gather" else size
        elements -= operation == "all_reduce" and draw.choice([0, 1]) and elements > 1
        calls.append(
            (operation, [values.standard_normal(elements, np.float32) for _ in range(size)])
        )
    return calls


def check(machine: Machine, calls: list[Call], seed: int) -> None:
    size = len(machine.lanes)
    results: list[list[Values]] = [[] for _ in range(size)]
    wanted = [expected(operation, values) for operation, values in calls]
    streams = []
    for rank in range(size):
        own = [(operation, values[rank].copy()) for operation, values in calls]
        streams.append(machine.stream(rank, own, results[rank]))
    run(streams, seed)
    for number, per_rank in enumerate(wanted):
        for rank, value in enumerate(per_rank):
            np.testing.assert_array_equal(results[rank][number], value, str((number, rank)))
    assert not machine.flags.any()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_collectives_in_any_order_of_steps(size: int, seed: int) -> None:
    check(Machine(size, SLOT), draw_calls(size, 12, seed), seed)


class _Without(Machine):
    """Leaves steps out."""

    leaves_out: Callable[[Operation, Step], bool]

    def steps(self, lane: Lane, operation: Operation, num_bytes: int) -> list[Step]:
        steps = super().steps(lane, operation, num_bytes)
        return [step for step in steps if not self.leaves_out(operation, step)]


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_phase_may_be_left_out(operation: Operation, phase: int) -> None:
    """The machine finds races: without any one of its phases, a collective goes wrong."""
    values = np.random.default_rng(0)
    found = 0
    for seed in range(20):
        machine = _Without(3, SLOT)
        machine.leaves_out = lambda op, step: op == operation and step == Exchange(phase)
        calls = [(operation, [values.standard_normal(30, np.float32) for _ in range(3)])] * 3
        try:
            check(machine, calls, seed)
        except (AssertionError, Deadlock):
            found += 1
    assert found


def test_slots_hold_the_largest_tensor_in_one_round() -> None:
    for size in range(2, MAX_RANKS + 1):
        for num_bytes in (1, 1000, 512 * size, 12345 * size):
            lane = Lane(rank=size - 1, size=size, slot_bytes=slot_bytes(num_bytes, size))
            steps = lane.steps("all_reduce", num_bytes)
            assert [s for s in steps if isinstance(s, Exchange)] == [Exchange(0), Exchange(1)]


@pytest.mark.parametrize("size", range(2, MAX_RANKS + 1))
def test_at_each_turn_every_process_has_another_peer(size: int) -> None:
    lanes = [Lane(rank=r, size=size, slot_bytes=SLOT) for r in range(size)]
    for turn in zip(*(lane.peers for lane in lanes), strict=True):
        assert len(set(turn)) == size
    assert all(sorted((*lane.peers, lane.rank)) == list(range(size)) for lane in lanes)


def test_copies_cross_the_link_once() -> None:
    """Each process sends, and fetches, (n - 1) / n of the tensor: what a ring moves."""
    lane = Lane(rank=1, size=4, slot_bytes=1024)
    copies = [s for s in lane.steps("all_reduce", 4096) if isinstance(s, Copy)]
    assert sum(c.num_bytes for c in copies if c.source.base == "x") == 3072
    assert sum(c.num_bytes for c in copies if c.target.base == "out") == 3072
