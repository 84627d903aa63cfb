"""Ranks all ways to run a mix of jobs on some GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import DEPTHS, Plan, is_ours_alone
from tlora_megatron.planner.choices import handicap
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import MemoryUse
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.fit import Dropped, Drops, Fit, SpeedBound
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.workload import JobLoad, check_jobs

MOST_GPUS = 4096
"""Most GPUs that are planned for."""
_DEEPENED = 4
"""Layouts for which deeper rounds are looked for, the fastest ones."""
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
    hunt = _Hunt(spec, jobs, hardware, space)
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

    def __init__(
        self,
        spec: ModelSpec,
        jobs: Sequence[JobLoad],
        hardware: HardwareProfile,
        space: SearchSpace,
    ) -> None:
        self.drops = Drops()
        self._space = space
        self._model = CostModel(spec, jobs, hardware)
        self._fit = Fit(spec, jobs, hardware, space, self.drops, self._model.rounds)

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
        if self._space.wants("train") and len(near) < _DEEPENED:
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
    """Looks for deeper rounds for the best plans of the first layouts, where replicas wait.

    Jobs with small batches pay for depth: all jobs together must gain `_WORTH`, or none lose it.
    """
    layouts: dict[object, RankedPlan] = {}
    for ranked in found:
        if "train" in ranked.plan.runs_in:
            layouts.setdefault(ranked.plan.layout, ranked)
    for ranked in list(layouts.values())[:_DEEPENED]:
        plan, before = ranked.plan, ranked.cost
        if plan.dp_size == 1 or plan.pp_size > 1 or plan.ep_size > 1:
            continue  # ranks that share experts run equally many micro-batches
        for depth in DEPTHS[1:]:
            if before.busy_share >= _BUSY_ENOUGH:
                break
            deeper = replace(plan, round_depth=depth)
            cost = model.step_cost(deeper)
            gain = cost.tokens_per_s / before.tokens_per_s
            rates = zip(cost.job_tokens_per_s, before.job_tokens_per_s, strict=True)
            loses = min(after / own for after, own in rates) < 1 / _WORTH
            if gain <= 1 or (gain < _WORTH and loses):
                break
            yield RankedPlan(deeper, cost, ranked.memory)
            before = cost


def _place(ranked: RankedPlan) -> tuple[float, ...]:
    """Sort key: fastest first; plans equal to three digits by GPUs, least splitting, memory.

    The model is no more exact than three digits, and less communication is safer. A sharding that
    exchanges more than fold must be faster by a margin (`lora_choice.handicap`).
    """
    plan = ranked.plan
    parts = plan.tp_size * plan.pp_size * plan.vpp_size * plan.cp_size * plan.ep_size
    rate = _rounded(ranked.cost.tokens_per_s * handicap(plan.lora_sharding))
    return -rate, plan.num_gpus, parts, plan.sequence_parallel, ranked.memory.total_bytes


def _rounded(rate: float) -> float:
    """A rate to three digits."""
    return float(f"{rate:.3g}")
