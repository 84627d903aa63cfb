"""Prints what would make a plan fit, as lines or for `--json`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tlora_megatron.planner.advice import Advice


def print_advice(console: Console, advice: Advice, replicas: str = "") -> None:
    """Prints a line for each change that helps, or why none does.

    Args:
        replicas: the replicas that the advice is for; empty if there is no question.
    """
    for remedy in advice.remedies:
        console.print(f"would fit{replicas}: {remedy}")
    if advice.why_none:
        console.print(advice.why_none)


def advice_document(advice: Advice | None) -> dict[str, Any]:
    """The keys that `--json` adds.

    Args:
        advice: None = a plan fits, and nobody asked.
    """
    if advice is None:
        return {"would_fit": [], "why_nothing_fits": None}
    return {
        "would_fit": [str(remedy) for remedy in advice.remedies],
        "why_nothing_fits": advice.why_none or None,
    }
