"""What runs ask the planner: LoRA sharding, recompute by rows, and the speeds of replicas.

A replica's speed is what a sequence costs it, a line and a square of its rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.dispatch import ReplicaRate
from tlora_megatron.model.layout import RECOMPUTES, LoraSharding, RecomputeTable
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import SHARDINGS, Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import ROW_TILE, MemoryModel
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

LEAST_ROWS = 1024
"""Fewest rows a GPU that a run is cut into micro-batches for. At 1,024 rows without recompute an
H200 is predicted to need 68 us a row of Llama-3.1-8B, at 24,576 rows with all of it 79 us; below,
its kernels are short of rows and it waits for the host."""


def recompute_for_rows(
    memory: MemoryModel,
    plan: Plan,
    budget_bytes: float,
    *,
    multiple: int | None = None,
    least_rows: int | None = None,
) -> RecomputeTable:
    """Returns the lightest recompute of a plan's micro-batches that fits, by their rows.

    Args:
        budget_bytes: memory of each GPU, as `MemoryUse.total_bytes` counts it.
        multiple: the rows of micro-batches are a multiple of this; None: as on GPUs.
        least_rows: a recompute that fits fewer rows is left out; None: `LEAST_ROWS` a GPU.
    """
    step = ROW_TILE * plan.cp_size if multiple is None else multiple
    fewest = LEAST_ROWS * plan.cp_size if least_rows is None else least_rows
    sizes = range(step, plan.micro_batch_tokens + step, step)
    found: list[tuple[Recompute, int]] = []
    for recompute in RECOMPUTES:
        use_of = partial(memory.use, replace(plan, recompute=recompute))
        fitting = bisect_right(sizes, budget_bytes, key=lambda rows: use_of(rows).total_bytes)
        rows = sizes[fitting - 1] if fitting else 0
        if rows > (found[-1][1] if found else min(fewest, sizes[-1]) - 1):
            found.append((recompute, rows))
        if fitting == len(sizes):
            break
    return RecomputeTable(tuple(found or [(RECOMPUTES[-1], sizes[-1])]))


_MARGIN = 0.02
"""Share of fold's time that another sharding must save. Predicted ratios to fold are off by 1 % in
the median of measured cells and by 6 % at most (docs/lora_sharding.md); fold exchanges least."""


class ShardingChoice(NamedTuple):
    sharding: LoraSharding
    reason: str

    @property
    def line(self) -> str:
        return f"parallel.lora_sharding: {self.sharding} ({self.reason})"


def choose_lora_sharding(
    asked: LoraSharding | Literal["auto"],
    *,
    tp_sizes: Collection[int],
    black_box: str | None,
    overlaps: bool,
    times_s: Mapping[LoraSharding, float],
    source: str,
) -> ShardingChoice:
    """Resolves `parallel.lora_sharding`; depends on its arguments only.

    Args:
        tp_sizes: tensor-parallel sizes of the run's replicas, each once.
        black_box: class of linears whose GEMM and reduction are not ours (Transformer Engine's),
        around which only rank_exchange works; None: all linears are Megatron's own.
        overlaps: True if nano-batches shall hide communication; they run fold's linears only.
        times_s: predicted seconds of a round by sharding; empty without a prediction.
        source: where the times come from, or why there are none.

    Raises:
        ValueError: if what is asked for contradicts the linears.
    """
    if set(tp_sizes) == {1}:
        return ShardingChoice("fold", "TP 1 has nothing to share")
    if len(set(tp_sizes)) > 1:
        if asked not in ("auto", "fold") or black_box is not None:
            got = asked if black_box is None else f"a {black_box}"
            raise ValueError(
                "parallel.lora_sharding must be fold or auto where replicas differ in tp_size, on "
                f"Megatron's own linears, got {got}"
            )
        return ShardingChoice("fold", "replicas differ in tp_size")
    if black_box is not None:
        if asked not in ("auto", "rank_exchange"):
            raise ValueError(
                f"parallel.lora_sharding must be rank_exchange or auto around a {black_box}, whose "
                f"reduction is its own, got {asked}; or build the model of Megatron's own linears"
            )
        return ShardingChoice("rank_exchange", f"all that goes around a {black_box}")
    if asked != "auto":
        return ShardingChoice(asked, "asked for")
    if overlaps:
        return ShardingChoice("fold", "auto: nano-batches overlap it alone")
    if not times_s:
        return ShardingChoice("fold", f"auto: {source}")
    best = preferred(times_s)
    told = ", ".join(f"{name} {times_s[name] * 1e3:.4g} ms" for name in SHARDINGS)
    return ShardingChoice(best, f"auto: a round is to take {told}, {source}")


def sharding_times(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile
) -> dict[LoraSharding, float]:
    """Predicted seconds of a round by sharding."""
    model = CostModel(spec, jobs, hardware)
    return {
        name: model.step_cost(replace(plan, lora_sharding=name)).step_time_s for name in SHARDINGS
    }


def preferred(times_s: Mapping[LoraSharding, float]) -> LoraSharding:
    """The fastest sharding if it saves enough, otherwise fold."""
    return min(SHARDINGS, key=lambda name: times_s[name] / handicap(name))


def handicap(sharding: LoraSharding) -> float:
    """Factor by which a sharding's predicted speed counts compared with fold's."""
    return 1.0 if sharding == "fold" else 1.0 - _MARGIN


def sharding_options(
    jobs: Sequence[JobLoad], plan: Plan, asked: LoraSharding | None
) -> tuple[LoraSharding, ...]:
    """The shardings that may be best; the one that needs least memory comes last.

    Only standard adapters on several tensor-parallel ranks leave a choice. rank_exchange, for
    linears that fold cannot enter, is tried only if it is asked for.
    """
    if plan.tp_size == 1 or all(job.num_blocks > 1 for job in jobs):
        return ("fold",)
    return ("fold", "s_lora") if asked is None else (asked,)


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
    lengths: tuple[int, int], seconds: tuple[float, float, float], budget: int, stages: int = 1
) -> ReplicaCurve:
    """The curve through the times of `budget` rows of short and of long sequences.

    The third time is that of half as many rows of short ones. The two lengths give the linear and
    the quadratic part, half a micro-batch the part that is there whatever its rows.
    """
    (short, long), (short_s, long_s, half_s) = lengths, seconds
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
        seconds = (
            _busy_s(self._short_model.step_cost(plan, full)),
            _busy_s(self._long_model.step_cost(plan, full)),
            _busy_s(self._short_model.step_cost(plan, half)),
        )
        return _fitted((_SHORT, self._long), seconds, rows, plan.pp_size)

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


def _busy_s(cost: StepCost) -> float:
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

    Sums of gradients and optimizer steps are alike on all replicas and left out. `table` is the
    recompute of sequences by their rows, instead of the plan's.
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
    seconds = (
        _alone_s(model, plan, rows, 0),
        _alone_s(model, of_long, rows, 1),
        _alone_s(model, plan, rows // 2, 0),
    )
    return _fitted((short, long), seconds, rows).rate


def _alone_s(model: CostModel, plan: Plan, rows: int, slot: int) -> float:
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
    return _busy_s(model.step_cost(plan, load))
