"""The predicted speed of a data-parallel replica, in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tlora_megatron.model.recompute import RecomputeTable
from tlora_megatron.model.replicas.replica_rate import ReplicaRate
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.replica_curve import Seen, busy_s, fit
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

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
    model = CostModel(spec, [_of_length(job, short, 0), _of_length(job, long, 1)], Rates(hardware))
    if table is not None:
        plan = replace(plan, recompute=table.of(short))
    of_long = plan if table is None else replace(plan, recompute=table.of(long))
    seen = Seen(
        short=short,
        long=long,
        short_s=_busy_s(model, plan, rows, 0),
        long_s=_busy_s(model, of_long, rows, 1),
        half_s=_busy_s(model, plan, rows // 2, 0),
    )
    return fit(seen, rows).rate


def _of_length(job: JobLoad, rows: int, number: int) -> JobLoad:
    return replace(job, name=str(number), lengths=LengthHistogram.single(rows), longest_eval=0)


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
