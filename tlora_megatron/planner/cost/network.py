"""Predicts collectives over several nodes as NCCL runs them: in rings, and all-reduces in trees.

NCCL's own model of them is `ncclTopoTuneModel` (src/graph/tuning.cc of NCCL 2.28 to 2.30); the
terms here are its terms. A ring passes through all of a group's GPUs of a node before it leaves the
node, and there are as many rings as cards near those GPUs, each leaving and arriving by its own
card ("rails"). So a node of m GPUs of the group sends over m cards at once. What a node's GPUs pass
to each other is the same number of bytes over NVLink, at the same time: the slower of the two
counts. A tree is a chain within a node and a double binary tree between nodes; every node sends the
tensor up and down once, and between two nodes in one direction only.

Left out: NVLS and SHARP, which sum in switches and are faster; PAT; networks that share their
switches' uplinks.
"""

from __future__ import annotations

import math

from tlora_megatron.planner.cost.spans import Span
from tlora_megatron.planner.hardware import CollectiveOp, HardwareProfile

_TREE_SHARE = 0.92
"""Share of the bandwidth that a tree attains (`ncclTopoTuneModel`)."""
_RING_S, _STEP_S, _NETWORK_STEP_S = 14e-6, 1.9e-6, 4.0e-6
"""Start of a ring, a step of it over NVLink and one over the network: `ncclTunerConstantsDefaults`,
protocol LL128."""


def over_nodes_s(
    op: CollectiveOp, span: Span, size_bytes: float, hardware: HardwareProfile
) -> float:
    """Time of a collective over nodes.

    Args:
        size_bytes: size of the tensor gathered, or before it is scattered.

    Raises:
        ValueError: if the profile has no link between nodes.
    """
    link = hardware.inter_node
    if link is None:
        raise ValueError(f"inter_node must be given for {span.ranks} GPUs of several nodes")
    if op == "p2p":
        return link.latency_s + size_bytes / hardware.gpu_network_bytes_per_s
    knows_cards = hardware.nics_per_node is not None
    rails = hardware.gpu_network_bytes_per_s * (span.local if knows_cards else 1)
    near = hardware.intra_node.bytes_per_s if span.local > 1 else math.inf
    turns = 2 if op == "all_reduce" else 1
    start_s = turns * _tree_start_s(span, hardware)
    ring_start_s = max(start_s, turns * _ring_start_s(span)) if knows_cards else start_s
    share = turns * (span.ranks - 1) / span.ranks
    ring_s = ring_start_s + share * size_bytes / min(rails, near)
    if op != "all_reduce" or not knows_cards:
        return ring_s
    between = (1 if span.nodes == 2 else 2) * size_bytes / rails
    tree_s = start_s + max(between, 2 * size_bytes / near) / _TREE_SHARE
    return min(ring_s, tree_s)


def all_to_all_over_nodes_s(span: Span, size_bytes: float, hardware: HardwareProfile) -> float:
    """Time of an all-to-all with equal parts over nodes.

    All GPUs of a node send at once, so each has its share of the cards. What stays in the node goes
    over NVLink at the same time.

    Args:
        size_bytes: what a rank sends, its own part included.

    Raises:
        ValueError: if the profile has no link between nodes.
    """
    link = hardware.inter_node
    if link is None:
        raise ValueError(f"inter_node must be given for {span.ranks} GPUs of several nodes")
    far, near = span.ranks - span.local, span.local - 1
    over_network_s = far * size_bytes / span.ranks / hardware.gpu_network_bytes_per_s
    in_node_s = near * size_bytes / span.ranks / hardware.intra_node.bytes_per_s
    return link.latency_s + max(over_network_s, in_node_s)


def _tree_start_s(span: Span, hardware: HardwareProfile) -> float:
    """Latencies of one way through the levels of a tree."""
    assert hardware.inter_node is not None, "several nodes must have a link"
    outer = math.ceil(math.log2(span.nodes))
    inner = math.ceil(math.log2(span.ranks)) - outer
    return outer * hardware.inter_node.latency_s + inner * hardware.intra_node.latency_s


def _ring_start_s(span: Span) -> float:
    """Latencies of one way around a ring; they grow with the number of its GPUs."""
    return _RING_S + (span.ranks - span.nodes) * _STEP_S + (span.nodes - 1) * _NETWORK_STEP_S
