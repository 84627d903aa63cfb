"""What one round is predicted to cost, term by term, and what nano-batches hide of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.memory import ROW_TILE
from tlora_megatron.planner.rounds.load import RoundLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds of one round by term, of the mean pipeline stage; the terms add up to the whole."""

    gemm_s: float
    attention_s: float
    elementwise_s: float
    lora_s: float
    head_s: float
    """Time of output layer and loss."""
    recompute_s: float
    tp_comm_s: float
    cp_comm_s: float
    ep_comm_s: float
    """Time to carry rows to their experts and back, with the host's wait before it and the wait for
    the rank whose experts got most rows."""
    pp_comm_s: float
    host_s: float
    """Time that the GPU waits for launches."""
    imbalance_s: float
    """Time that the slowest stage takes beyond the mean one."""
    bubble_s: float
    """Filling and draining of the pipeline; its share shrinks with more jobs' micro-batches."""
    replica_wait_s: float
    """Time that the mean replica waits for the slowest, which has the longest sequences."""
    gradient_sync_s: float
    optimizer_s: float
    round_s: float
    """Packing of the round, and the wait at its end."""
    load: RoundLoad
    busy_share: float = 1.0
    """Share of a round's work in which data-parallel replicas compute, by prediction."""

    @property
    def step_time_s(self) -> float:
        """Time of a round."""
        return sum(_all_terms(self))

    @property
    def tokens_per_s(self) -> float:
        """Speed of all jobs together."""
        return self.load.tokens / self.step_time_s

    @property
    def job_tokens_per_s(self) -> tuple[float, ...]:
        """Speed of each job."""
        return tuple(tokens / self.step_time_s for tokens in self.load.job_tokens)

    @property
    def job_step_time_s(self) -> tuple[float, ...]:
        """Time from one optimizer step to the next, for each job."""
        return tuple(self.step_time_s / steps for steps in self.load.steps)

    @property
    def binding(self) -> str:
        return max(TERMS, key=lambda name: getattr(self, name))


TERMS = tuple(f.name for f in fields(StepCost) if f.name not in ("load", "busy_share"))
_all_terms: Callable[[StepCost], tuple[float, ...]] = attrgetter(*TERMS)


MOST_NANO_BATCHES = 4
"""Most nano-batches that a run tries (`training.nano.controller`)."""


def num_parts(plan: Plan, load: RoundLoad) -> int:
    """Number of nano-batches of a micro-batch: at most its sequences; 1 if it cannot be split."""
    if not _can_split(plan):
        return 1
    sequences = load.sequences / (load.micro_batches * plan.dp_size)
    return max(1, min(plan.num_nano_batches, int(sequences)))


def full_capacity(plan: Plan, longest: int) -> int:
    """Rows of a micro-batch that jobs may fill, less nano-batches' padding if the longest fits."""
    budget, parts = plan.micro_batch_tokens, plan.num_nano_batches
    if parts == 1:
        return budget
    multiple = math.lcm(ROW_TILE, plan.tp_size, 2) * plan.cp_size
    room = budget - min(parts * (multiple - 1), budget // 8)
    return room if longest <= room else budget


def exposed_share(parts: int, compute_s: float, comm_s: float, nano_overlap: float) -> float:
    """Share of a layer's communication that nano-batches do not hide: compute may not cover it."""
    if comm_s <= 0.0:
        return 1.0
    return 1.0 - min(nano_overlap, (parts - 1) / parts * compute_s / comm_s)


def fastest_split(plan: Plan, step_time_s: Callable[[Plan], float]) -> Plan:
    """The plan with its fastest number of nano-batches; the number grows as long as that helps."""
    best, *more = splits(plan)
    best_s = step_time_s(best) if more else 0.0
    for tried in more:
        tried_s = step_time_s(tried)
        if tried_s >= best_s:
            break
        best, best_s = tried, tried_s
    return best


def splits(plan: Plan) -> list[Plan]:
    """The plan with each number of nano-batches that `fastest_split` may choose."""
    most = MOST_NANO_BATCHES if _can_split(plan) else plan.num_nano_batches
    counts = range(plan.num_nano_batches, most + 1)
    return [replace(plan, num_nano_batches=count) for count in counts]


def _can_split(plan: Plan) -> bool:
    return plan.tp_size > 1 and plan.cp_size == 1 and plan.lora_sharding == "fold"
