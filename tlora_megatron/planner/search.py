"""Ranks all ways to run a mix of jobs on some GPUs, and proposes changes if none fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from tlora_megatron.config.deterministic import MOST_TP, exact_shardings
from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.model.recompute import RECOMPUTES, Recompute
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import (
    DEPTHS,
    Plan,
    Runner,
    chunk_multiple,
    job_misfit,
    misfit,
)
from tlora_megatron.planner.cost.cost_model import CostModel, StepCost
from tlora_megatron.planner.cost.memory import MemoryModel, MemoryUse, longest_batches, most_rows
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.drops import Dropped, Drops
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.lora_choice import handicap, sharding_options
from tlora_megatron.planner.remedies import MOST_GPUS, fewer_jobs, more_gpus, shorter
from tlora_megatron.planner.workload import JobLoad, check_jobs

BUDGETS = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)
"""Micro-batch budgets to try, in tokens."""

_DEEPENED = 4
"""Layouts for which deeper rounds are looked for, the fastest ones."""
_BUSY_ENOUGH, _WORTH = 0.97, 1.05
"""Busy share beyond which rounds are deep enough, and the gain that is worth any loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """Values that the search must keep to; None: the search chooses."""

    tp_size: int | None = None
    pp_size: int | None = None
    vpp_size: int | None = None
    cp_size: int | None = None
    sequence_parallel: bool | None = None
    lora_sharding: LoraSharding | None = None
    recompute: Recompute | None = None
    micro_batch_tokens: int | None = None
    largest_portion: int | None = None
    """Tokens that each micro-batch must hold, as `portion_tokens` of a job asks."""
    runs_in: Runner | None = None
    """Keep only plans that this program can run."""
    deterministic: Literal[True] | None = None
    """Keep only plans that `run.deterministic` does not refuse."""

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "vpp_size", "cp_size", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def allows(self, plan: Plan) -> bool:
        """True if the plan keeps to the fixed values."""
        most_tp = 1 if self.runs_in == "deepspeed" else MOST_TP
        if self.deterministic and (plan.tp_size > most_tp or plan.cp_size > 1):
            return False
        fixed = ("tp_size", "pp_size", "vpp_size", "cp_size", "sequence_parallel")
        return all(getattr(self, name) in (None, getattr(plan, name)) for name in fixed)

    def can_run(self, plan: Plan) -> bool:
        """True if `runs_in` can run the plan, whose recompute and sharding have been chosen."""
        exact = plan.tp_size == 1 or plan.lora_sharding in exact_shardings(plan.sequence_parallel)
        if self.deterministic and not exact:
            return False
        return self.runs_in is None or self.runs_in in plan.runs_in


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A plan that fits, with its time and memory term by term."""

    plan: Plan
    cost: StepCost
    memory: MemoryUse


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    plans: tuple[RankedPlan, ...]
    """Plans that fit, fastest first."""
    dropped: tuple[Dropped, ...]
    remedies: tuple[str, ...]
    """If no plan fits, the smallest changes that would make one fit."""

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
) -> SearchResult:
    """Ranks every plan on exactly `num_gpus` GPUs by tokens per second of all jobs.

    Tries all TP, PP, virtual PP, CP and DP sizes whose product is `num_gpus`, with all choices of
    sequence parallelism, LoRA sharding, recompute and `BUDGETS`; none is skipped by a bound. Each
    plan gets the number of nano-batches that is fastest for it.

    Raises:
        ValueError: for jobs or numbers that cannot be planned for, or sizes that no layout of
            `num_gpus` GPUs has. That no plan fits is not an error.
    """
    check_jobs(jobs)
    if not 1 <= num_gpus <= MOST_GPUS:
        raise ValueError(f"num_gpus must be in [1, {MOST_GPUS}], got {num_gpus}")
    space = space or SearchSpace()
    drops = Drops()
    model = CostModel(spec, jobs, Rates(hardware))
    found = []
    for plan, memory in _fitting(spec, jobs, hardware, num_gpus, space, drops):
        if space.runs_in != "deepspeed":
            plan = model.fastest_split(plan)
        found.append(RankedPlan(plan, model.step_cost(plan), memory))
    found.sort(key=_place)
    if space.runs_in in (None, "train"):
        found = sorted([*found, *_deeper(model, found)], key=_place)
    dropped = drops.result()
    if not found and not dropped:
        fixed = {name: value for name, value in asdict(space).items() if value is not None}
        raise ValueError(f"what is fixed must allow some plan on {num_gpus} GPUs, got {fixed}")
    remedies = () if found else tuple(_remedies(spec, jobs, hardware, num_gpus, space))
    return SearchResult(tuple(found), dropped, remedies)


def _deeper(model: CostModel, found: Sequence[RankedPlan]) -> Iterator[RankedPlan]:
    """Looks for deeper rounds for the best plans of the first layouts, where replicas wait.

    Jobs with small batches pay for depth: all jobs together must gain `_WORTH`, or none lose it.
    """
    layouts: dict[object, RankedPlan] = {}
    for ranked in found:
        layouts.setdefault(ranked.plan.layout, ranked)
    for ranked in list(layouts.values())[:_DEEPENED]:
        plan, before = ranked.plan, ranked.cost
        if plan.dp_size == 1 or plan.pp_size > 1:
            continue
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
    """Sort key: fastest first; plans equal to three digits by least splitting, then smallest.

    The model is no more exact than three digits, and less communication is safer. A sharding that
    exchanges more than fold must be faster by a margin (`lora_choice.handicap`).
    """
    plan = ranked.plan
    parts = plan.tp_size * plan.pp_size * plan.vpp_size * plan.cp_size
    rate = float(f"{ranked.cost.tokens_per_s * handicap(plan.lora_sharding):.3g}")
    return -rate, parts, plan.sequence_parallel, ranked.memory.total_bytes


def _fitting(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    num_gpus: int,
    space: SearchSpace,
    drops: Drops,
    most_budgets: int | None = None,
) -> Iterator[tuple[Plan, MemoryUse]]:
    model = MemoryModel(spec, jobs, hardware)
    for layout in _layouts(spec, num_gpus, space):
        reason = _layout_misfit(spec, layout, hardware) or job_misfit(jobs, layout)
        if reason is not None:
            drops.add(reason, reason, layout)
            continue
        for plan in _variants(jobs, layout, space, most_budgets):
            if not space.can_run(plan):
                continue
            reason = misfit(spec, plan)
            if reason is not None:
                drops.add(reason, reason, plan)
                continue
            memory = model.use(plan)
            if memory.total_bytes <= hardware.memory_bytes:
                yield plan, memory
            else:
                drops.add_for_memory(plan, memory, hardware)


def _layouts(spec: ModelSpec, num_gpus: int, space: SearchSpace) -> Iterator[Plan]:
    """All sizes whose product is the number of GPUs, with those that the model does not allow."""
    divisors = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    for tp in divisors:
        for pp in (n for n in divisors if num_gpus % (tp * n) == 0):
            for cp in (n for n in divisors if num_gpus % (tp * pp * n) == 0):
                for vpp in _vpp_sizes(spec, pp):
                    for sequence_parallel in (False, True) if tp > 1 else (False,):
                        plan = Plan(
                            tp_size=tp,
                            pp_size=pp,
                            vpp_size=vpp,
                            cp_size=cp,
                            dp_size=num_gpus // (tp * pp * cp),
                            sequence_parallel=sequence_parallel,
                        )
                        if space.allows(plan):
                            yield plan


def _vpp_sizes(spec: ModelSpec, pp_size: int) -> list[int]:
    if pp_size == 1 or spec.num_layers % pp_size:
        return [1]
    layers = spec.num_layers // pp_size
    return [n for n in range(1, layers + 1) if layers % n == 0]


def _layout_misfit(spec: ModelSpec, layout: Plan, hardware: HardwareProfile) -> str | None:
    if layout.num_gpus > hardware.gpus_per_node and hardware.inter_node is None:
        return (
            f"{layout.num_gpus} GPUs are more than the {hardware.gpus_per_node} of a node, "
            f"and profile {hardware.name} has no inter_node link"
        )
    return misfit(spec, replace(layout, micro_batch_tokens=2 * layout.tp_size * layout.cp_size))


def _variants(
    jobs: Sequence[JobLoad], layout: Plan, space: SearchSpace, most_budgets: int | None
) -> Iterator[Plan]:
    recomputes = RECOMPUTES if space.recompute is None else (space.recompute,)
    shardings = sharding_options(jobs, layout, space.lora_sharding)
    for budget in budgets(jobs, layout, space)[:most_budgets]:
        for recompute in recomputes:
            for sharding in shardings:
                yield replace(
                    layout,
                    micro_batch_tokens=budget,
                    recompute=recompute,
                    lora_sharding=sharding,
                )


def budgets(jobs: Sequence[JobLoad], layout: Plan, space: SearchSpace) -> list[int]:
    """Budgets worth trying: from the longest sequence or portion up to all batches together."""
    longest = max(max(job.lengths.longest, job.longest_eval) for job in jobs)
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


def _remedies(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    num_gpus: int,
    space: SearchSpace,
) -> Iterator[str]:
    """The smallest change of each kind that makes a plan fit, the cheapest kind first."""

    def fits(mix: Sequence[JobLoad], gpus: int, within: SearchSpace) -> bool:
        # Virtual stages and larger budgets need more memory, never less.
        within = replace(within, vpp_size=within.vpp_size or 1)
        plans = _fitting(spec, mix, hardware, gpus, within, Drops(), most_budgets=1)
        return next(plans, None) is not None

    free = replace(space, recompute=None, micro_batch_tokens=None)
    if free != space and fits(jobs, num_gpus, free):
        yield "leave recompute and micro_batch_tokens free: another choice fits"
    any_layout = replace(
        space, tp_size=None, pp_size=None, vpp_size=None, cp_size=None, sequence_parallel=None
    )
    if any_layout != space and fits(jobs, num_gpus, any_layout):
        yield "leave the layout free: another one fits"
    yield from fewer_jobs(jobs, lambda mix: fits(mix, num_gpus, space))
    yield from shorter(jobs, lambda mix: fits(mix, num_gpus, space))
    node = hardware.gpus_per_node
    if hardware.inter_node is None and num_gpus > node and fits(jobs, node, space):
        yield f"use the {node} GPUs of a node, or a profile with an inter_node link"
    for gpus in more_gpus(num_gpus, hardware):
        if fits(jobs, gpus, space):
            yield f"use {gpus} GPUs"
            break
