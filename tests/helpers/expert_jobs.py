"""The losslessness scenario's jobs with adapters on routed experts, or beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.helpers.scenario import JOBS

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_EXPERTS = ["gate_proj", "up_proj", "down_proj"]
LORA: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "mlp": {"target_modules": ALL_EXPERTS, "expert_sharing": "outer"},
    "everything": {"target_modules": [*ATTENTION, *ALL_EXPERTS], "expert_rank": 3},
    "outputs": {"target_modules": ["linear_fc1", "linear_fc2"], "expert_rank": 4},
}
"""Jobs without adapters on routed experts, with outer factors that all experts share, with an A for
each of gate and up and with one for both of an expert."""
SHARED: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "mlp": {"target_modules": ["shared_expert.up_proj", "shared_expert.down_proj"]},
    "everything": {"target_modules": [*ATTENTION, *(f"shared_expert.{x}" for x in ALL_EXPERTS)]},
    "outputs": {"target_modules": ["o_proj", "shared_expert.down_proj"]},
}
"""Beside a shared expert jobs adapt no routed one."""


def expert_jobs(loras: Mapping[str, dict[str, Any]] = LORA) -> list[dict[str, Any]]:
    """The scenario's jobs that `loras` names, with these changes of their `lora`."""
    chosen = (job for job in JOBS if job["name"] in loras)
    return [{**job, "lora": {**job["lora"], **loras[job["name"]]}} for job in chosen]
