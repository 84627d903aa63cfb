"""Models nano-batches: how many there are, what they hide, and how many are fastest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.memory import ROW_TILE
from tlora_megatron.planner.rounds.load import RoundLoad

MOST_NANO_BATCHES = 4
"""Most nano-batches that a run tries (`training.nano.controller`)."""


def num_parts(plan: Plan, load: RoundLoad) -> int:
    """Number of nano-batches of a micro-batch: at most its sequences; 1 if it cannot be split."""
    if not _can_split(plan):
        return 1
    sequences = load.sequences / (load.micro_batches * plan.dp_size)
    return max(1, min(plan.num_nano_batches, int(sequences)))


def full_capacity(plan: Plan, longest: int) -> int:
    """Rows of a micro-batch that jobs may fill where all `micro_batch_tokens` are computed.

    Nano-batches keep some for their padding, unless the longest sequence needs them.
    """
    budget, parts = plan.micro_batch_tokens, plan.num_nano_batches
    if parts == 1:
        return budget
    multiple = math.lcm(ROW_TILE, plan.tp_size, 2) * plan.cp_size
    room = budget - min(parts * (multiple - 1), budget // 8)
    return room if longest <= room else budget


def exposed_share(parts: int, compute_s: float, comm_s: float, nano_overlap: float) -> float:
    """Share of a layer's communication that nano-batches do not hide.

    They hide the profile's share, but not more than the other nano-batches' compute covers.
    """
    if comm_s <= 0.0:
        return 1.0
    return 1.0 - min(nano_overlap, (parts - 1) / parts * compute_s / comm_s)


def fastest_split(plan: Plan, step_time_s: Callable[[Plan], float]) -> Plan:
    """The plan with its fastest number of nano-batches; the number grows as long as that helps."""
    if not _can_split(plan):
        return plan
    time_s = step_time_s(plan)
    for count in range(plan.num_nano_batches + 1, MOST_NANO_BATCHES + 1):
        tried = replace(plan, num_nano_batches=count)
        tried_s = step_time_s(tried)
        if tried_s >= time_s:
            break
        plan, time_s = tried, tried_s
    return plan


def splits(plan: Plan) -> list[Plan]:
    """The plan with each number of nano-batches that `fastest_split` may choose."""
    most = MOST_NANO_BATCHES if _can_split(plan) else plan.num_nano_batches
    counts = range(plan.num_nano_batches, most + 1)
    return [replace(plan, num_nano_batches=count) for count in counts]


def _can_split(plan: Plan) -> bool:
    return plan.tp_size > 1 and plan.cp_size == 1 and plan.lora_sharding == "fold"
