"""All policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tlora_megatron.config.reader import must, nearest
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.admission import Grouping, MemoryDriven
from tlora_megatron.scheduler.policies.elastic import Elastic
from tlora_megatron.scheduler.policies.tlora import NetBenefit, ResidualGrouping
from tlora_megatron.scheduler.policy import Policy, Rules


def _ruled(policy: type[Grouping], **fixed: Any) -> Callable[..., Policy]:
    """Makes a policy by some rules of its own, whatever those of the others are."""
    return lambda speeds, rules: policy(speeds=speeds, rules=replace(rules, **fixed))


POLICIES: dict[str, Callable[..., Policy]] = {
    "isolated": Grouping,
    "isolated_sjf": partial(Grouping, shortest_first=True),
    "sjf_rightsize": _ruled(NetBenefit, use_residual=False),
    "mlora": _ruled(MemoryDriven, keep_bounds=False, use_residual=True),
    "tlora": ResidualGrouping,
    "tlora_best": NetBenefit,
    "tlora_elastic": Elastic,
}

DEFAULT_POLICY = "tlora_elastic"
"""The policy of a live service."""

WEIGH_MOVES = frozenset({"tlora_elastic"})
"""Policies that make a move only where it brings more than its pauses cost."""


def make_policy(name: str, speeds: Speeds, rules: Rules) -> Policy:
    """Makes the policy of this name; raises `ValueError` if no policy has this name."""
    if name not in POLICIES:
        raise must("policy", f"be one of {', '.join(POLICIES)}", name, nearest(name, POLICIES))
    return POLICIES[name](speeds=speeds, rules=rules)
