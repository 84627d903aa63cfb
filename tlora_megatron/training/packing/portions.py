"""Packs rounds by portions, whose sums depend on no other job, and shares rounds out by time.

A slot without portions has its sequences dealt out to whatever room the others leave, so that
neighbours decide which of a job's sequences are summed together, on which rank and in which round.
Else a job's batch is divided into portions by its own sequences alone. A portion goes into one
micro-batch as a whole or waits, and a job's portions go in their own order: within a micro-batch
their sums are kept apart (`RowGroups.cuts`), so that a gradient is the same bits whether two of
them meet in one micro-batch or run in two rounds.

A sequence that fits without recompute runs beside others of which that is true; long ones run apart
from them, with recompute. Micro-batches of much recompute come first: allocators divide large
blocks, and cannot join small ones. Which sequences a batch has depends on none of this.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tlora_megatron.model.cp_dispatch import CpRates, share_among_teams, team_ends_ps
from tlora_megatron.model.dispatch import ReplicaRate, admit, predicted_ends_ps, share_out, turns
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.model.micro_batches import choose_num_micro_batches, cut
from tlora_megatron.training.packing.packing import (
    Item,
    MicroBatch,
    MicroBatchItems,
    Placed,
    Round,
    in_packed_order,
)


class FilledRound(NamedTuple):
    """One round before it is packed; the same on all ranks."""

    round: Round
    """The items of every data-parallel replica."""
    left: list[list[Item]]
    """Each slot's items that did not fit."""


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


def fill_bins(
    queues: Sequence[list[Item]],
    *,
    capacity: int,
    dp_size: int,
    pp_size: int,
    first_slot: int = 0,
    num_micro_batches: int | None = None,
    portion_tokens: Sequence[int | None] | None = None,
    rooms: Sequence[ReplicaRoom] | None = None,
) -> FilledRound:
    """Takes a portion of every slot in turn until none fits; a slot without takes a sequence.

    Args:
        queues: what is left of each slot's batch; empty for a slot that waits.
        first_slot: has the first turn, modulo the number of slots. Where one sequence fills a
            micro-batch, it is the only slot that gets any room, so callers go round.
        num_micro_batches: on every data-parallel rank; None = `choose_num_micro_batches`.
        portion_tokens: of each slot, on each data-parallel rank, at most `capacity`; None = its
            sequences go one by one to the lightest micro-batch.
        rooms: of unlike replicas; None = `dp_size` times `capacity`.
    """
    total = sum(item.length for queue in queues for item in queue)
    if num_micro_batches is None:
        num_micro_batches = choose_num_micro_batches(total, capacity, dp_size, pp_size)
    portion_tokens = portion_tokens or [None] * len(queues)
    rooms = rooms or [ReplicaRoom(capacity)] * dp_size
    part = num_micro_batches * sum(r.rows for r in rooms)
    even = [min(r.rows, -(-total * r.rows // part)) for r in rooms]
    room = _Room(queues, num_micro_batches, rooms, even)
    turns = [(first_slot + turn) % len(queues) for turn in range(len(queues))]
    open_slots = [slot for slot in turns if room.left[slot]]
    while open_slots:
        open_slots = [slot for slot in open_slots if room.place(slot, portion_tokens[slot])]
    replicas = tuple(tuple(map(in_packed_order, own)) for own in zip(*room.contents, strict=True))
    return FilledRound(Round(replicas=replicas), room.left)


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


def cut_round(content: Round, table: RecomputeTable, padding: int = 0) -> Round:
    """Cuts the part of every replica that has any items anew.

    Args:
        padding: rows that a micro-batch may get beside its items.
    """
    replicas = []
    for whole in content.replicas:
        placed = list(itertools.chain(*whole))
        if any(p.portion is not None for p in placed):
            replicas.append(_cut_portions(placed, table, padding))
        elif placed:
            parts = cut_by_recompute([p.item.length for p in placed], table, padding)
            replicas.append(tuple(_items(placed, part) for part in parts))
        else:
            replicas.append(whole)
    return Round(replicas=tuple(replicas))


def cut_by_recompute(
    lengths: Sequence[int], table: RecomputeTable, padding: int = 0
) -> list[list[int]]:
    """Cuts one replica's sequences into micro-batches, those of one recompute as `dispatch.cut`.

    Returns:
        Places in `lengths`, by micro-batch.
    """
    alike: dict[int, list[int]] = {}
    for place, rows in enumerate(lengths):
        alike.setdefault(table.room_around(rows + padding) - padding, []).append(place)
    return [
        [alike[budget][i] for i in part]
        for budget in sorted(alike, reverse=True)
        for part in cut([lengths[place] for place in alike[budget]], budget)
    ]


def _cut_portions(
    placed: Sequence[Placed], table: RecomputeTable, padding: int
) -> tuple[MicroBatchItems, ...]:
    """Keeps portions whole and each job's in order: the next goes beside the last or behind it."""
    units: dict[tuple[int, int, int], list[Placed]] = {}
    for p in placed:
        own = p.item.index if p.portion is None else -1
        units.setdefault((p.portion or 0, p.slot, own), []).append(p)
    parts: list[list[Placed]] = []
    room, budget = 0, 0
    for _, unit in sorted(units.items(), key=lambda entry: entry[0]):
        rows = sum(p.item.length for p in unit)
        around = table.room_around(rows + padding) - padding
        if not parts or around != budget or rows > room:
            parts.append([])
            room = budget = around
        parts[-1] += unit
        room -= rows
    return tuple(map(in_packed_order, parts))


def with_recompute(
    micro_batch: MicroBatch, table: RecomputeTable, cp_size: int | None = None
) -> MicroBatch:
    """Names a packed micro-batch's recompute, for the batch that an engine runs.

    Args:
        cp_size: context-parallel ranks of a replica, each with as many rows as this one's; None =
            the micro-batch's.
    """
    batch = micro_batch.executed
    recompute = table.of(batch.view.num_tokens * (cp_size or batch.view.cp_size))
    batch = replace(batch, view=batch.view.under(recompute))
    if micro_batch.split is None:
        return MicroBatch(batch)
    return micro_batch._replace(split=micro_batch.split._replace(batch=batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRule:
    """The depth of rounds, and the speeds by which they are shared out."""

    rates: tuple[ReplicaRate, ...]
    """Predicted speed of each data-parallel replica."""
    depth: int
    """Micro-batches a replica that a round holds."""
    stages: tuple[int, ...]
    """Pipeline stages of each replica."""

    def within(self, capacity: int) -> RoundRule:
        """The rule where micro-batches may hold no more than so many rows."""
        rates = (replace(r, longest=min(r.longest, capacity)) for r in self.rates)
        return replace(self, rates=tuple(rates))

    def portion_micro_batches(self, queues: Sequence[Sequence[Item]]) -> int:
        """Micro-batches a replica in a round of portions: as many as are needed, up to `depth`.

        Portions are dealt out to replicas as without the rule, by their own job's sequences.
        """
        rows = sum(item.length for queue in queues for item in queue)
        needed = math.ceil(rows / sum(rate.longest for rate in self.rates))
        return min(max(1, needed), self.depth)


def round_ends_ps(filled: Round, rates: Sequence[ReplicaRate]) -> list[int]:
    """Predicted time of each replica for its part of a round."""
    shares = [
        [[placed.item.length for placed in items] for items in own] for own in filled.replicas
    ]
    return predicted_ends_ps(shares, rates)


def fill_by_time(
    queues: Sequence[list[Item]], rule: RoundRule, *, first_slot: int = 0
) -> FilledRound:
    """Takes items from every slot's queue in turn until the round is full, and shares them out.

    Args:
        queues: what is left of each slot's batch; empty for a slot that waits.
    """
    left = [
        [queue[i] for i in turns([item.length for item in queue], rule.rates)] for queue in queues
    ]
    lengths = [[item.length for item in queue] for queue in left]
    # A pipeline is filled as without the rule.
    mean = max(1, sum(rate.longest for rate in rule.rates) // len(rule.rates))
    needed = choose_num_micro_batches(
        sum(map(sum, lengths)), mean, len(rule.rates), max(rule.stages)
    )
    rooms = [rate.longest for rate in rule.rates] * max(rule.depth, needed)
    taken = admit(lengths, first_slot=first_slot, rooms=rooms)
    placed = [
        Placed(slot, item)
        for slot, (queue, count) in enumerate(zip(left, taken, strict=True))
        for item in queue[:count]
    ]
    shares = share_out([p.item.length for p in placed], rule.rates, rule.stages)
    replicas = tuple(tuple(_items(placed, places) for places in share) for share in shares)
    rest = [queue[count:] for queue, count in zip(left, taken, strict=True)]
    return FilledRound(Round(replicas=replicas), rest)


def _items(placed: Sequence[Placed], places: Sequence[int]) -> MicroBatchItems:
    return in_packed_order([placed[i] for i in places])


def form_teams(content: Round, rates: CpRates, table: RecomputeTable | None = None) -> Round:
    """Cuts the part of every replica anew, each micro-batch for the team that is to run it.

    Which items a replica has stays as it is. A team's micro-batch holds its share of the rows that
    one of the whole replica holds, so that a rank never has more of them.

    Args:
        table: the recompute of micro-batches by the rows of whole replicas.
    """

    def cut_for(lengths: Sequence[int], size: int) -> list[list[int]]:
        if table is None:
            return cut(lengths, rates.of(size).longest)
        return cut_by_recompute(lengths, table.of_share(size, rates.cp_size))

    replicas, teams = [], []
    for whole in content.replicas:
        placed = list(itertools.chain(*whole))
        shares = share_among_teams([p.item.length for p in placed], rates, cut_for)
        replicas.append(tuple(_items(placed, places) for places in shares.places))
        teams.append(shares.teams)
    return Round(replicas=tuple(replicas), teams=tuple(teams))


def rank_ends_ps(filled: Round, rates: CpRates) -> list[int]:
    """Predicted time of each rank for its part of a round, a replica after the other."""
    assert filled.teams is not None, "the round has been shared out among teams"
    ends = []
    for own, teams in zip(filled.replicas, filled.teams, strict=True):
        lengths = [[placed.item.length for placed in items] for items in own]
        ends += team_ends_ps(list(zip(teams, lengths, strict=True)), rates)
    return ends
