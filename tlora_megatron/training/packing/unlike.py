"""Fills the micro-batches of replicas whose budgets differ."""

from __future__ import annotations

from collections.abc import Sequence

from tlora_megatron.training.packing.packing import (
    Item,
    Placed,
    Round,
    choose_num_micro_batches,
    in_packed_order,
)


def fill_unlike(
    queues: Sequence[list[Item]],
    *,
    budgets: Sequence[int],
    pp_size: int,
    first_slot: int = 0,
    num_micro_batches: int | None = None,
) -> tuple[Round, list[list[Item]]]:
    """Takes items from every slot's queue in turn until nothing more fits.

    Args:
        queues: as `packing.fill_bins`, like the rest.
        budgets: tokens that a micro-batch of each replica may hold.
        pp_size: stages of the deepest replica.

    Returns:
        The round, and what is left of each queue.
    """
    count = len(budgets)
    if num_micro_batches is None:
        total = sum(item.length for queue in queues for item in queue)
        num_micro_batches = choose_num_micro_batches(total, sum(budgets) // count, count, pp_size)
    left = [sorted(queue, key=lambda item: -item.length) for queue in queues]
    turns = [(first_slot + turn) % len(left) for turn in range(len(left))]
    rooms = list(budgets) * num_micro_batches
    contents: list[list[Placed]] = [[] for _ in rooms]
    open_slots = [slot for slot in turns if left[slot]]
    while open_slots:
        for slot in list(open_slots):
            # The micro-batch with most room: the longest sequences find those that hold them.
            emptiest = max(range(len(rooms)), key=rooms.__getitem__)
            if rooms[emptiest] < left[slot][0].length:
                open_slots.remove(slot)
                continue
            item = left[slot].pop(0)
            contents[emptiest].append(Placed(slot, item))
            rooms[emptiest] -= item.length
            if not left[slot]:
                open_slots.remove(slot)
    ordered = [in_packed_order(content) for content in contents]
    return Round(replicas=tuple(tuple(ordered[d::count]) for d in range(count))), left
