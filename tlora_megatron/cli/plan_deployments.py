"""Prints what `tlora plan` says beside its ranking: deployments, idle GPUs, and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from tlora_megatron.cli.tables import make_table
from tlora_megatron.planner.advice import Advice
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.deploy import MARGIN, DeploymentResult, RankedDeployment
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.search import RankedPlan, SearchResult
from tlora_megatron.planner.workload import JobLoad


def print_advice(console: Console, advice: Advice, replicas: str = "") -> None:
    """Prints a line for each change that helps the replicas, or why none does."""
    for remedy in advice.remedies:
        console.print(f"would fit{replicas}: {remedy}")
    if advice.why_none:
        console.print(advice.why_none)


def advice_document(advice: Advice | None) -> dict[str, Any]:
    """The keys that `--json` adds; for None a plan fits, and nobody asked."""
    if advice is None:
        return {"would_fit": [], "why_nothing_fits": None}
    return {
        "would_fit": [str(remedy) for remedy in advice.remedies],
        "why_nothing_fits": advice.why_none or None,
    }


_AS_FAST = 0.99
"""Share of the best plan's speed that counts as the same."""
_WORTH_TELLING = 0.9
"""Share of the GPUs that a plan as fast may use at most to be told."""


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
    if used <= _WORTH_TELLING * num_gpus:
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


def print_deployments(
    console: Console, result: DeploymentResult, hardware: HardwareProfile, num_gpus: int, top: int
) -> None:
    """Prints the deployments with their distance to the bound, and which one is to be taken."""
    console.print(
        f"{result.tokens:,.0f} tokens in all batches, on {num_gpus} x {hardware.gpu} (profile "
        f"{hardware.name}: {hardware.source}, {hardware.date})"
    )
    if not result.ranked:
        console.print("no replica holds the longest sequence", style="red")
        return
    numbers = ("tokens/s", "GPU-s", "undivided", "over bound", "busy", "depth")
    table = make_table("", "replicas", *numbers, right=("", *numbers), words=("replicas",))
    for place, entry in enumerate(result.ranked[:top], start=1):
        sampled = entry.sampled
        table.add_row(
            str(place),
            entry.label,
            f"{result.tokens / entry.time_s:,.0f}",
            f"{entry.time_s * num_gpus:,.2f}",
            f"{entry.fluid_s * num_gpus:,.2f}",
            f"{entry.gap:.1%}",
            "-" if sampled is None else f"{sampled.busy_share:.1%}",
            "-" if sampled is None else str(sampled.depth),
        )
    console.print(table)
    console.print(
        f"bound of all deployments: {result.bound_s * num_gpus:,.2f} GPU-s; {result.num_kinds} "
        f"kinds of replicas fit, {result.num_undominated} are worth mixing"
    )
    first = result.ranked[0]
    kind = "alike" if first.is_alike else "unlike"
    console.print(f"to take: {first.label} ({kind}: unlike ones must win by {MARGIN:.0%})")


def deployments_document(result: DeploymentResult, num_gpus: int, top: int) -> dict[str, Any]:
    """The document that `--json` prints."""
    return {
        "num_gpus": num_gpus,
        "tokens": result.tokens,
        "bound_gpu_s": result.bound_s * num_gpus if result.ranked else None,
        "kinds_that_fit": result.num_kinds,
        "kinds_worth_mixing": result.num_undominated,
        "deployments": [_document(result, entry, num_gpus) for entry in result.ranked[:top]],
    }


def _document(result: DeploymentResult, entry: RankedDeployment, num_gpus: int) -> dict[str, Any]:
    pairs = zip(entry.replicas.kinds, entry.replicas.counts, strict=True)
    return {
        "replicas": entry.label,
        "alike": entry.is_alike,
        "tokens_per_s": result.tokens / entry.time_s,
        "gpu_s": entry.time_s * num_gpus,
        "undivided_gpu_s": entry.fluid_s * num_gpus,
        "over_bound": entry.gap,
        "sampled": None if entry.sampled is None else entry.sampled._asdict(),
        "kinds": [
            {"count": count, **asdict(kind.layout), "rate": asdict(kind.curve.rate)}
            for kind, count in pairs
        ],
    }
