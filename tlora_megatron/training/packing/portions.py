"""Packs jobs so that a job's sums, to the bit, do not depend on who trains beside it.

Fair packing (`packing.fill_bins`) deals sequences out to whatever room the others leave, so that
neighbours decide which of a job's sequences are summed together, on which rank and in which round.
Here a job's batch is divided into portions by its own sequences alone; a portion goes into one
round as a whole or waits. The cost is room: a portion that does not fit leaves some empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from tlora_megatron.training.packing.packing import (
    Bins,
    Item,
    Placed,
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
    portion_tokens: int,
    capacity: int,
    dp_size: int,
    pp_size: int,
    first_slot: int = 0,
    num_micro_batches: int | None = None,
) -> tuple[Bins, list[list[Item]]]:
    """Gives every slot's next portion to one micro-batch of the round, as far as there is room.

    At most one portion a slot: of several, the micro-batches' order would be their sums'.

    Args:
        portion_tokens: on each data-parallel rank; at most `capacity`.
        queues: as `packing.fill_bins`, like the rest.

    Returns:
        The bins, and what is left of each queue.
    """
    if num_micro_batches is None:
        total = sum(item.length for queue in queues for item in queue)
        num_micro_batches = choose_num_micro_batches(total, capacity, dp_size, pp_size)
    loads = [[0] * dp_size for _ in range(num_micro_batches)]
    contents: list[list[list[Placed]]] = [[[] for _ in load] for load in loads]
    left = [list(queue) for queue in queues]
    turns = [(first_slot + turn) % len(left) for turn in range(len(left))]
    for slot in turns:
        if not left[slot]:
            continue
        portion, rest = next_portion(left[slot], portion_tokens=portion_tokens, dp_size=dp_size)
        emptiest = min(range(num_micro_batches), key=lambda m: max(loads[m]))
        grown = [
            load + sum(item.length for item in items)
            for load, items in zip(loads[emptiest], portion, strict=True)
        ]
        if max(grown) <= capacity:
            loads[emptiest], left[slot] = grown, rest
            for content, items in zip(contents[emptiest], portion, strict=True):
                content += [Placed(slot, item) for item in items]
    ordered = tuple(in_packed_order(content) for ranks in contents for content in ranks)
    return Bins(num_micro_batches=num_micro_batches, dp_size=dp_size, contents=ordered), left
