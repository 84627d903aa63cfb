"""Estimates the speed and memory of a group of jobs for the scheduler and the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from tlora_megatron.config.job import EXPERT_TARGETS
from tlora_megatron.model.backbone import on_experts
from tlora_megatron.model.layout import RECOMPUTES
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan, job_misfit, misfit
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import MemoryModel, MemoryUse
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import with_experts
from tlora_megatron.planner.workload import JobLoad, LengthHistogram, check_jobs

BUDGETS = (8192, 16384)
"""Micro-batch budgets to try, in tokens; one that holds the longest sequence is added."""
_LAYOUTS_KEPT = 3
_LOOKED_AT = 1024
"""Sequences to pack per estimate: few, since a scheduler asks for thousands of groups and an
error of 4 % does not change what it chooses."""
_REFERENCES = ((8, 8), (1, 4))
"""Mixes (jobs, batch) of 512-token sequences; their best layouts are tried for every group."""
_FEW_RANKS = 2
"""On routed experts in a further mix of the same sizes, whose jobs adapt all linears."""

_key = attrgetter(
    *("rank", "targets", "batch_size", "lengths", "dropout", "target_share"),
    *("num_blocks", "expert_rank", "shares_outer"),
)
"""What the speed of a job depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEstimate:
    """The estimate for a group of jobs on some GPUs under the best plan found."""

    fits: bool
    """True if any plan fits into memory; otherwise times are infinite and rates zero."""
    step_time_s: float
    """Time of a round."""
    tokens_per_s: tuple[float, ...]
    """Speed of each job, in the order in which the jobs were given."""
    memory_bytes: float
    """Peak memory on the fullest GPU; if no plan fits, of the plan that needs least."""
    plan: Plan | None


class _Choice(NamedTuple):
    plan: Plan | None
    cost: StepCost | None
    memory_bytes: float


class GroupModel:
    """Estimates groups for one base model on one kind of machine; each mix is computed once."""

    def __init__(self, spec: ModelSpec, hardware: HardwareProfile) -> None:
        self.spec = spec
        self.hardware = hardware
        self._rates = Rates(hardware)
        self._ids: dict[object, int] = {}
        self._choices: dict[tuple[int, tuple[int, ...]], _Choice] = {}
        self._layouts: dict[int, dict[Plan, None]] = {}
        """By number of GPUs those worth trying; they do not depend on earlier questions."""

    def estimate(self, jobs: Sequence[JobLoad], num_gpus: int) -> GroupEstimate:
        """Speed and memory of the best plan for the jobs, at least one, of names of their own."""
        check_jobs(jobs)
        if self.spec.experts is not None:
            jobs = [replace(job, targets=on_experts(job.targets)) for job in jobs]
        if num_gpus < 1:
            raise ValueError(f"num_gpus must be at least 1, got {num_gpus}")
        ids = [self._ids.setdefault(_key(job), len(self._ids)) for job in jobs]
        order = sorted(range(len(jobs)), key=ids.__getitem__)
        key = num_gpus, tuple(ids[i] for i in order)
        if key not in self._choices:
            self._choices[key] = self._best([jobs[i] for i in order], num_gpus)
        plan, cost, memory_bytes = self._choices[key]
        rates = [0.0] * len(jobs)
        for place, rate in zip(order, cost.job_tokens_per_s if cost else rates, strict=True):
            rates[place] = rate
        return GroupEstimate(
            fits=cost is not None,
            step_time_s=math.inf if cost is None else cost.step_time_s,
            tokens_per_s=tuple(rates),
            memory_bytes=memory_bytes,
            plan=plan,
        )

    def holds(self, jobs: Sequence[JobLoad], plan: Plan) -> bool:
        """True if a group that runs under a plan can go on under it with these jobs."""
        longest = max(max(job.lengths.longest, job.longest_eval) for job in jobs)
        if longest > plan.micro_batch_tokens or job_misfit(jobs, plan) is not None:
            return False
        use = MemoryModel(self.spec, jobs, self.hardware).use(plan)
        return use.total_bytes <= self.hardware.memory_bytes

    def _best(self, jobs: Sequence[JobLoad], num_gpus: int) -> _Choice:
        model = CostModel(self.spec, jobs, self.hardware, rates=self._rates, looked_at=_LOOKED_AT)
        memory = MemoryModel(self.spec, jobs, self.hardware)
        best, least = _Choice(None, None, math.inf), math.inf
        if num_gpus not in self._layouts:
            found = (self._best_layouts(own, num_gpus) for own in _references(self.spec))
            self._layouts[num_gpus] = dict.fromkeys(chain.from_iterable(found))
        longest = max(job.lengths.longest for job in jobs)
        budgets = [budget for budget in BUDGETS if budget >= longest]
        for layout in self._layouts[num_gpus]:
            if job_misfit(jobs, layout) is not None:
                continue
            for budget in budgets or [2 ** math.ceil(math.log2(longest))]:
                tried = replace(layout, micro_batch_tokens=budget)
                plan, use = self._lightest_that_fits(memory, tried)
                least = min(least, use.total_bytes)
                if plan is None:
                    continue
                plan = model.fastest_split(plan)
                cost = model.step_cost(plan)
                if best.cost is None or cost.tokens_per_s > best.cost.tokens_per_s:
                    best = _Choice(plan, cost, use.total_bytes)
        return best if best.cost is not None else _Choice(None, None, least)

    def _lightest_that_fits(self, memory: MemoryModel, plan: Plan) -> tuple[Plan | None, MemoryUse]:
        """The plan with the least recompute that fits, and its memory."""
        for recompute in RECOMPUTES:
            tried = replace(plan, recompute=recompute)
            use = memory.use(tried)
            if use.total_bytes <= self.hardware.memory_bytes:
                return tried, use
        return None, use

    def _best_layouts(self, jobs: Sequence[JobLoad], num_gpus: int) -> list[Plan]:
        model = CostModel(self.spec, jobs, self.hardware, rates=self._rates)
        memory = MemoryModel(self.spec, jobs, self.hardware)
        scored, needs = [], []
        for index, layout in enumerate(self._all_layouts(num_gpus)):
            plan, use = self._lightest_that_fits(memory, layout)
            needs.append((use.total_bytes, index, layout))
            if plan is not None:
                cost = model.step_cost(model.fastest_split(plan))
                scored.append((-cost.tokens_per_s, index, layout))
        chosen = [layout for *_, layout in sorted(scored)[:_LAYOUTS_KEPT]]
        # For mixes beyond the reference: what needs least memory.
        return [*chosen, *(layout for *_, layout in sorted(needs)[:1])]

    def _all_layouts(self, num_gpus: int) -> Iterator[Plan]:
        reach = self.hardware.gpus_per_node if self.hardware.inter_node is None else num_gpus
        if num_gpus > reach:
            raise ValueError(
                f"num_gpus must be at most {reach}, the node of a profile without inter_node, "
                f"got {num_gpus}"
            )
        divisors = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
        for tp in divisors:
            for pp in divisors:
                if num_gpus % (tp * pp) or tp > self.hardware.gpus_per_node:
                    continue
                plan = Plan(
                    tp_size=tp,
                    pp_size=pp,
                    dp_size=num_gpus // (tp * pp),
                    sequence_parallel=tp > 1,
                )
                yield from (
                    own for own in with_experts(self.spec, plan) if misfit(self.spec, own) is None
                )


def _references(spec: ModelSpec) -> Iterator[list[JobLoad]]:
    targets = spec.peft_targets
    if spec.experts is not None:
        targets = tuple(target for target in targets if target not in EXPERT_TARGETS)
    adapts_experts = spec.experts is not None and spec.shared_ffn_size is None
    for count, batch_size in _REFERENCES:
        load = JobLoad(
            name="",
            rank=16,
            targets=targets,
            batch_size=batch_size,
            lengths=LengthHistogram.single(512),
        )
        yield [replace(load, name=str(i)) for i in range(count)]
        if adapts_experts:
            adapted = replace(load, targets=spec.peft_targets, expert_rank=_FEW_RANKS)
            yield [replace(adapted, name=str(i)) for i in range(count)]
