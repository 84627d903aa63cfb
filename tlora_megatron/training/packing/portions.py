"""Packs jobs so that a job's sums, to the bit, do not depend on who trains beside it.

Fair packing (`packing.fill_bins`) deals sequences out to whatever room the others leave, so that
neighbours decide which of a job's sequences are summed together, on which rank and in which round.
Here a job's batch is divided into portions by its own sequences alone. A portion goes into one
micro-batch as a whole or waits, and a job's portions go in their own order: within a micro-batch
their sums are kept apart (`RowGroups.cuts`), so that a gradient is the same bits whether two of
them meet in one micro-batch or run in two rounds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from tlora_megatron.training.packing.packing import (
    Item,
    Placed,
    Round,
    choose_num_micro_batches,
    in_packed_order,
)


class ReplicaRoom(NamedTuple):
    """One replica as portions are dealt out to it: the same whoever trains beside a job."""

    rows: int
    """That a micro-batch may hold."""
    work: int = 1
    """Time of a row, over that of other replicas."""


def next_portion(
    queue: Sequence[Item], *, portion_tokens: int, rooms: Sequence[ReplicaRoom]
) -> tuple[list[list[Item]], list[Item]]:
    """Takes the next portion of a batch: sequences for every replica, and what is left.

    Longest first to the replica that ends first with it, until one does not fit. The first always
    does, however long.

    Args:
        portion_tokens: rows of a portion on the replicas of the least rows; others take more in
            proportion.
    """
    order = sorted(queue, key=lambda item: -item.length)
    longest, least = order[0].length, min(room.rows for room in rooms)
    limits = [
        max(portion_tokens * room.rows // least, longest if longest <= room.rows else 0)
        for room in rooms
    ]
    loads = [0] * len(rooms)
    portion: list[list[Item]] = [[] for _ in rooms]
    for taken, item in enumerate(order):
        rows = [load + item.length for load in loads]
        fitting = [d for d, limit in enumerate(limits) if rows[d] <= limit]
        if not fitting:
            return portion, order[taken:]
        first = min(fitting, key=lambda d: rows[d] * rooms[d].work)
        portion[first].append(item)
        loads[first] += item.length
    return portion, []


def fill_with_portions(
    queues: Sequence[list[Item]],
    *,
    portion_tokens: Sequence[int | None],
    capacity: int,
    dp_size: int,
    pp_size: int,
    first_slot: int = 0,
    num_micro_batches: int | None = None,
    rooms: Sequence[ReplicaRoom] | None = None,
) -> tuple[Round, list[list[Item]]]:
    """Takes a portion of every slot in turn until none fits; a slot without takes a sequence.

    Args:
        portion_tokens: of each slot, on each data-parallel rank, at most `capacity`; None = its
            sequences go one by one to whatever room there is.
        rooms: of unlike replicas; None = `dp_size` times `capacity`.

    Returns:
        The round, and what is left of each queue.
    """
    total = sum(item.length for queue in queues for item in queue)
    if num_micro_batches is None:
        num_micro_batches = choose_num_micro_batches(total, capacity, dp_size, pp_size)
    rooms = rooms or [ReplicaRoom(capacity)] * dp_size
    part = num_micro_batches * sum(r.rows for r in rooms)
    even = [min(r.rows, -(-total * r.rows // part)) for r in rooms]
    room = _Room(queues, num_micro_batches, rooms, even)
    turns = [(first_slot + turn) % len(queues) for turn in range(len(queues))]
    open_slots = [slot for slot in turns if room.left[slot]]
    while open_slots:
        open_slots = [slot for slot in open_slots if room.place(slot, portion_tokens[slot])]
    replicas = tuple(tuple(map(in_packed_order, own)) for own in zip(*room.contents, strict=True))
    return Round(replicas=replicas), room.left


class _Room:
    """The micro-batches of a round while they are filled, and what is left of every slot's batch.

    Args:
        even: rows of each replica's micro-batch that holds its even part of the round.
    """

    def __init__(
        self,
        queues: Sequence[list[Item]],
        num_micro_batches: int,
        rooms: Sequence[ReplicaRoom],
        even: Sequence[int],
    ) -> None:
        # Longest first: what fits only into an empty micro-batch goes while there is one.
        self.left = [sorted(queue, key=lambda item: -item.length) for queue in queues]
        self.contents: list[list[list[Placed]]] = [
            [[] for _ in rooms] for _ in range(num_micro_batches)
        ]
        self._loads = [[0] * len(rooms) for _ in self.contents]
        self._portions = [0] * len(queues)
        self._last = [0] * len(queues)
        """A slot: the micro-batch of its portion before; the next one must not come earlier."""
        self._rooms, self._even = rooms, even
        common = math.lcm(*(room.rows for room in rooms))
        self._scales = [common // room.rows for room in rooms]
        """Makes loads of replicas comparable: shares of their micro-batches."""

    def place(self, slot: int, portion_tokens: int | None) -> bool:
        """Places a slot's next portion or sequence; False if none is left or this one waits."""
        if portion_tokens is None:
            placed = self._place_sequence(slot)
        else:
            placed = self._place_portion(slot, portion_tokens)
        return placed and bool(self.left[slot])

    def _place_sequence(self, slot: int) -> bool:
        item = self.left[slot][0]
        fitting = [
            (load * scale, m, d)
            for m, loads in enumerate(self._loads)
            for d, (load, room, scale) in enumerate(
                zip(loads, self._rooms, self._scales, strict=True)
            )
            if load + item.length <= room.rows
        ]
        if not fitting:
            return False
        _, m, d = min(fitting)
        self.left[slot].pop(0)
        self._add(m, d, [Placed(slot, item)])
        return True

    def _place_portion(self, slot: int, portion_tokens: int) -> bool:
        portion, rest = next_portion(
            self.left[slot], portion_tokens=portion_tokens, rooms=self._rooms
        )
        sizes = [sum(item.length for item in items) for items in portion]
        m = self._choose(self._last[slot], sizes)
        if m is None:
            return False
        for d, items in enumerate(portion):
            self._add(m, d, [Placed(slot, item, self._portions[slot]) for item in items])
        self._last[slot], self.left[slot] = m, rest
        self._portions[slot] += 1
        return True

    def _choose(self, first: int, sizes: Sequence[int]) -> int | None:
        """The earliest micro-batch that a portion leaves within its even part, or the emptiest.

        Earlier ones are filled first: what comes later in a job may only go beside or behind.
        """
        grown = {
            m: [load + size for load, size in zip(self._loads[m], sizes, strict=True)]
            for m in range(first, len(self._loads))
        }
        most = [room.rows for room in self._rooms]
        fitting = [m for m in grown if all(map(operator.le, grown[m], most))]
        within = [m for m in fitting if all(map(operator.le, grown[m], self._even))]
        fullest = {m: max(map(operator.mul, grown[m], self._scales)) for m in fitting}
        return within[0] if within else min(fitting, key=fullest.__getitem__, default=None)

    def _add(self, m: int, d: int, placed: Sequence[Placed]) -> None:
        self.contents[m][d] += placed
        self._loads[m][d] += sum(p.item.length for p in placed)
