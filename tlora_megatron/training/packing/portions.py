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
from collections.abc import Sequence

from tlora_megatron.training.packing.packing import (
    Item,
    Placed,
    Round,
    choose_num_micro_batches,
    in_packed_order,
)


def next_portion(
    queue: Sequence[Item], *, portion_tokens: int, dp_size: int
) -> tuple[list[list[Item]], list[Item]]:
    """Takes the next portion of a batch: sequences for every rank, and what is left.

    Longest first to the lightest rank, until one does not fit. The first always does, however long.
    """
    order = sorted(queue, key=lambda item: -item.length)
    limit = max(portion_tokens, order[0].length)
    loads = [0] * dp_size
    portion: list[list[Item]] = [[] for _ in loads]
    for taken, item in enumerate(order):
        lightest = min(range(dp_size), key=loads.__getitem__)
        if loads[lightest] + item.length > limit:
            return portion, order[taken:]
        portion[lightest].append(item)
        loads[lightest] += item.length
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
) -> tuple[Round, list[list[Item]]]:
    """Takes a portion of every slot in turn until none fits; a slot without takes a sequence.

    Args:
        portion_tokens: of each slot, on each data-parallel rank, at most `capacity`; None = its
            sequences go one by one to whatever room there is.
        queues: as `packing.fill_bins`, like the rest.

    Returns:
        The round, and what is left of each queue.
    """
    total = sum(item.length for queue in queues for item in queue)
    if num_micro_batches is None:
        num_micro_batches = choose_num_micro_batches(total, capacity, dp_size, pp_size)
    even = min(capacity, math.ceil(total / (num_micro_batches * dp_size)))
    room = _Room(queues, num_micro_batches, dp_size, capacity=capacity, even=even)
    turns = [(first_slot + turn) % len(queues) for turn in range(len(queues))]
    open_slots = [slot for slot in turns if room.left[slot]]
    while open_slots:
        open_slots = [slot for slot in open_slots if room.place(slot, portion_tokens[slot])]
    replicas = tuple(tuple(map(in_packed_order, own)) for own in zip(*room.contents, strict=True))
    return Round(replicas=replicas), room.left


class _Room:
    """The micro-batches of a round while they are filled, and what is left of every slot's batch.

    Args:
        even: rows of a micro-batch that holds its even part of the round.
    """

    def __init__(
        self,
        queues: Sequence[list[Item]],
        num_micro_batches: int,
        dp_size: int,
        *,
        capacity: int,
        even: int,
    ) -> None:
        # Longest first: what fits only into an empty micro-batch goes while there is one.
        self.left = [sorted(queue, key=lambda item: -item.length) for queue in queues]
        self.contents: list[list[list[Placed]]] = [
            [[] for _ in range(dp_size)] for _ in range(num_micro_batches)
        ]
        self._loads = [[0] * dp_size for _ in self.contents]
        self._portions = [0] * len(queues)
        self._last = [0] * len(queues)
        """A slot: the micro-batch of its portion before; the next one must not come earlier."""
        self._capacity, self._even = capacity, even

    def place(self, slot: int, portion_tokens: int | None) -> bool:
        """Places a slot's next portion or sequence; False if none is left or this one waits."""
        if portion_tokens is None:
            placed = self._place_sequence(slot)
        else:
            placed = self._place_portion(slot, portion_tokens)
        return placed and bool(self.left[slot])

    def _place_sequence(self, slot: int) -> bool:
        item = self.left[slot][0]
        bins = [(m, d) for m, loads in enumerate(self._loads) for d in range(len(loads))]
        m, d = min(bins, key=lambda at: self._loads[at[0]][at[1]])
        if self._loads[m][d] + item.length > self._capacity:
            return False
        self.left[slot].pop(0)
        self._add(m, d, [Placed(slot, item)])
        return True

    def _place_portion(self, slot: int, portion_tokens: int) -> bool:
        dp_size = len(self._loads[0])
        portion, rest = next_portion(
            self.left[slot], portion_tokens=portion_tokens, dp_size=dp_size
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
            m: max(load + size for load, size in zip(self._loads[m], sizes, strict=True))
            for m in range(first, len(self._loads))
        }
        fitting = [m for m in grown if grown[m] <= self._capacity]
        within = [m for m in fitting if grown[m] <= self._even]
        return within[0] if within else min(fitting, key=grown.__getitem__, default=None)

    def _add(self, m: int, d: int, placed: Sequence[Placed]) -> None:
        self.contents[m][d] += placed
        self._loads[m][d] += sum(p.item.length for p in placed)
