"""Chooses which sequences enter a round, and which replica runs each.

Admission is apart from assignment: jobs take turns until the round holds `depth` micro-batches a
replica, and only then are sequences given to replicas, by predicted time. Everything is
computed in whole numbers, so that every process finds the same without a word to the others.

The bound of unlike replicas is the dual of their linear program: for prices p of the kinds, no
round ends before `sum over sequences of the least p * cost` / `sum over replicas of p`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tlora_megatron.model.micro_batches import cut, largest_first

_ONE = 1 << 24
"""Fixed-point 1 of prices and steps."""
_FIRST_STEP, _LATER_STEP, _PRICE_STEPS = (3, 5), (9, 10), 48
"""Share of the price that the first step in search of prices may change, each later step's share of
the one before, and their number. Of the schedules that were tried on 200 drawn mixes (2 to 4 kinds,
40 to 90 sequences a replica) this leaves 0.3 % to the bound at most; steps that fall with the
square root of their number leave 3.4 %, twice as long first ones do not converge."""
_NEVER = 1 << 200
"""Cost of a sequence where it does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRate:
    """Predicted time that one replica takes for its part of a round.

    A sequence of x rows takes `token_ps * x + square_ps * x**2` picoseconds.
    """

    token_ps: int
    """Picoseconds a row, forward and backward, recompute included."""
    square_ps: int
    """Picoseconds a squared row of a sequence: attention."""
    fixed_ps: int = 0
    """Picoseconds a micro-batch, however many rows it has."""
    longest: int
    """Rows that one of its micro-batches may hold, and so the longest sequence it may be given."""

    def __post_init__(self) -> None:
        for name, least in (("token_ps", 1), ("square_ps", 0), ("fixed_ps", 0), ("longest", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")

    def sequence_ps(self, rows: int) -> int:
        """Picoseconds of a sequence of so many rows."""
        return (self.token_ps + self.square_ps * rows) * rows


def admit(queues: Sequence[Sequence[int]], *, first_slot: int, rooms: Sequence[int]) -> list[int]:
    """Counts how many sequences of each slot's queue enter a round.

    Slots take turns, a sequence each, until their next one fits nowhere. A sequence takes its rows
    of the emptiest room, as if rounds were packed so: jobs then share a round in the same way
    however it is shared out among replicas. The slot with the first turn always gets in.

    Args:
        queues: rows of each slot's sequences, in the order to take them from.
        first_slot: has the first turn, modulo the number of slots; callers go round.
        rooms: rows of each micro-batch of the round, over all replicas.
    """
    taken = [0] * len(queues)
    turns = [(first_slot + turn) % len(queues) for turn in range(len(queues))]
    open_slots = [slot for slot in turns if queues[slot]]
    emptiest = [-room for room in rooms]
    heapq.heapify(emptiest)
    while open_slots:
        staying = []
        for slot in open_slots:
            rows = queues[slot][taken[slot]]
            if rows > -emptiest[0]:
                continue
            heapq.heapreplace(emptiest, emptiest[0] + rows)
            taken[slot] += 1
            if taken[slot] < len(queues[slot]):
                staying.append(slot)
        open_slots = staying
    return taken


def turns(lengths: Sequence[int], rates: Sequence[ReplicaRate]) -> list[int]:
    """Orders the sequences of one batch as they are to enter rounds.

    Longest first, since what fits only into an empty micro-batch goes while there is one. Where
    replicas are unlike, any first part has about the whole batch's lengths: rounds of long ones
    only would leave those idle that cannot hold them, and rounds of short ones the others.

    Returns:
        Places in `lengths`.
    """
    order = largest_first(lengths)
    if len(set(rates)) == 1:
        return order
    digits = max(1, (len(order) - 1).bit_length())
    mirrored = (int(f"{number:0{digits}b}"[::-1], 2) for number in range(1 << digits))
    return [order[place] for place in mirrored if place < len(order)]


def assign(lengths: Sequence[int], rates: Sequence[ReplicaRate]) -> list[int]:
    """Gives every sequence to a replica so that all end at about the same time.

    Longest first to the replica that ends first. Among unlike replicas, to the kind whose price for
    it is lowest, of those that end in time; then the latest replica gives away what helps.

    Returns:
        The number of each sequence's replica.

    Raises:
        ValueError: if no replica can hold a sequence.
    """
    longest = max(rate.longest for rate in rates)
    if lengths and max(lengths) > longest:
        raise ValueError(
            f"sequences must be at most {longest} rows, which a replica can hold, "
            f"got {max(lengths)}"
        )
    order = largest_first(lengths)
    if len(set(rates)) == 1:
        own = deal(order, lengths, rates[0], [0] * len(rates))
    else:
        own = _Unlike(lengths, order, rates).assign()
    replica_of = {i: replica for replica, places in enumerate(own) for i in places}
    return [replica_of[i] for i in range(len(lengths))]


def share_out(
    lengths: Sequence[int], rates: Sequence[ReplicaRate], stages: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """Gives every sequence to a replica and cuts what each has into micro-batches.

    Args:
        stages: of each replica's pipeline, which needs as many micro-batches to be full. Without
            sequences it has one empty micro-batch; a replica without a pipeline has none. None =
            there are no pipelines.

    Returns:
        Places in `lengths`, by replica and micro-batch.
    """
    own: list[list[int]] = [[] for _ in rates]
    for i, replica in enumerate(assign(lengths, rates)):
        own[replica].append(i)
    shares = []
    for places, rate, depth in zip(own, rates, stages or [1] * len(rates), strict=True):
        fewest = 0 if depth == 1 else depth if places else 1
        parts = cut([lengths[i] for i in places], rate.longest, fewest)
        shares.append([[places[i] for i in part] for part in parts])
    return shares


def predicted_ends_ps(
    shares: Sequence[Sequence[Sequence[int]]], rates: Sequence[ReplicaRate]
) -> list[int]:
    """Predicted time of each replica, from the rows of its sequences by micro-batch."""
    return [
        sum(rate.fixed_ps + sum(map(rate.sequence_ps, lengths)) for lengths in share)
        for share, rate in zip(shares, rates, strict=True)
    ]


def deal(
    order: Sequence[int], lengths: Sequence[int], rate: ReplicaRate, ends: list[int]
) -> list[list[int]]:
    """Deals sequences to what ends first, of one speed; brings the ends so far up to date."""
    own: list[list[int]] = [[] for _ in ends]
    free = [(end, number) for number, end in enumerate(ends)]
    heapq.heapify(free)
    for i in order:
        end, number = free[0]
        own[number].append(i)
        ends[number] = end + rate.sequence_ps(lengths[i])
        heapq.heapreplace(free, (ends[number], number))
    return own


@dataclass(slots=True)
class _Class:
    """Sequences of about one length, which fit into the same kinds."""

    rows: int = 0
    squares: int = 0
    longest: int = 0

    def add(self, rows: int) -> None:
        self.rows += rows
        self.squares += rows * rows
        self.longest = max(self.longest, rows)


class _Unlike:
    """One assignment to replicas of several kinds."""

    def __init__(
        self, lengths: Sequence[int], order: Sequence[int], rates: Sequence[ReplicaRate]
    ) -> None:
        self._lengths, self._order = lengths, order
        self._kinds = list(dict.fromkeys(rates))
        self._kind = [self._kinds.index(rate) for rate in rates]
        self._counts = [self._kind.count(kind) for kind in range(len(self._kinds))]
        self._ends = [0] * len(rates)
        self._own: list[list[int]] = [[] for _ in rates]
        self._costs = {
            rows: [
                kind.sequence_ps(rows) if rows <= kind.longest else _NEVER for kind in self._kinds
            ]
            for rows in set(lengths)
        }

    def assign(self) -> list[list[int]]:
        prices, bound = self.find_prices()
        self._deal(prices, bound)
        for _ in range(4 * len(self._ends)):
            if not self._move():
                break
        return self._own

    def find_prices(self) -> tuple[list[int], int]:
        """Raises the price of kinds with more than their part; returns the best.

        Beside them: the time before which no assignment ends.
        """
        costs = [
            [
                kind.token_ps * c.rows + kind.square_ps * c.squares
                if c.longest <= kind.longest
                else _NEVER
                for kind in self._kinds
            ]
            for c in self._classes()
        ]
        prices = [_ONE] * len(self._kinds)
        best, bound = prices, 0
        size = _ONE * _FIRST_STEP[0] // _FIRST_STEP[1]
        for _ in range(_PRICE_STEPS):
            loads, value = self._loads(costs, prices)
            weight = sum(p * n for p, n in zip(prices, self._counts, strict=True))
            if -(-value // weight) > bound:
                best, bound = prices, -(-value // weight)
            prices = self._stepped(prices, loads, size)
            size = size * _LATER_STEP[0] // _LATER_STEP[1]
        longest = max((min(own) for own in self._costs.values()), default=0)
        return best, max(bound, longest)

    def _classes(self) -> list[_Class]:
        limits = sorted({kind.longest for kind in self._kinds})
        classes: dict[tuple[int, int, int], _Class] = {}
        for rows in self._lengths:
            bits = rows.bit_length()
            key = bisect_left(limits, rows), bits, rows >> max(0, bits - 4)
            if key not in classes:
                classes[key] = _Class()
            classes[key].add(rows)
        return list(classes.values())

    def _loads(
        self, costs: Sequence[Sequence[int]], prices: Sequence[int]
    ) -> tuple[list[int], int]:
        """Time of each kind, and the cost of all, if each class goes where it is cheapest."""
        loads, value = [0] * len(prices), 0
        for own in costs:
            priced = [p * c for p, c in zip(prices, own, strict=True)]
            least = min(priced)
            kind = priced.index(least)
            loads[kind] += own[kind]
            value += least
        return loads, value

    def _stepped(self, prices: Sequence[int], loads: Sequence[int], step: int) -> list[int]:
        total, replicas = max(1, sum(loads)), len(self._ends)
        moved = []
        for price, load, count in zip(prices, loads, self._counts, strict=True):
            excess = min(_ONE, load * replicas * _ONE // (count * total) - _ONE)
            moved.append(max(1, price + price * excess // _ONE * step // _ONE))
        scale = sum(p * n for p, n in zip(moved, self._counts, strict=True))
        return [max(1, p * _ONE * replicas // scale) for p in moved]

    def _deal(self, prices: Sequence[int], bound: int) -> None:
        """Longest first to the kind that ends within the bound at the lowest price."""
        heaps = [
            [(0, replica) for replica, kind in enumerate(self._kind) if kind == number]
            for number in range(len(self._kinds))
        ]
        for i in self._order:
            costs = self._costs[self._lengths[i]]
            ends = [h[0][0] + cost for h, cost in zip(heaps, costs, strict=True)]
            kind = min(
                range(len(heaps)), key=lambda k: (max(0, ends[k] - bound), prices[k] * costs[k])
            )
            end, replica = heaps[kind][0]
            heapq.heapreplace(heaps[kind], (end + costs[kind], replica))
            self._own[replica].append(i)
            self._ends[replica] = end + costs[kind]

    def _move(self) -> bool:
        """Moves one sequence off the latest replica if the two then end sooner."""
        latest = max(range(len(self._ends)), key=self._ends.__getitem__)
        top, kind = self._ends[latest], self._kind[latest]
        firsts: dict[int, int] = {}
        for replica in sorted(range(len(self._ends)), key=self._ends.__getitem__):
            firsts.setdefault(self._kind[replica], replica)
        found = (top, -1, -1)
        for i in self._own[latest]:
            costs = self._costs[self._lengths[i]]
            for other, replica in firsts.items():
                if replica != latest:
                    end = max(self._ends[replica] + costs[other], top - costs[kind])
                    found = min(found, (end, i, replica))
        if found[1] < 0:
            return False
        _, i, replica = found
        costs = self._costs[self._lengths[i]]
        self._own[latest].remove(i)
        self._own[replica].append(i)
        self._ends[latest] -= costs[kind]
        self._ends[replica] += costs[self._kind[replica]]
        return True
