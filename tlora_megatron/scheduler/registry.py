"""The scheduling policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tlora_megatron.config.reader import must, nearest
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.elastic import Elastic
from tlora_megatron.scheduler.policies.simple import Isolated, MemoryDriven
from tlora_megatron.scheduler.policies.tlora import ResidualGrouping
from tlora_megatron.scheduler.policies.tlora_best import NetBenefit
from tlora_megatron.scheduler.policy import Policy, Rules


def _right_sized(speeds: Speeds, rules: Rules) -> Policy:
    """Shortest job first, each alone on the GPUs that serve it best."""
    return NetBenefit(speeds=speeds, rules=replace(rules, use_residual=False))


POLICIES: dict[str, Callable[..., Policy]] = {
    "isolated": Isolated,
    "isolated_sjf": partial(Isolated, shortest_first=True),
    "sjf_rightsize": _right_sized,
    "mlora": MemoryDriven,
    "tlora": ResidualGrouping,
    "tlora_best": NetBenefit,
    "tlora_elastic": Elastic,
}

DEFAULT_POLICY = "tlora_elastic"
"""The policy of a live service."""

WEIGH_MOVES = frozenset({"tlora_elastic"})
"""Policies that make a move only where it brings more than its pauses cost."""


def make_policy(name: str, speeds: Speeds, rules: Rules) -> Policy:
    """Makes the policy of this name.

    Raises:
        ValueError: if no policy has this name.
    """
    if name not in POLICIES:
        raise must("policy", f"be one of {', '.join(POLICIES)}", name, nearest(name, POLICIES))
    return POLICIES[name](speeds=speeds, rules=rules)
