"""Ranks all ways to run a mix of jobs on some GPUs; for a scheduler soon finds a group's best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from tlora_megatron.config.job import EXPERT_TARGETS
from tlora_megatron.model.backbone import on_experts
from tlora_megatron.model.layout import RECOMPUTES
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import DEPTHS, Plan, is_ours_alone, job_misfit, misfit
from tlora_megatron.planner.choices import handicap
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import MemoryModel, MemoryUse
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.fit import Dropped, Drops, Fit, SpeedBound
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import Question, SearchSpace, with_experts
from tlora_megatron.planner.workload import JobLoad, LengthHistogram, check_jobs, longest_of

MOST_GPUS = 4096
"""Most GPUs that are planned for."""
_ENOUGH = 4
"""Layouts near the best one with which no slower ones are looked at for deeper rounds."""
_BUSY_ENOUGH, _WORTH = 0.97, 1.05
"""Busy share beyond which rounds are deep enough, and the gain that is worth any loss."""
_NEAR = 0.95
"""Share of the best plan's speed that a plan on fewer GPUs must have to be of interest."""


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A plan that fits, with its time and memory term by term."""

    plan: Plan
    cost: StepCost
    memory: MemoryUse


@dataclass(frozen=True, slots=True)
class SearchResult:
    plans: tuple[RankedPlan, ...]
    """Plans that fit, fastest first."""
    dropped: tuple[Dropped, ...]

    @property
    def best(self) -> RankedPlan | None:
        """The fastest plan, if any fits."""
        return self.plans[0] if self.plans else None


def search(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    num_gpus: int,
    space: SearchSpace | None = None,
    *,
    may_idle: bool = False,
) -> SearchResult:
    """Ranks every plan on `num_gpus` GPUs by tokens per second of all jobs.

    A plan for Megatron-LM's trainer is another one than that of `tlora train` with the same layout:
    its rounds are of a fixed size, and so is their time. Each plan gets the number of nano-batches
    that is fastest for it.

    Args:
        may_idle: also look at plans that leave some of the GPUs idle and come near the best plan.

    Raises:
        ValueError: for jobs or numbers that cannot be planned for, or sizes that no layout of
        `num_gpus` GPUs has. That no plan fits is not an error.
    """
    check_jobs(jobs)
    if not 1 <= num_gpus <= MOST_GPUS:
        raise ValueError(f"num_gpus must be in [1, {MOST_GPUS}], got {num_gpus}")
    space = space or SearchSpace()
    if is_ours_alone(spec) and space.runs_in is None:
        space = replace(space, runs_in="train")  # no other program has such a base
    hunt = _Hunt(Question(spec, jobs, hardware, num_gpus, space))
    on_all = found = hunt.on_all(num_gpus)
    dropped = hunt.drops.result()
    if may_idle:
        found = sorted([*on_all, *hunt.on_fewer(num_gpus, on_all)], key=_place)
        dropped = dropped if on_all else hunt.drops.result()
    if not found and not dropped:
        fixed = {name: value for name, value in asdict(space).items() if value is not None}
        raise NothingAllowed(num_gpus, fixed)
    return SearchResult(tuple(found), dropped)


class NothingAllowed(ValueError):
    """What a search must keep to (`fixed`) leaves no layout of that many GPUs."""

    def __init__(self, num_gpus: int, fixed: Mapping[str, Any]) -> None:
        super().__init__(f"what is fixed must allow some plan on {num_gpus} GPUs, got {fixed}")
        self.fixed = fixed


class _Hunt:
    """One search, whose parts share what has been computed."""

    def __init__(self, question: Question) -> None:
        self.drops = Drops()
        self._space = question.space
        self._model = CostModel(question.spec, question.jobs, question.hardware)
        self._fit = Fit(question, self.drops, self._model.rounds)

    def on_all(self, num_gpus: int) -> list[RankedPlan]:
        """Every plan on all the GPUs, best first."""
        layouts = self._fit.layouts.on_all(num_gpus)
        found = [self._ranked(*own) for layout in layouts for own in self._fit.plans(layout)]
        return self._with_deeper(found)

    def on_fewer(self, num_gpus: int, on_all: Sequence[RankedPlan]) -> list[RankedPlan]:
        """Plans on fewer GPUs that come near the best one, those of all GPUs included.

        Of each layout, budget and sharding there is the plan with the lightest recompute that fits,
        in the order of what their speed cannot exceed, until that is too little.
        """
        best = on_all[0].cost.tokens_per_s if on_all else 0.0
        found: list[RankedPlan] = []
        slow: list[tuple[Plan, MemoryUse]] = []
        bound = SpeedBound(self._model, is_full=self._space.wants("megatron"))
        layouts = self._fit.layouts.on_fewer(num_gpus)
        for most, layout in self._fit.by_bound(layouts, bound):
            if most < _NEAR * best:
                break
            for plan, memory in self._fit.lightest(layout):
                if self._model.most_tokens_per_s(plan) < _NEAR * best:
                    slow.append((plan, memory))
                    continue
                ranked = self._ranked(plan, memory)
                best = max(best, ranked.cost.tokens_per_s)
                found.append(ranked)
        # Layouts with a plan that surely comes before all of the slow ones.
        near = {own.plan.layout for own in found if _place(own)[0] < -_rounded(_NEAR * best)}
        if self._space.wants("train") and len(near) < _ENOUGH:
            found += [self._ranked(*own) for own in slow]  # some may come near in deeper rounds
        return [own for own in self._with_deeper(found) if own.cost.tokens_per_s >= _NEAR * best]

    def _ranked(self, plan: Plan, memory: MemoryUse) -> RankedPlan:
        if self._space.runs_in != "deepspeed":
            plan = self._model.fastest_split(plan)
        return RankedPlan(plan, self._model.step_cost(plan), memory)

    def _with_deeper(self, found: list[RankedPlan]) -> list[RankedPlan]:
        found.sort(key=_place)
        if not self._space.wants("train"):
            return found
        return sorted([*found, *_deeper(self._model, found)], key=_place)


def _deeper(model: CostModel, found: Sequence[RankedPlan]) -> Iterator[RankedPlan]:
    """Looks for deeper rounds wherever a plan whose replicas never waited would be the best.

    Jobs with small batches pay for depth: all jobs together must gain `_WORTH`, or none lose it.
    """
    waiting = [
        ranked
        for ranked in found
        if "train" in ranked.plan.runs_in
        # Ranks that share experts run equally many micro-batches.
        and ranked.plan.dp_size > 1 == ranked.plan.pp_size == ranked.plan.ep_size
        and ranked.cost.busy_share < _BUSY_ENOUGH
    ]
    waiting.sort(key=lambda ranked: -ranked.cost.tokens_per_s / ranked.cost.busy_share)
    best = max((ranked.cost.tokens_per_s for ranked in found), default=0.0)
    for ranked in waiting:
        before = ranked.cost
        if before.tokens_per_s / before.busy_share <= best:
            return
        for depth in DEPTHS[1:]:
            if before.busy_share >= _BUSY_ENOUGH:
                break
            deeper = replace(ranked.plan, round_depth=depth)
            cost = model.step_cost(deeper)
            gain = cost.tokens_per_s / before.tokens_per_s
            rates = zip(cost.job_tokens_per_s, before.job_tokens_per_s, strict=True)
            loses = min(after / own for after, own in rates) < 1 / _WORTH
            if gain <= 1 or (gain < _WORTH and loses):
                break
            yield RankedPlan(deeper, cost, ranked.memory)
            before, best = cost, max(best, cost.tokens_per_s)


def _place(ranked: RankedPlan) -> tuple[float, ...]:
    """Sort key: fastest first; plans equal to three digits by GPUs, least splitting, memory.

    The model is no more exact than three digits, and less communication is safer. A sharding that
    exchanges more than fold must be faster by a margin (`choices.handicap`).
    """
    plan = ranked.plan
    parts = plan.tp_size * plan.pp_size * plan.vpp_size * plan.cp_size * plan.ep_size
    rate = _rounded(ranked.cost.tokens_per_s * handicap(plan.lora_sharding))
    return -rate, plan.num_gpus, parts, plan.sequence_parallel, ranked.memory.total_bytes


def _rounded(rate: float) -> float:
    """A rate to three digits."""
    return float(f"{rate:.3g}")


GROUP_BUDGETS = (8192, 16384)
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
        if longest_of(jobs) > plan.micro_batch_tokens or job_misfit(jobs, plan) is not None:
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
        budgets = [budget for budget in GROUP_BUDGETS if budget >= longest]
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
