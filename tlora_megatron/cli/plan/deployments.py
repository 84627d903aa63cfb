"""Prints the deployments that `tlora plan --replicas any` finds, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tlora_megatron.planner.deploy.deploy import MARGIN, DeploymentResult, RankedDeployment
from tlora_megatron.planner.hardware import HardwareProfile


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
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("replicas", overflow="fold")
    for name in ("tokens/s", "GPU-s", "undivided", "over bound", "busy", "depth"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, entry in enumerate(result.ranked[:top], start=1):
        table.add_row(str(place), *_cells(result, entry, num_gpus))
    console.print(table)
    console.print(
        f"bound of all deployments: {result.bound_s * num_gpus:,.2f} GPU-s; {result.num_kinds} "
        f"kinds of replicas fit, {result.num_undominated} are worth mixing"
    )
    first = result.ranked[0]
    kind = "alike" if first.is_alike else "unlike"
    console.print(f"to take: {first.label} ({kind}: unlike ones must win by {MARGIN:.0%})")


def _cells(result: DeploymentResult, entry: RankedDeployment, num_gpus: int) -> list[str]:
    sampled = entry.sampled
    return [
        entry.label,
        f"{result.tokens / entry.time_s:,.0f}",
        f"{entry.time_s * num_gpus:,.2f}",
        f"{entry.fluid_s * num_gpus:,.2f}",
        f"{entry.gap:.1%}",
        "-" if sampled is None else f"{sampled.busy_share:.1%}",
        "-" if sampled is None else str(sampled.depth),
    ]


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
