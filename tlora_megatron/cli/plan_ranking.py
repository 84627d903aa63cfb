"""Prints the results of `tlora plan`: ranked plans, and one plan's time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tlora_megatron.cli.plan_deployments import pipeline_cell, print_idle
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.experts import ExpertsSpec
from tlora_megatron.model.spec import ModelSpec, count_parameters
from tlora_megatron.planner.candidate import runners
from tlora_megatron.planner.cost import memory, step_terms
from tlora_megatron.planner.deploy_sampled import outlook_of_teams, saved_by_rows
from tlora_megatron.planner.fit import Dropped
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.search import RankedPlan, SearchResult
from tlora_megatron.planner.workload import JobLoad

_GIB = 2.0**30
_BAR = 40
_SHOWN_REASONS = 8
_WORTH_TELLING = 0.03
"""Gain at which a proposal is worth a line: predictions err by 2.5 %."""


def print_result(
    console: Console,
    result: SearchResult,
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    num_gpus: int,
    top: int,
) -> None:
    """Prints the ranked plans, and the dropped ones by reason."""
    tokens = sum(job.batch_tokens for job in jobs)
    console.print(
        f"{len(jobs)} jobs, {tokens:,.0f} tokens in all batches, on {num_gpus} x {hardware.gpu} "
        f"(profile {hardware.name}: {hardware.source}, {hardware.date})"
    )
    if spec.fp8_linears:
        rate = (
            "measured"
            if hardware.fp8_gemms
            else f"{hardware.fp8_speedup:g} times {hardware.dtype}'s"
        )
        console.print(
            f"base in FP8: {_fp8_linears(spec)}; the rest in {hardware.dtype} (FP8 rates: {rate})"
        )
    if spec.experts is not None:
        console.print(_experts_line(spec, spec.experts))
    if result.plans:
        shown = _best_of_layouts(result.plans)[:top]
        _print_plans(console, shown, spec, hardware, num_gpus)
        more = len(result.plans) - len(shown)
        if more:
            console.print(f"best of each layout; {more:,} more plans fit")
        print_idle(console, result, jobs, num_gpus)
    else:
        console.print("no plan fits", style="red")
    _print_dropped(console, result.dropped)


def _fp8_linears(spec: ModelSpec) -> str:
    """The FP8 linears, each with its number of layers where that is not all."""
    return ", ".join(
        name if count == spec.num_layers else f"{name} of {count} layers"
        for name, count in spec.fp8_linears
    )


def _experts_line(spec: ModelSpec, experts: ExpertsSpec) -> str:
    total, active = count_parameters(spec)
    return (
        f"base of {total / 1e9:.3g} billion parameters, {active / 1e9:.3g} billion of them for a "
        f"row, which meets {experts.top_k} of {experts.num_experts} experts (their times are "
        "estimated: docs/planner.md)"
    )


def _best_of_layouts(plans: Sequence[RankedPlan]) -> list[tuple[int, RankedPlan]]:
    """The first plan of each layout and program with its rank; others' budgets differ only."""
    best: dict[tuple[int | bool, ...], tuple[int, RankedPlan]] = {}
    for rank, ranked in enumerate(plans, start=1):
        plan = ranked.plan
        sizes = (plan.tp_size, plan.pp_size, plan.vpp_size, plan.cp_size, plan.sequence_parallel)
        kinds = plan.is_even, plan.num_micro_batches is None, plan.ep_size, plan.expert_tp
        best.setdefault((*sizes, *kinds), (rank, ranked))
    return list(best.values())


def print_other_programs(console: Console, result: SearchResult) -> None:
    """Says how the times of another program are asked for, where those of `tlora train` are."""
    if result.best is not None and "train" in result.best.plan.runs_in:
        console.print("under Megatron-LM's trainer times are others: --runs-in megatron or any")


def print_teams(
    console: Console,
    result: SearchResult,
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    top: int,
) -> None:
    """Proposes `parallel.cp_by_micro_batch` for the best plan shown that would gain by it."""
    for rank, ranked in _best_of_layouts(result.plans)[:top]:
        if "train" not in runners(spec, ranked.plan):
            continue
        outlook = outlook_of_teams(spec, jobs, ranked.plan, hardware)
        if outlook is None:
            continue
        if outlook.saved >= _WORTH_TELLING:
            console.print(
                f"plan {rank} with parallel.cp_by_micro_batch and run.round_depth {outlook.depth}: "
                f"its rounds would take {outlook.saved:.0%} less time (docs/rounds.md)"
            )
        return


def print_recompute(
    console: Console,
    result: SearchResult,
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    top: int,
) -> None:
    """Proposes `run.recompute: auto` for the best plan shown that would gain by it."""
    for rank, ranked in _best_of_layouts(result.plans)[:top]:
        if "train" not in runners(spec, ranked.plan):
            continue
        saved = saved_by_rows(spec, jobs, ranked.plan, hardware)
        if saved is not None and saved >= _WORTH_TELLING:
            console.print(
                f"plan {rank} with run.recompute auto: its rounds would take {saved:.0%} less time "
                "(docs/rounds.md)"
            )
            return


def print_missing(console: Console, config: RunConfig) -> None:
    """Says which files of jobs a written plan names, and this machine does not have."""
    named = [path for job in config.jobs for path in (job.data.train, job.data.eval) if path]
    missing = [path for path in dict.fromkeys(named) if not Path(path).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        console.print(
            f"note: {missing[0]}{more} must lie where the run starts, and are not on this machine"
            if more
            else f"note: {missing[0]} must lie where the run starts, and is not on this machine",
            style="yellow",
        )


def _print_plans(
    console: Console,
    plans: Sequence[tuple[int, RankedPlan]],
    spec: ModelSpec,
    hardware: HardwareProfile,
    num_gpus: int,
) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    shares = [ranked.plan.ep_size > 1 for _, ranked in plans]
    wholes = [ranked.plan.expert_tp < ranked.plan.tp_size for _, ranked in plans]
    of_experts = ["EP"] * any(shares) + ["expert TP"] * any(wholes)
    sizes = ("TP", "SP", "LoRA", "PP", "VPP", "CP", "DP")
    for name in ("", *sizes, *of_experts, "tokens", "recompute", "tokens/s"):
        justify: Literal["left", "right"] = "left" if name in ("LoRA", "recompute") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    leaves = any(ranked.plan.num_gpus < num_gpus for _, ranked in plans)
    for name in ("GPUs", "idle") if leaves else ():
        table.add_column(name, justify="right", no_wrap=True)
    is_cut = any(ranked.plan.num_nano_batches > 1 for _, ranked in plans)
    if is_cut:
        table.add_column("nano", justify="right", no_wrap=True)
    is_full = any(ranked.plan.num_micro_batches is not None for _, ranked in plans)
    for name in ("batches", "filled") if is_full else ():
        table.add_column(name, justify="right", no_wrap=True)
    waits = any(ranked.plan.dp_size > 1 for _, ranked in plans)
    for name in ("depth", "busy") if waits else ():
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("round ms", "GiB", "of it"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("time", no_wrap=True)
    table.add_column("runs in", no_wrap=True)
    total = hardware.memory_bytes
    for rank, ranked in plans:
        plan, cost, use = ranked.plan, ranked.cost, ranked.memory
        table.add_row(
            str(rank),
            str(plan.tp_size),
            "yes" if plan.sequence_parallel else "-",
            plan.lora_sharding if plan.tp_size > 1 else "-",
            pipeline_cell(plan),
            str(plan.vpp_size),
            str(plan.cp_size),
            str(plan.dp_size),
            *([str(plan.ep_size)] if any(shares) else []),
            *([str(plan.expert_tp) if plan.tp_size > 1 else "-"] if any(wholes) else []),
            f"{plan.micro_batch_tokens:,}",
            plan.recompute,
            f"{cost.tokens_per_s:,.0f}",
            *([f"{plan.num_gpus:,}", f"{num_gpus - plan.num_gpus:,}"] if leaves else []),
            *([str(plan.num_nano_batches)] if is_cut else []),
            *([str(plan.num_micro_batches or "-"), _filled(cost)] if is_full else []),
            *([str(plan.round_depth), f"{cost.busy_share:.0%}"] if waits else []),
            f"{cost.step_time_s * 1e3:,.1f}",
            f"{use.total_bytes / _GIB:.1f}",
            f"{use.total_bytes / total:.0%}",
            _second_term(cost),
            ", ".join(runners(spec, plan)),
        )
    console.print(table, soft_wrap=False)


def _filled(cost: step_terms.StepCost) -> str:
    """Share of the rows that jobs fill, if rounds have a fixed size."""
    return "-" if cost.load.filled is None else f"{cost.load.filled_share:.0%}"


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


def print_explanation(
    console: Console, ranked: RankedPlan, jobs: Sequence[JobLoad], hardware: HardwareProfile
) -> None:
    """Prints the time of a round and the memory of the fullest GPU as bars, then the jobs."""
    cost, use = ranked.cost, ranked.memory
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
        f"\nmemory of stage {use.stage}: {use.total_bytes / _GIB:.1f} of "
        f"{hardware.memory_bytes / _GIB:.1f} GiB"
    )
    sizes = {name: getattr(use, name) for name in memory.TERMS}
    _print_bars(console, sizes, hardware.memory_bytes, 1 / _GIB, "GiB")
    _print_jobs(console, cost, jobs)


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
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("job")
    for name in ("rank", "batch", "mean tokens", "tokens/s", "s a step"):
        table.add_column(name, justify="right", no_wrap=True)
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


def result_document(
    result: SearchResult,
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    num_gpus: int,
    top: int,
) -> dict[str, Any]:
    """The document that `--json` prints."""
    return {
        "num_gpus": num_gpus,
        "hardware": {
            "name": hardware.name,
            "gpu": hardware.gpu,
            "source": hardware.source,
            "date": hardware.date,
        },
        "base": {"dtype": hardware.dtype, "fp8_linears": dict(spec.fp8_linears)},
        "jobs": [
            {
                "name": job.name,
                "rank": job.rank,
                "batch_size": job.batch_size,
                "mean_tokens": job.lengths.mean,
                "longest_tokens": job.lengths.longest,
            }
            for job in jobs
        ],
        "plans_that_fit": len(result.plans),
        "plans": [_plan_document(own, spec, jobs, num_gpus) for own in result.plans[:top]],
        "dropped": [
            {"reason": entry.reason, "count": entry.count, "example": entry.example.label}
            for entry in result.dropped
        ],
    }


def _plan_document(
    ranked: RankedPlan, spec: ModelSpec, jobs: Sequence[JobLoad], num_gpus: int
) -> dict[str, Any]:
    plan, cost, use = ranked.plan, ranked.cost, ranked.memory
    return {
        **asdict(plan),
        "stages": list(plan.stages(spec)),
        "num_gpus": plan.num_gpus,
        "idle_gpus": num_gpus - plan.num_gpus,
        "runs_in": list(runners(spec, plan)),
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
                jobs, cost.job_tokens_per_s, cost.job_step_time_s, strict=True
            )
        ],
    }
