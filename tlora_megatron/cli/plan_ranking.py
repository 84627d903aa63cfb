"""Prints the results of `tlora plan`: ranked plans, and one plan's time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tlora_megatron.cli.tables import make_table
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.spec import ModelSpec, count_parameters
from tlora_megatron.planner.candidate import Plan, runners
from tlora_megatron.planner.cost import memory, step_terms
from tlora_megatron.planner.deploy_sampled import outlook_of_teams, saved_by_rows
from tlora_megatron.planner.fit import Dropped
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.search import RankedPlan, SearchResult
from tlora_megatron.planner.workload import JobLoad

_GIB = 2.0**30
_BAR = 40
_SHOWN_REASONS = 8
_WORTH_TELLING = 0.03
"""Gain at which a proposal is worth a line: predictions err by 2.5 %."""
_AS_FAST = 0.99
"""Share of the best plan's speed that counts as the same."""
_FAR_FEWER = 0.9
"""Share of the GPUs that a plan as fast may use at most to be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Everything that a search needs to know about a run, and how many plans to show."""

    config: RunConfig
    spec: ModelSpec
    jobs: Sequence[JobLoad]
    hardware: HardwareProfile
    num_gpus: int
    top: int
    space: SearchSpace = field(default_factory=SearchSpace)

    @property
    def asked(self) -> tuple[ModelSpec, Sequence[JobLoad], HardwareProfile, int, SearchSpace]:
        return self.spec, self.jobs, self.hardware, self.num_gpus, self.space


def print_result(console: Console, result: SearchResult, inputs: PlanInputs) -> None:
    """Prints the ranked plans, and the dropped ones by reason."""
    spec, jobs, hardware = inputs.spec, inputs.jobs, inputs.hardware
    tokens = sum(job.batch_tokens for job in jobs)
    console.print(
        f"{len(jobs)} jobs, {tokens:,.0f} tokens in all batches, on {inputs.num_gpus} x "
        f"{hardware.gpu} (profile {hardware.name}: {hardware.source}, {hardware.date})"
    )
    if spec.fp8_linears:
        linears = ", ".join(
            name if count == spec.num_layers else f"{name} of {count} layers"
            for name, count in spec.fp8_linears
        )
        times = f"{hardware.fp8_speedup:g} times {hardware.dtype}'s"
        rate = "measured" if hardware.fp8_gemms else times
        console.print(f"base in FP8: {linears}; the rest in {hardware.dtype} (FP8 rates: {rate})")
    if spec.experts is not None:
        total, active = count_parameters(spec)
        console.print(
            f"base of {total / 1e9:.3g} billion parameters, {active / 1e9:.3g} billion of them for "
            f"a row, which meets {spec.experts.top_k} of {spec.experts.num_experts} experts (their "
            "times are estimated: docs/planner.md)"
        )
    if result.plans:
        shown = _best_of_layouts(result.plans)[: inputs.top]
        _print_plans(console, shown, inputs)
        more = len(result.plans) - len(shown)
        if more:
            console.print(f"best of each layout; {more:,} more plans fit")
        print_idle(console, result, jobs, inputs.num_gpus)
    else:
        console.print("no plan fits", style="red")
    _print_dropped(console, result.dropped)


def pipeline_cell(plan: Plan) -> str:
    """Number of stages; of uneven ones also the layers of the first and the last."""
    ends = plan.first_stage_layers, plan.last_stage_layers
    if plan.is_even:
        return str(plan.pp_size)
    return f"{plan.pp_size} ({', '.join('' if n is None else str(n) for n in ends)})"


def print_idle(
    console: Console, result: SearchResult, jobs: Sequence[JobLoad], num_gpus: int
) -> None:
    """Names the GPUs that the best plan leaves idle, and a plan on far fewer that is as fast."""
    best = result.best
    if best is None:
        return
    left = num_gpus - best.plan.num_gpus
    if left:
        console.print(
            f"plan 1 uses {best.plan.num_gpus:,} of {num_gpus:,} GPUs and leaves {left:,} idle"
        )
    rank, thrifty = thriftiest(result)
    used = thrifty.plan.num_gpus
    if used <= _FAR_FEWER * num_gpus:
        sequences = sum(job.batch_size for job in jobs)
        share = thrifty.cost.tokens_per_s / best.cost.tokens_per_s
        console.print(
            f"more than {used:,} of {num_gpus:,} GPUs hardly help with {sequences:,} sequences in "
            f"all batches: plan {rank} has {share:.1%} of the best plan's speed on {used:,}",
            style="yellow",
        )


def thriftiest(result: SearchResult) -> tuple[int, RankedPlan]:
    """The plan with the fewest GPUs among those as fast as the best one, with its rank."""
    least = _AS_FAST * max(ranked.cost.tokens_per_s for ranked in result.plans)
    fast = (
        (ranked.plan.num_gpus, rank, ranked)
        for rank, ranked in enumerate(result.plans, start=1)
        if ranked.cost.tokens_per_s >= least
    )
    _, rank, found = min(fast, key=lambda own: own[:2])
    return rank, found


def _best_of_layouts(plans: Sequence[RankedPlan]) -> list[tuple[int, RankedPlan]]:
    """The first plan of each layout and program with its rank; others' budgets differ only."""
    best: dict[tuple[int | bool, ...], tuple[int, RankedPlan]] = {}
    for rank, ranked in enumerate(plans, start=1):
        plan = ranked.plan
        sizes = (plan.tp_size, plan.pp_size, plan.vpp_size, plan.cp_size, plan.sequence_parallel)
        kinds = plan.is_even, plan.num_micro_batches is None, plan.ep_size, plan.expert_tp
        best.setdefault((*sizes, *kinds), (rank, ranked))
    return list(best.values())


def print_teams(console: Console, result: SearchResult, inputs: PlanInputs) -> None:
    """Proposes `parallel.cp_by_micro_batch` for the best plan shown that would gain by it."""
    for rank, ranked in _shown_in_train(result, inputs):
        outlook = outlook_of_teams(inputs.spec, inputs.jobs, ranked.plan, inputs.hardware)
        if outlook is None:
            continue
        if outlook.saved >= _WORTH_TELLING:
            console.print(
                f"plan {rank} with parallel.cp_by_micro_batch and run.round_depth {outlook.depth}: "
                f"its rounds would take {outlook.saved:.0%} less time (docs/rounds.md)"
            )
        return


def print_recompute(console: Console, result: SearchResult, inputs: PlanInputs) -> None:
    """Proposes `run.recompute: auto` for the best plan shown that would gain by it."""
    for rank, ranked in _shown_in_train(result, inputs):
        saved = saved_by_rows(inputs.spec, inputs.jobs, ranked.plan, inputs.hardware)
        if saved is not None and saved >= _WORTH_TELLING:
            console.print(
                f"plan {rank} with run.recompute auto: its rounds would take {saved:.0%} less time "
                "(docs/rounds.md)"
            )
            return


def _shown_in_train(result: SearchResult, inputs: PlanInputs) -> list[tuple[int, RankedPlan]]:
    """The plans of the table that `tlora train` runs."""
    shown = _best_of_layouts(result.plans)[: inputs.top]
    return [(rank, own) for rank, own in shown if "train" in runners(inputs.spec, own.plan)]


def print_missing(console: Console, config: RunConfig) -> None:
    """Says which files of jobs a written plan names, and this machine does not have."""
    named = [path for job in config.jobs for path in job.data.files]
    missing = [path for path in dict.fromkeys(named) if not Path(path).is_file()]
    if missing:
        more, are = (f" and {len(missing) - 1} more", "are") if len(missing) > 1 else ("", "is")
        told = f"must lie where the run starts, and {are} not on this machine"
        console.print(f"note: {missing[0]}{more} {told}", style="yellow")


def _print_plans(
    console: Console, shown: Sequence[tuple[int, RankedPlan]], inputs: PlanInputs
) -> None:
    """Prints a row a plan; what no plan makes use of has no column."""
    entries = [ranked for _, ranked in shown]
    plans, costs = [own.plan for own in entries], [own.cost for own in entries]
    cells: dict[str, Sequence[object]] = {
        "": [rank for rank, _ in shown],
        "TP": [plan.tp_size for plan in plans],
        "SP": ["yes" if plan.sequence_parallel else "-" for plan in plans],
        "LoRA": [plan.lora_sharding if plan.tp_size > 1 else "-" for plan in plans],
        "PP": [pipeline_cell(plan) for plan in plans],
        "VPP": [plan.vpp_size for plan in plans],
        "CP": [plan.cp_size for plan in plans],
        "DP": [plan.dp_size for plan in plans],
    }
    if any(plan.ep_size > 1 for plan in plans):
        cells["EP"] = [plan.ep_size for plan in plans]
    if any(plan.expert_tp < plan.tp_size for plan in plans):
        cells["expert TP"] = [plan.expert_tp if plan.tp_size > 1 else "-" for plan in plans]
    cells["tokens"] = [f"{plan.micro_batch_tokens:,}" for plan in plans]
    cells["recompute"] = [plan.recompute for plan in plans]
    cells["tokens/s"] = [f"{cost.tokens_per_s:,.0f}" for cost in costs]
    if any(plan.num_gpus < inputs.num_gpus for plan in plans):
        cells["GPUs"] = [f"{plan.num_gpus:,}" for plan in plans]
        cells["idle"] = [f"{inputs.num_gpus - plan.num_gpus:,}" for plan in plans]
    if any(plan.num_nano_batches > 1 for plan in plans):
        cells["nano"] = [plan.num_nano_batches for plan in plans]
    if any(plan.num_micro_batches is not None for plan in plans):
        loads = [cost.load for cost in costs]
        cells["batches"] = [plan.num_micro_batches or "-" for plan in plans]
        cells["filled"] = ["-" if x.filled is None else f"{x.filled_share:.0%}" for x in loads]
    if any(plan.dp_size > 1 for plan in plans):
        cells["depth"] = [plan.round_depth for plan in plans]
        cells["busy"] = [f"{cost.busy_share:.0%}" for cost in costs]
    sizes = [own.memory.total_bytes for own in entries]
    cells["round ms"] = [f"{cost.step_time_s * 1e3:,.1f}" for cost in costs]
    cells["GiB"] = [f"{size / _GIB:.1f}" for size in sizes]
    cells["of it"] = [f"{size / inputs.hardware.memory_bytes:.0%}" for size in sizes]
    cells["time"] = [_second_term(cost) for cost in costs]
    cells["runs in"] = [", ".join(runners(inputs.spec, plan)) for plan in plans]
    table = make_table(*cells, right=cells.keys() - {"LoRA", "recompute", "time", "runs in"})
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(str, row))
    console.print(table, soft_wrap=False)


def _second_term(cost: step_terms.StepCost) -> str:
    """The largest term after the GEMMs, which almost always lead, with its share."""
    rest = [name for name in step_terms.TERMS if name != "gemm_s"]
    name = max(rest, key=lambda term: getattr(cost, term))
    share = getattr(cost, name) / cost.step_time_s
    return f"GEMM {cost.gemm_s / cost.step_time_s:.0%}, {_words(name)} {share:.0%}"


def _print_dropped(console: Console, dropped: Sequence[Dropped]) -> None:
    for entry in dropped[:_SHOWN_REASONS]:
        number = f"{entry.count:,} plans" if entry.count > 1 else "1 plan"
        console.print(f"dropped {number}: {entry.reason}", style="dim")
    if len(dropped) > _SHOWN_REASONS:
        rest = sum(entry.count for entry in dropped[_SHOWN_REASONS:])
        console.print(f"dropped {rest:,} plans for other reasons (--json lists them)", style="dim")


def print_explanation(console: Console, ranked: RankedPlan, inputs: PlanInputs) -> None:
    """Prints the time of a round and the memory of the fullest GPU as bars, then the jobs."""
    cost, use, room = ranked.cost, ranked.memory, inputs.hardware.memory_bytes
    console.print(f"\n{ranked.plan.label}")
    load = cost.load
    each = "up to " if load.filled is None else ""
    filled = "" if load.filled is None else f", {load.filled_share:.1%} of them filled"
    console.print(
        f"a round: {load.tokens:,.0f} tokens in {load.micro_batches:.3g} micro-batches a rank of "
        f"{each}{load.rows:,.0f} rows{filled}, {cost.step_time_s * 1e3:,.1f} ms"
    )
    times = {name: getattr(cost, name) for name in step_terms.TERMS}
    _print_bars(console, times, cost.step_time_s, 1e3, "ms")
    console.print(
        f"\nmemory of stage {use.stage}: {use.total_bytes / _GIB:.1f} of {room / _GIB:.1f} GiB"
    )
    sizes = {name: getattr(use, name) for name in memory.TERMS}
    _print_bars(console, sizes, room, 1 / _GIB, "GiB")
    _print_jobs(console, cost, inputs.jobs)


def _print_bars(
    console: Console, terms: dict[str, float], whole: float, scale: float, unit: str
) -> None:
    for name, value in terms.items():
        if value > 0:
            length = value / whole * _BAR
            bar = "█" * int(length) + ("▌" if length % 1 >= 0.5 else "")
            console.print(
                f"  {_words(name):18} {value * scale:10,.2f} {unit:3} {value / whole:6.1%}  {bar}"
            )


def _print_jobs(console: Console, cost: step_terms.StepCost, jobs: Sequence[JobLoad]) -> None:
    numbers = ("rank", "batch", "mean tokens", "tokens/s", "s a step")
    table = make_table("job", *numbers, right=numbers, words=("job",))
    rates = zip(jobs, cost.job_tokens_per_s, cost.job_step_time_s, strict=True)
    for job, tokens_per_s, step_time_s in rates:
        table.add_row(
            job.name,
            str(job.rank),
            str(job.batch_size),
            f"{job.lengths.mean:,.0f}",
            f"{tokens_per_s:,.0f}",
            f"{step_time_s:.3f}",
        )
    console.print(table, soft_wrap=False)


def _words(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ").replace("comm", "communication")


def result_document(result: SearchResult, inputs: PlanInputs) -> dict[str, Any]:
    """The document that `--json` prints."""
    hardware = inputs.hardware
    return {
        "num_gpus": inputs.num_gpus,
        "hardware": {
            "name": hardware.name,
            "gpu": hardware.gpu,
            "source": hardware.source,
            "date": hardware.date,
        },
        "base": {"dtype": hardware.dtype, "fp8_linears": dict(inputs.spec.fp8_linears)},
        "jobs": [
            {
                "name": job.name,
                "rank": job.rank,
                "batch_size": job.batch_size,
                "mean_tokens": job.lengths.mean,
                "longest_tokens": job.lengths.longest,
            }
            for job in inputs.jobs
        ],
        "plans_that_fit": len(result.plans),
        "plans": [_plan_document(own, inputs) for own in result.plans[: inputs.top]],
        "dropped": [
            {"reason": entry.reason, "count": entry.count, "example": entry.example.label}
            for entry in result.dropped
        ],
    }


def _plan_document(ranked: RankedPlan, inputs: PlanInputs) -> dict[str, Any]:
    plan, cost, use = ranked.plan, ranked.cost, ranked.memory
    return {
        **asdict(plan),
        "stages": list(plan.stages(inputs.spec)),
        "num_gpus": plan.num_gpus,
        "idle_gpus": inputs.num_gpus - plan.num_gpus,
        "runs_in": list(runners(inputs.spec, plan)),
        "step_time_s": cost.step_time_s,
        "tokens_per_s": cost.tokens_per_s,
        "binding_time": cost.binding,
        "busy_share": cost.busy_share,
        "filled_share": cost.load.filled_share,
        "time_s": {name: getattr(cost, name) for name in step_terms.TERMS},
        "memory_bytes": use.total_bytes,
        "binding_memory": use.binding,
        "memory": {name: getattr(use, name) for name in memory.TERMS},
        "jobs": [
            {"name": job.name, "tokens_per_s": rate, "step_time_s": step_s}
            for job, rate, step_s in zip(
                inputs.jobs, cost.job_tokens_per_s, cost.job_step_time_s, strict=True
            )
        ],
    }
