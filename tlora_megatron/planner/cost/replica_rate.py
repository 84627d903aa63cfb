"""The predicted speed of a replica: what a sequence costs it, a line and a square of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.model.layout import RecomputeTable
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

_SHORT = 1024
"""The shorter of the two lengths between which attention is fitted; the other is the mix's longest.
In between, whole micro-batches are then within 1.5 % of what the planner predicts for the length
(8B, 7B and 70B shapes; H200, L40S, A100)."""
_PICO = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaCurve:
    """Predicted seconds of one replica: a sequence of x rows takes `token_s x + square_s x**2`."""

    token_s: float
    """Seconds a row beside attention; in a pipeline of its slowest stage, like all of these."""
    square_s: float
    """Seconds a squared row of a sequence."""
    fixed_s: float
    """Seconds a micro-batch, however many rows it has."""
    budget: int
    """Rows of a micro-batch."""
    stages: int = 1
    """Stages of the replica's pipeline."""

    def seconds(self, rows: float, squares: float) -> float:
        """Time of full micro-batches; a pipeline is filled and drained for four a stage."""
        bubble = (self.stages - 1) / (4 * self.stages)
        flat_s = self.token_s + self.fixed_s / self.budget
        return (1 + bubble) * (flat_s * rows + self.square_s * squares)

    def round_ps(self, micro_batches: Sequence[Sequence[int]]) -> int:
        """Picoseconds of one round, given the rows of its sequences by micro-batch."""
        rate = self.rate
        each = [rate.fixed_ps + sum(map(rate.sequence_ps, rows)) for rows in micro_batches]
        return sum(each) + (self.stages - 1) * max(each, default=0)

    @property
    def rate(self) -> ReplicaRate:
        """The curve in the whole numbers that rounds are balanced by."""
        return ReplicaRate(
            token_ps=max(1, round(self.token_s * _PICO)),
            square_ps=max(0, round(self.square_s * _PICO)),
            fixed_ps=max(0, round(self.fixed_s * _PICO)),
            longest=self.budget,
        )


def _fitted(
    short: int,
    long: int,
    budget: int,
    *,
    short_s: float,
    long_s: float,
    half_s: float,
    stages: int = 1,
) -> ReplicaCurve:
    """The curve through the times of micro-batches of short and of long sequences.

    The two lengths give the linear and the quadratic part, half a micro-batch the part that is
    there whatever its rows.

    Args:
        short, long: rows of the sequences.
        short_s, long_s: seconds of `budget` rows of them.
        half_s: seconds of half as many rows of short ones.
    """
    square_s = max(0.0, (long_s - short_s) / budget / max(1, long - short))
    fixed_s = min(max(0.0, 2 * half_s - short_s), short_s / 2)
    return ReplicaCurve(
        token_s=(short_s - fixed_s) / budget - square_s * short,
        square_s=square_s,
        fixed_s=fixed_s,
        budget=budget,
        stages=stages,
    )


class CurveModel:
    """Fits curves for one mix of jobs on one model and machine, over lengths; plans share parts."""

    def __init__(self, spec: ModelSpec, jobs: Sequence[JobLoad], hardware: HardwareProfile) -> None:
        self._jobs = tuple(jobs)
        self._long = max(2 * _SHORT, *(job.lengths.longest for job in jobs))
        short, long = (
            [replace(job, lengths=LengthHistogram.single(rows)) for job in jobs]
            for rows in (_SHORT, self._long)
        )
        self._short_model = CostModel(spec, short, hardware)
        self._long_model = CostModel(spec, long, hardware, rates=self._short_model.rates)

    def curve(self, plan: Plan) -> ReplicaCurve:
        """The curve of one replica of a plan, whatever its `dp_size`."""
        plan = replace(plan, dp_size=1)
        rows = plan.micro_batch_tokens
        full, half = self._load(rows), self._load(rows // 2)
        return _fitted(
            _SHORT,
            self._long,
            rows,
            short_s=busy_s(self._short_model.step_cost(plan, full)),
            long_s=busy_s(self._long_model.step_cost(plan, full)),
            half_s=busy_s(self._short_model.step_cost(plan, half)),
            stages=plan.pp_size,
        )

    def _load(self, rows: int) -> RoundLoad:
        """A full micro-batch with every job's part of the rows."""
        share = rows / sum(job.batch_tokens for job in self._jobs)
        return RoundLoad(
            micro_batches=1,
            rows=rows,
            job_tokens=tuple(job.batch_tokens * share for job in self._jobs),
            job_sequences=tuple(job.batch_size * share for job in self._jobs),
            steps=(0.0,) * len(self._jobs),
        )


def busy_s(cost: StepCost) -> float:
    """Time of a round without the bubble, and what it does once, whatever it holds."""
    beside = cost.gradient_sync_s + cost.optimizer_s + cost.round_s + cost.bubble_s
    return cost.step_time_s - beside


_SPREAD = 4
"""Factor between the two lengths at which attention is looked at, at least."""


def replica_rate(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    plan: Plan,
    hardware: HardwareProfile,
    table: RecomputeTable | None = None,
) -> ReplicaRate:
    """Predicts what sequences cost one replica of a plan; in a pipeline, its mean stage.

    Sums of gradients and optimizer steps are alike on all replicas and left out.

    Args:
        table: the recompute of sequences by their rows, instead of the plan's.
    """
    job = max(jobs, key=lambda load: load.batch_tokens)
    rows = plan.micro_batch_tokens
    long = min(rows, max(load.lengths.longest for load in jobs))
    mean = sum(load.batch_tokens for load in jobs) / sum(load.batch_size for load in jobs)
    short = max(1, min(round(mean), long // _SPREAD))
    alone = [
        replace(job, name=str(n), lengths=LengthHistogram.single(length), longest_eval=0)
        for n, length in enumerate((short, long))
    ]
    model = CostModel(spec, alone, hardware)
    if table is not None:
        plan = replace(plan, recompute=table.of(short))
    of_long = plan if table is None else replace(plan, recompute=table.of(long))
    curve = _fitted(
        short,
        long,
        rows,
        short_s=_busy_s(model, plan, rows, 0),
        long_s=_busy_s(model, of_long, rows, 1),
        half_s=_busy_s(model, plan, rows // 2, 0),
    )
    return curve.rate


def _busy_s(model: CostModel, plan: Plan, rows: int, slot: int) -> float:
    """Time of one micro-batch on one replica, all of whose rows are one job's."""
    length = model.jobs[slot].lengths.longest
    own = [float(rows * plan.dp_size) if job == slot else 0.0 for job in range(len(model.jobs))]
    load = RoundLoad(
        micro_batches=1,
        rows=float(rows),
        job_tokens=tuple(own),
        job_sequences=tuple(math.ceil(n / length) * 1.0 for n in own),
        steps=(0.0,) * len(own),
    )
    return busy_s(model.step_cost(plan, load))
