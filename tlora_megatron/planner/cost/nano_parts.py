"""Nano-batches in the model: how many there are, what they hide, and how many are fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.rounds import RoundLoad

MOST_NANO_BATCHES = 4
"""That a run tries; see `training.nano.controller`."""


def num_parts(plan: Plan, load: RoundLoad) -> int:
    """Nano-batches of a micro-batch: at most its sequences; 1 where they cannot be staggered."""
    if plan.tp_size == 1 or plan.cp_size > 1 or plan.lora_sharding != "fold":
        return 1
    sequences = sum(load.job_sequences) / (load.micro_batches * plan.dp_size)
    return max(1, min(plan.num_nano_batches, int(sequences)))


def exposed_share(parts: int, compute_s: float, comm_s: float, nano_overlap: float) -> float:
    """Of a layer's communication, what nano-batches leave to be waited for.

    They hide the profile's share, but no more than the others compute meanwhile.
    """
    if comm_s <= 0.0:
        return 1.0
    return 1.0 - min(nano_overlap, (parts - 1) / parts * compute_s / comm_s)


def fastest_split(plan: Plan, step_time_s: Callable[[Plan], float]) -> Plan:
    """The plan with the number of nano-batches that takes least time: more while that helps."""
    if plan.tp_size == 1 or plan.cp_size > 1 or plan.lora_sharding != "fold":
        return plan
    time_s = step_time_s(plan)
    for count in range(plan.num_nano_batches + 1, MOST_NANO_BATCHES + 1):
        tried = replace(plan, num_nano_batches=count)
        tried_s = step_time_s(tried)
        if tried_s >= time_s:
            break
        plan, time_s = tried, tried_s
    return plan
