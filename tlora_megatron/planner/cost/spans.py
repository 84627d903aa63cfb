"""Counts how a plan's process groups lie over nodes: what each node holds, which hops leave it.

`tlora train` and Megatron-LM place ranks alike (Megatron's order tp-cp-ep-dp-pp): tensor-parallel
neighbours are next to each other, then context-parallel ones, replicas, and stages last. A node
holds `gpus_per_node` consecutive ranks.

"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tlora_megatron.planner.candidate import Plan


class Span(NamedTuple):
    """A kind of process group over nodes. All of a kind run at once, so the worst one counts."""

    ranks: int
    nodes: int = 1
    """Most nodes that a group touches."""
    local: int = 1
    """Fewest of its GPUs on a node that it touches."""


class PlanSpans(NamedTuple):
    """The process groups of a plan over nodes."""

    tp: Span
    cp: Span
    replicas: Span
    """Data- and context-parallel ranks together, which sum adapters' gradients."""
    hops: tuple[bool, ...]
    """For every stage, True if a rank's next stage is on another node; the last one's is the first
    stage. Empty without a pipeline."""


def plan_spans(plan: Plan, gpus_per_node: int) -> PlanSpans:
    """Returns how the groups of a plan lie over nodes of so many GPUs."""
    return _spans(plan.tp_size, plan.cp_size, plan.dp_size, plan.pp_size, gpus_per_node)


def expert_span(plan: Plan, gpus_per_node: int) -> Span:
    """Returns how the ranks that share a layer's experts lie over nodes.

    They are neighbours, but for tensor-parallel ones that share each expert.
    """
    return group_span(plan.ep_size, plan.expert_tp, plan.num_gpus, gpus_per_node)


@lru_cache(maxsize=4096)
def _spans(tp: int, cp: int, dp: int, pp: int, gpus_per_node: int) -> PlanSpans:
    num_gpus = tp * cp * dp * pp
    return PlanSpans(
        tp=group_span(tp, 1, num_gpus, gpus_per_node),
        cp=group_span(cp, tp, num_gpus, gpus_per_node),
        replicas=group_span(cp * dp, tp, num_gpus, gpus_per_node),
        hops=crossing_hops(pp, num_gpus // pp, gpus_per_node),
    )


@lru_cache(maxsize=4096)
def group_span(ranks: int, stride: int, num_gpus: int, gpus_per_node: int) -> Span:
    """Returns the span of all groups of `ranks` GPUs that are `stride` apart.

    Args:
        num_gpus: GPUs of the plan, a multiple of `ranks * stride`.
    """
    block = ranks * stride
    if num_gpus <= gpus_per_node or gpus_per_node % block == 0:
        return Span(ranks, 1, ranks)
    nodes, local = 1, ranks
    for begin in range(0, num_gpus, block):
        for first in range(begin, begin + stride):
            held: dict[int, int] = {}
            for gpu in range(first, begin + block, stride):
                node = gpu // gpus_per_node
                held[node] = held.get(node, 0) + 1
            nodes, local = max(nodes, len(held)), min(local, *held.values(), ranks)
    return Span(ranks, nodes, local)


def crossing_hops(stages: int, stage_gpus: int, gpus_per_node: int) -> tuple[bool, ...]:
    """Returns for every stage whether some rank's next stage is on another node."""
    if stages == 1:
        return ()
    # Ranks of stage i are [i, i + 1) x stage_gpus, those that they send to one stage_gpus further.
    inner = tuple(
        ((i + 2) * stage_gpus - 1) // gpus_per_node > i * stage_gpus // gpus_per_node
        for i in range(stages - 1)
    )
    return (*inner, stages * stage_gpus > gpus_per_node)
