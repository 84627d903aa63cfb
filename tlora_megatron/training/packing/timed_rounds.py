"""Shares the sequences of a round out among replicas by predicted time.

A round holds `depth` micro-batches of rows a replica. With more than one, a long sequence on one
replica meets many short ones on another, and all end together; each replica cuts its sequences into
micro-batches by itself. Which sequences a batch has, their weights and their dropout depend on none
of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlora_megatron.model.deployment import ReplicaRate
from tlora_megatron.model.dispatch import admit, predicted_ends_ps, share_out, turns
from tlora_megatron.training.packing.packing import (
    Item,
    MicroBatchItems,
    Placed,
    Round,
    choose_num_micro_batches,
    in_packed_order,
)


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
) -> tuple[Round, list[list[Item]]]:
    """Takes items from every slot's queue in turn until the round is full, and shares them out.

    Args:
        queues: what is left of each slot's batch; empty for a slot that waits.
        first_slot: has the first turn, modulo the number of slots.

    Returns:
        The round, and what is left of each queue.
    """
    left = [
        [queue[i] for i in turns([item.length for item in queue], rule.rates)] for queue in queues
    ]
    lengths = [[item.length for item in queue] for queue in left]
    depth = max(rule.depth, _filling(sum(map(sum, lengths)), rule))
    rooms = [rate.longest for rate in rule.rates] * depth
    taken = admit(lengths, first_slot=first_slot, rooms=rooms)
    placed = [
        Placed(slot, item)
        for slot, (queue, count) in enumerate(zip(left, taken, strict=True))
        for item in queue[:count]
    ]
    shares = share_out([p.item.length for p in placed], rule.rates, rule.stages)
    replicas = tuple(tuple(_items(placed, places) for places in share) for share in shares)
    rest = [queue[count:] for queue, count in zip(left, taken, strict=True)]
    return Round(replicas=replicas), rest


def _filling(total_tokens: int, rule: RoundRule) -> int:
    """Micro-batches a replica that fill a pipeline, as without the rule; 1 without a pipeline."""
    mean = max(1, sum(rate.longest for rate in rule.rates) // len(rule.rates))
    return choose_num_micro_batches(total_tokens, mean, len(rule.rates), max(rule.stages))


def _items(placed: Sequence[Placed], places: Sequence[int]) -> MicroBatchItems:
    return in_packed_order([placed[i] for i in places])
