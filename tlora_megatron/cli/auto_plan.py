"""Implements `tlora train --plan auto`, and the planner's options of several commands."""

from __future__ import annotations

import argparse
import os

from tlora_megatron.cli.tables import global_rank, open_console
from tlora_megatron.config.reader import must
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.runtime.planning.plan_files import overrides_of
from tlora_megatron.runtime.planning.plan_inputs import parse_lengths, plan_model, run_hardware

DEFAULT_HARDWARE = "h200"


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that the planner needs beside the configuration."""
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="hardware profile for the planner: a file, or a name in configs/hardware "
        f"(default: {DEFAULT_HARDWARE})",
    )
    parser.add_argument(
        "--lengths",
        metavar="HIST",
        help="sequence lengths for the planner instead of reading the jobs' data: 512 tokens, or "
        "256:3,1024:1 for shares",
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--plan` and its options."""
    parser.add_argument(
        "--plan",
        choices=("auto",),
        help="auto: let the planner choose layout, micro-batch tokens and recompute",
    )
    parser.add_argument(
        "--replicas",
        choices=("alike", "any"),
        help="with --plan auto, any: replicas may differ in layout, budget and recompute",
    )
    add_hardware_arguments(parser)


def check_plan_arguments(args: argparse.Namespace) -> None:
    """Refuses options without effect.

    Raises:
        ConfigError: for the planner's options without `--plan`.
    """
    for name in ("hardware", "lengths", "replicas"):
        given = getattr(args, name)
        if args.plan is None and given is not None:
            raise must(f"--{name}", "come with --plan auto", given)


def planned_overrides(args: argparse.Namespace, config: RunConfig) -> list[str]:
    """The best plan for this run's processes as overrides, equal on every process.

    Raises:
        ValueError: if no plan fits; the message names changes that would make one fit.
    """
    from tlora_megatron.runtime.planning.deployments import best_deployment, deployment_overrides
    from tlora_megatron.runtime.planning.plan_inputs import best_plan

    starts_here = "RANK" not in os.environ
    num_gpus = (args.nproc or 1) if starts_here else int(os.environ["WORLD_SIZE"])
    hardware = run_hardware(args.hardware or DEFAULT_HARDWARE, config)
    lengths = None if args.lengths is None else parse_lengths(args.lengths)
    if args.replicas == "any":
        chosen = best_deployment(config, num_gpus, hardware, lengths)
        if global_rank() == 0:
            open_console(stderr=True).print(
                f"plan: {chosen.label}; {chosen.gap:.1%} over the bound of all deployments "
                f"(profile {hardware.name}, {hardware.source} {hardware.date})"
            )
        return deployment_overrides(config, chosen)
    best = best_plan(config, num_gpus, hardware, lengths)
    if global_rank() == 0:
        open_console(stderr=True).print(
            f"plan: {best.plan.label}; {best.cost.tokens_per_s:,.0f} tokens/s and "
            f"{best.memory.total_bytes / 2**30:.1f} GiB predicted (profile {hardware.name}, "
            f"{hardware.source} {hardware.date})"
        )
    has_experts = plan_model(config).experts is not None
    return overrides_of(config, best.plan, has_experts=has_experts)
