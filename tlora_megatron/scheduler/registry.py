"""The scheduling policies by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.isolated import Isolated
from tlora_megatron.scheduler.policies.mlora import MemoryDriven
from tlora_megatron.scheduler.policies.tlora import ResidualGrouping
from tlora_megatron.scheduler.policies.tlora_best import NetBenefit
from tlora_megatron.scheduler.policy import Policy, Rules

POLICIES: dict[str, Callable[..., Policy]] = {
    "isolated": Isolated,
    "isolated_sjf": partial(Isolated, shortest_first=True),
    "mlora": MemoryDriven,
    "tlora": ResidualGrouping,
    "tlora_best": NetBenefit,
}


def make_policy(name: str, speeds: Speeds, rules: Rules) -> Policy:
    """Makes the policy of this name.

    Raises:
        ValueError: if no policy has this name.
    """
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name](speeds=speeds, rules=rules)
