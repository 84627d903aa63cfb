"""Groups over nodes, counted rank by rank, and the time of their collectives, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.helpers.planner_case import HARDWARE, SPEC, job, step_cost
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.rates import over_nodes_s
from tlora_megatron.planner.hardware import Link
from tlora_megatron.planner.layouts import PlanSpans, Span, plan_spans

RAILS = replace(HARDWARE, nics_per_node=8)
"""Eight cards of 0.1 GB/s a node, NVLink of 1 GB/s."""


def counted(plan: Plan, node: int) -> PlanSpans:
    """The spans of a plan from the ranks of Megatron's order tp-cp-ep-dp-pp."""
    tp, cp, dp, pp = plan.tp_size, plan.cp_size, plan.dp_size, plan.pp_size
    places = [
        (t, c, d, p) for p in range(pp) for d in range(dp) for c in range(cp) for t in range(tp)
    ]
    node_of = {place: rank // node for rank, place in enumerate(places)}

    def span(*axes: int) -> Span:
        groups: dict[object, Counter[int]] = {}
        for place, where in node_of.items():
            key = tuple(0 if i in axes else n for i, n in enumerate(place))
            groups.setdefault(key, Counter())[where] += 1
        held = groups.values()
        ranks = sum(next(iter(held)).values())
        return Span(ranks, max(map(len, held)), min(min(g.values()) for g in held))

    def leaves(stage: int) -> bool:
        ends = ((t, c, d) for t in range(tp) for c in range(cp) for d in range(dp))
        return any(node_of[*e, stage] != node_of[*e, (stage + 1) % pp] for e in ends)

    hops = tuple(leaves(stage) for stage in range(pp)) if pp > 1 else ()
    return PlanSpans(span(0), span(1), span(1, 2), hops)


@pytest.mark.parametrize("node", [1, 3, 4, 8, 72])
def test_spans_are_those_of_megatrons_ranks(node: int) -> None:
    sizes = ((4, 1, 4, 4), (2, 2, 2, 8), (1, 1, 1, 16), (16, 1, 2, 2), (3, 2, 5, 4), (8, 2, 9, 1))
    for tp, cp, dp, pp in sizes:
        plan = Plan(tp_size=tp, cp_size=cp, dp_size=dp, pp_size=pp)
        assert plan_spans(plan, node) == counted(plan, node), plan


def test_a_hop_inside_a_node_does_not_cross_nodes() -> None:
    """Two stages of four GPUs a node: 0 and 1, 2 and 3 share one; every stage has a far side."""
    plan = Plan(tp_size=2, pp_size=4, dp_size=2, micro_batch_tokens=128)
    assert plan_spans(plan, 8).hops == (False, True, False, True)
    size = 128 * 100 * 4 / 1e9  # bytes in seconds of NVLink; ten times that over the network
    mix = [job(batch_size=2)]
    found = step_cost(SPEC, mix, plan, replace(HARDWARE, dtype="float32"))
    per_stage = [2 * 1, 1 + 10, 10 + 1, 2 * 1]
    assert found.pp_comm_s == pytest.approx(found.load.micro_batches * size * sum(per_stage) / 4)
    assert found.imbalance_s >= found.load.micro_batches * size * (11 - 6.5) * (1 - 1e-9)
    interleaved = replace(plan, pp_size=2, vpp_size=2, dp_size=2, tp_size=4)
    found = step_cost(SPEC, mix, interleaved, replace(HARDWARE, dtype="float32"))
    assert found.pp_comm_s == pytest.approx(found.load.micro_batches * size * 2 * (10 + 10))


@pytest.mark.parametrize(
    ("op", "span", "seconds"),
    [
        # One GPU a node has one card; eight have eight, less than their NVLink.
        ("all_gather", Span(8, 8, 1), 7 / 8 / 0.1),
        ("all_gather", Span(64, 8, 8), 63 / 64 / 0.8),
        ("reduce_scatter", Span(16, 8, 2), 15 / 16 / 0.2),
        # The node with fewest GPUs of the group is the narrow one.
        ("all_gather", Span(16, 2, 7), 15 / 16 / 0.7),
        # Ring: 2 x 63 / 64 of the tensor; tree: twice the tensor at 92 %.
        ("all_reduce", Span(64, 8, 8), 2 * 63 / 64 / 0.8),
        # Between two nodes a tree sends it once each way; within one twice, which may be slower.
        ("all_reduce", Span(4, 2, 2), 1 / 0.2 / 0.92),
        ("all_reduce", Span(16, 2, 8), 2 / 1.0 / 0.92),
        # A hop has its own GPU's card.
        ("p2p", Span(2, 2, 1), 1 / 0.1),
    ],
)
def test_a_collective_uses_the_cards_of_all_its_gpus(op: str, span: Span, seconds: float) -> None:
    assert over_nodes_s(op, span, 1e9, RAILS) == pytest.approx(seconds, rel=2e-4)  # type: ignore[arg-type]


def test_a_group_never_outruns_its_nvlink() -> None:
    wide = replace(RAILS, inter_node=Link(bytes_per_s=1e9, latency_s=0.0))
    assert over_nodes_s("all_gather", Span(16, 2, 8), 1e9, wide) == pytest.approx(15 / 16, rel=1e-3)
    shared = replace(RAILS, nics_per_node=4)
    assert over_nodes_s("p2p", Span(2, 2, 1), 1e9, shared) == pytest.approx(1 / 0.05)


def test_without_cards_a_group_has_one_gpus_share() -> None:
    for op, turns in (("all_reduce", 2), ("all_gather", 1)):
        found = over_nodes_s(op, Span(16, 2, 8), 1e9, HARDWARE)  # type: ignore[arg-type]
        assert found == pytest.approx(turns * 15 / 16 / 0.1)


def test_starts_of_rings_grow_with_their_gpus_and_those_of_trees_with_their_levels() -> None:
    near, far = Link(bytes_per_s=1e9, latency_s=2e-6), Link(bytes_per_s=1e9, latency_s=3e-5)
    hardware = replace(RAILS, intra_node=near, inter_node=far)
    ring = over_nodes_s("all_gather", Span(1024, 128, 8), 1e-9, hardware)
    assert ring == pytest.approx(14e-6 + 896 * 1.9e-6 + 127 * 4e-6)
    tree = over_nodes_s("all_reduce", Span(1024, 128, 8), 1e-9, hardware)
    assert tree == pytest.approx(2 * (7 * 3e-5 + 3 * 2e-6))


def test_part_of_a_node_has_its_own_cards_only() -> None:
    part = RAILS.of_nodes(2)
    assert (part.gpus_per_node, part.nics_per_node) == (2, 2)
    assert part.gpu_network_bytes_per_s == RAILS.gpu_network_bytes_per_s
    assert HARDWARE.of_nodes(4).nics_per_node is None
    trays = replace(RAILS, gpus_per_node=72, gpus_per_host=4, nics_per_node=72)
    assert trays.of_nodes(64).gpus_per_host == trays.of_nodes(64).host_gpus == 4
    assert trays.of_nodes(2).host_gpus == 2
