"""Says how many of the GPUs plans use, and whether fewer of them would do."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.search import RankedPlan, SearchResult
from tlora_megatron.planner.workload import JobLoad

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
            f"{num_gpus - used:,} of {num_gpus:,} GPUs are wasted on {sequences:,} sequences in "
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
