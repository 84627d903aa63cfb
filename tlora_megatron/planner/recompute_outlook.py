"""Predicts what recompute by rows would save a plan."""

from __future__ import annotations

from collections.abc import Sequence

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.replica_curve import CurveModel
from tlora_megatron.planner.deploy.kinds import Kind, kind_by_rows, length_classes
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad


def saved_by_rows(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, hardware: HardwareProfile
) -> float | None:
    """Share of a plan's work that `run.recompute: auto` saves it, at the same budget of rows.

    Sums of gradients and steps are not in it. None where nothing is computed again, or one
    recompute is all that fits, and where micro-batches share one: in pipelines, and on ranks that
    share experts.
    """
    if plan.pp_size > 1 or plan.ep_size > 1 or plan.recompute == "none":
        return None
    curves = CurveModel(spec, jobs, Rates(hardware))
    memory = MemoryModel(spec, jobs, hardware)
    by_rows = kind_by_rows(memory, curves, plan, hardware.memory_bytes)
    if by_rows is None:
        return None
    classes = length_classes(jobs)
    fixed_s, found_s = (
        sum(kind.seconds(classes)) for kind in (Kind(plan, curves.curve(plan)), by_rows)
    )
    return 1 - found_s / fixed_s
