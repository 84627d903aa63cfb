"""Finds the plans of layouts that fit into memory, after bounds of their speed."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tlora_megatron.model.layout import RECOMPUTES, LoraSharding
from tlora_megatron.planner.candidate import Plan, chunk_multiple, job_misfit, misfit
from tlora_megatron.planner.choices import sharding_options
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import (
    ROW_TILE,
    MemoryModel,
    MemoryUse,
    longest_batches,
    most_rows,
)
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import Layouts, Question, SearchSpace, layout_misfit
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.rounds.model import RoundModel, full_sizes
from tlora_megatron.planner.workload import JobLoad, longest_of

_MARGIN = 1.03
"""Factor on the bound: small rounds may hold jobs whose attention is cheaper than the mean, and
the longest sequences that are drawn are shorter than expected."""
_STAGE_DEPTH = 4
"""Most micro-batches for each stage, as `training.packing` chooses them."""
_GRID = [round(2 ** (power / 4)) for power in range(85)]
"""Lengths at which the distribution of the longest sequence is looked at."""


class SpeedBound:
    """Bounds for one mix of jobs on one model and machine.

    Lower bound: the slowest stage at its best number of micro-batches, plus all optimizer steps.
    Each micro-batch holds its part of the rows, and one of them the longest sequence. That number
    may be any if `is_full`, as Megatron-LM's trainer fixes it.
    """

    def __init__(self, model: CostModel, *, is_full: bool) -> None:
        self._model, self._is_full = model, is_full
        jobs = model.jobs
        self._tokens = sum(job.batch_tokens for job in jobs)
        self._job_tokens = tuple(job.batch_tokens for job in jobs)
        self._job_sequences = tuple(float(job.batch_size) for job in jobs)
        self._longest = expected_longest(jobs)
        self._flat: dict[object, float] = {}

    def loose(self, layout: Plan, budget: int, shardings: Sequence[LoraSharding]) -> float:
        """A bound that takes rows for as fast as those of the largest micro-batches of a layout."""
        experts = layout.ep_size, layout.expert_tp_size
        key = layout.tp_size, layout.sequence_parallel, *experts, shardings
        if key not in self._flat:
            plan = replace(layout, cp_size=1, dp_size=1, pp_size=1, vpp_size=1)
            plan = replace(plan, first_stage_layers=None, last_stage_layers=None)
            whole = max(budget // layout.cp_size, 1)
            self._flat[key] = self._layer_s(plan, whole, 1.0, shardings) / whole
        a_row = self._flat[key] / layout.cp_size
        return self._speed(layout, budget, lambda rows, count: rows * a_row, 0.0)

    def tight(self, layout: Plan, budget: int, shardings: Sequence[LoraSharding]) -> float:
        """A bound with the times of the very sizes, and of the jobs' steps."""
        steps_s = min(
            self._model.all_steps_s(replace(layout, lora_sharding=sharding))
            for sharding in shardings
        )

        def layer_s(rows: float, count: float) -> float:
            whole = max(rows, ROW_TILE * layout.cp_size)
            return self._layer_s(layout, whole, count, shardings)

        return self._speed(layout, budget, layer_s, steps_s)

    def _speed(
        self,
        layout: Plan,
        budget: int,
        layer_s: Callable[[float, float], float],
        steps_s: float,
    ) -> float:
        """The speed with the best number of micro-batches, by seconds of a layer."""
        slowest, all_layers = max(layout.stages(self._model.spec)), self._model.spec.num_layers
        best_s = math.inf
        for count in self._counts(layout):
            rows = max(self._tokens / (layout.dp_size * count), self._longest)
            rounds = max(1.0, rows / budget)
            # All stages but the slowest one are filled and drained.
            layers = count * slowest + (all_layers - slowest) / layout.vpp_size
            time_s = rounds * layers * layer_s(min(rows, budget), count)
            best_s = min(best_s, time_s)
        return _MARGIN * self._tokens / (best_s + steps_s)

    def _counts(self, layout: Plan) -> set[float]:
        """Numbers of micro-batches of which one is the best: fewest, most, and just enough."""
        pp_size, is_plain = layout.pp_size, layout.vpp_size == 1
        if pp_size == 1 and not self._is_full:
            return {1.0}
        least = 1.0 if self._is_full and is_plain else float(pp_size)
        most = float(_STAGE_DEPTH * pp_size)
        enough = self._tokens / (layout.dp_size * self._longest)
        return {least, most, min(max(enough, least), most)}

    def _layer_s(
        self, layout: Plan, rows: float, count: float, shardings: Sequence[LoraSharding]
    ) -> float:
        """Seconds of a layer with all the communication hidden that nano-batches ever hide."""
        hardware = self._model.hardware
        load = RoundLoad(
            micro_batches=count,
            rows=float(rows),
            job_tokens=self._job_tokens,
            job_sequences=self._job_sequences,
            steps=(),
        )
        costs = [
            self._model.layers.cost(replace(layout, lora_sharding=sharding), load)
            for sharding in shardings
        ]
        least = min(cost.total_s - hardware.nano_overlap * cost.tp_comm_s for cost in costs)
        return max(least, hardware.host.layer_s)


def expected_longest(jobs: Sequence[JobLoad]) -> float:
    """The expected rows of the longest sequence in a batch of every job, not exceeded."""
    expected = 0.0
    for before, length in itertools.pairwise([0, *_GRID]):
        shorter = 0.0
        for job in jobs:
            share = sum(share for n, share in job.lengths.pairs if n < length)
            shorter += job.batch_size * math.log(share) if share else -math.inf
        expected += (length - before) * (1.0 - math.exp(min(0.0, shorter)))
    return expected


_GIB = 2.0**30
_MEMORY = "memory, "
"""Begins the kinds of plans that need more memory than there is."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Plans that were left out for one reason."""

    reason: str
    count: int
    example: Plan
    """The plan that missed by least."""


class Drops:
    """Counts plans by the reason they were dropped."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, tuple[float, str, Plan]] = {}

    def add(self, kind: str, reason: str, plan: Plan, excess: float = 0.0) -> None:
        """Counts a plan; the example of a kind is the plan that missed by least."""
        self._counts[kind] += 1
        if kind not in self._examples or excess < self._examples[kind][0]:
            self._examples[kind] = (excess, reason, plan)

    def add_for_memory(self, plan: Plan, memory: MemoryUse, hardware: HardwareProfile) -> None:
        """Counts a plan that needs more memory than there is."""
        total, largest = memory.total_bytes, memory.binding.replace("_", " ")
        kind = f"{_MEMORY}{largest}"
        if kind in self._examples and total >= self._examples[kind][0]:
            self._counts[kind] += 1  # a search drops many, and says why once
            return
        need, have = total / _GIB, hardware.memory_bytes / _GIB
        reason = f"memory: at least {need:.1f} GiB of {have:.1f} GiB, most of it {largest}"
        self.add(kind, reason, plan, total)

    def least_memory(self) -> tuple[float, Dropped] | None:
        """The bytes of the plan that missed the memory by least, and the plan; None without any."""
        missed = [kind for kind in self._examples if kind.startswith(_MEMORY)]
        if not missed:
            return None
        kind = min(missed, key=lambda kind: self._examples[kind][0])
        need, reason, plan = self._examples[kind]
        return need, Dropped(reason, self._counts[kind], plan)

    def result(self) -> tuple[Dropped, ...]:
        """All reasons, the most frequent first."""
        return tuple(
            Dropped(self._examples[kind][1], count, self._examples[kind][2])
            for kind, count in self._counts.most_common()
        )


BUDGETS = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)
"""Micro-batch budgets to try, in tokens."""


class Fit:
    """Plans of one mix of jobs that fit into the memory of a machine; `drops` counts the others."""

    def __init__(self, question: Question, drops: Drops, rounds: RoundModel | None = None) -> None:
        self.layouts = Layouts(question)
        self._spec, self._jobs = question.spec, question.jobs
        self._hardware, self._space = question.hardware, question.space
        self._drops, self._rounds = drops, rounds or RoundModel(self._jobs)
        self._memory = MemoryModel(self._spec, self._jobs, self._hardware)
        self._budgets: dict[tuple[int, int], list[int]] = {}
        asked = self._space.recompute
        self._recomputes = RECOMPUTES if asked is None else (asked,)

    def plans(
        self, layout: Plan, most_budgets: int | None = None
    ) -> Iterator[tuple[Plan, MemoryUse]]:
        """All plans of a layout that fit, with its smallest budgets; None: with all."""
        if not self._can_run(layout):
            return
        shardings = sharding_options(self._jobs, layout, self._space.lora_sharding)
        for sized in self._sized(layout, most_budgets):
            for recompute in self._recomputes:
                for sharding in shardings:
                    plan = replace(sized, recompute=recompute, lora_sharding=sharding)
                    memory = self._fitting(plan)
                    if memory is not None:
                        yield plan, memory

    def lightest(self, layout: Plan) -> Iterator[tuple[Plan, MemoryUse]]:
        """For each size and sharding, the plan with the lightest recompute that fits."""
        shardings = sharding_options(self._jobs, layout, self._space.lora_sharding)
        for _, sizes in itertools.groupby(self._sized(layout), key=_is_open):
            first, *others = sizes
            if not self._smallest_fits(first, shardings):
                continue
            for sized, sharding in itertools.product((first, *others), shardings):
                plans = (
                    replace(sized, recompute=recompute, lora_sharding=sharding)
                    for recompute in self._recomputes
                )
                fitting = ((plan, memory) for plan in plans if (memory := self._fitting(plan)))
                yield from itertools.islice(fitting, 1)

    def _smallest_fits(self, first: Plan, shardings: Sequence[LoraSharding]) -> bool:
        """True if a plan with the smallest budget fits, of which all others need more memory."""
        least = first if _is_open(first) else replace(first, num_micro_batches=1)
        for recompute, sharding in itertools.product(self._recomputes[::-1], reversed(shardings)):
            plan = replace(least, recompute=recompute, lora_sharding=sharding)
            memory = self._memory.use(plan)
            if memory.total_bytes <= self._hardware.memory_bytes:
                return True
            self._drops.add_for_memory(plan, memory, self._hardware)
        return False

    def by_bound(self, layouts: Iterable[Plan], bound: SpeedBound) -> Iterator[tuple[float, Plan]]:
        """Layouts with what their speed cannot exceed, the greatest first."""
        waiting: list[tuple[float, int, Plan, bool]] = []
        for number, layout in enumerate(layouts):
            if self._can_run(layout):
                waiting.append((-bound.loose(*self._bounds_of(layout)), number, layout, False))
        heapq.heapify(waiting)
        while waiting:
            speed, number, layout, is_tight = heapq.heappop(waiting)
            if is_tight:
                yield -speed, layout
            else:
                speed = -bound.tight(*self._bounds_of(layout))
                heapq.heappush(waiting, (speed, number, layout, True))

    def _bounds_of(self, layout: Plan) -> tuple[Plan, int, tuple[LoraSharding, ...]]:
        """A layout, its largest budget and its shardings."""
        shardings = sharding_options(self._jobs, layout, self._space.lora_sharding)
        return layout, self._budgets_of(layout)[-1], shardings

    def _can_run(self, layout: Plan) -> bool:
        reason = layout_misfit(self._spec, layout, self._hardware)
        reason = reason or job_misfit(self._jobs, layout)
        if reason is not None:
            self._drops.add(reason, reason, layout)
        return reason is None

    def _budgets_of(self, layout: Plan) -> list[int]:
        key = layout.tp_size, layout.cp_size
        if key not in self._budgets:
            self._budgets[key] = budgets(self._jobs, layout, self._space)
        return self._budgets[key]

    def _fitting(self, plan: Plan) -> MemoryUse | None:
        """The memory of a plan if there is so much and the plan can run."""
        if not self._space.can_run(plan):
            return None
        reason = misfit(self._spec, plan)
        if reason is not None:
            self._drops.add(reason, reason, plan)
            return None
        memory = self._memory.use(plan)
        if memory.total_bytes <= self._hardware.memory_bytes:
            return memory
        self._drops.add_for_memory(plan, memory, self._hardware)
        return None

    def _sized(self, layout: Plan, most_budgets: int | None = None) -> Iterator[Plan]:
        """A layout with budgets, and the number of micro-batches if a program fixes one."""
        jobs, space = self._jobs, self._space
        tried = self._budgets_of(layout)[:most_budgets]
        if layout.vpp_size == 1 and (space.wants("train") or space.wants("deepspeed")):
            yield from (replace(layout, micro_batch_tokens=budget) for budget in tried)
        if space.wants("megatron"):
            for budget, count in full_sizes(self._rounds, jobs, layout, tried):
                yield replace(layout, micro_batch_tokens=budget, num_micro_batches=count)


def _is_open(plan: Plan) -> bool:
    """True if a round has as many micro-batches as the work needs."""
    return plan.num_micro_batches is None


def budgets(jobs: Sequence[JobLoad], layout: Plan, space: SearchSpace) -> list[int]:
    """Budgets worth trying: from the longest sequence or portion up to all batches together."""
    longest = longest_of(jobs)
    whole = "sequence" if longest >= (space.largest_portion or 0) else "portion"
    longest = max(longest, space.largest_portion or 0)
    if space.micro_batch_tokens is not None:
        if space.micro_batch_tokens < longest:
            raise ValueError(
                f"micro_batch_tokens must be at least {longest}, the longest {whole}, "
                f"got {space.micro_batch_tokens}"
            )
        return [space.micro_batch_tokens]
    step = 128 * layout.tp_size * layout.cp_size
    least = -(-longest // step) * step
    most = most_rows(longest_batches(jobs), replace(layout, micro_batch_tokens=2**62))
    chunks = chunk_multiple(layout)
    rounded = sorted({-(-budget // chunks) * chunks for budget in BUDGETS})
    fitting = [budget for budget in rounded if budget >= least]
    enough = [budget for budget in fitting if budget >= most][1:]
    return [budget for budget in fitting if budget not in enough] or [least]
