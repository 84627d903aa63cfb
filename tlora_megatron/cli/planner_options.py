"""Options of commands that ask the planner: `--plan auto`, the hardware, what is not searched."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tlora_megatron.cli.tables import global_rank, open_console
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.planner.candidate import SHARDINGS, Runner
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.search import NothingAllowed
from tlora_megatron.runtime.planning.plan_files import deployment_overrides, overrides_of
from tlora_megatron.runtime.planning.plan_inputs import (
    base_shape,
    best_deployment,
    best_plan,
    open_space,
    parse_lengths,
    run_hardware,
)

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
    """Refuses the planner's options without `--plan`, where they have no effect."""
    for name in ("hardware", "lengths", "replicas"):
        given = getattr(args, name)
        if args.plan is None and given is not None:
            raise must(f"--{name}", "come with --plan auto", given)


def planned_overrides(args: argparse.Namespace, config: RunConfig) -> list[str]:
    """The best plan for this run's processes, as overrides; `ValueError` if none fits."""
    starts_here = "RANK" not in os.environ
    num_gpus = (args.nproc or 1) if starts_here else int(os.environ["WORLD_SIZE"])
    hardware = run_hardware(args.hardware or DEFAULT_HARDWARE, config)
    lengths = None if args.lengths is None else parse_lengths(args.lengths)
    if args.replicas == "any":
        chosen = best_deployment(config, num_gpus, hardware, lengths)
        told = f"{chosen.label}; {chosen.gap:.1%} over the bound of all deployments"
        overrides = deployment_overrides(config, chosen)
    else:
        best = best_plan(config, num_gpus, hardware, lengths)
        gib = best.memory.total_bytes / 2**30
        told = (
            f"{best.plan.label}; {best.cost.tokens_per_s:,.0f} tokens/s and {gib:.1f} GiB predicted"
        )
        has_experts = base_shape(config.base_model).experts is not None
        overrides = overrides_of(config, best.plan, has_experts=has_experts)
    if global_rank() == 0:
        profile = f"profile {hardware.name}, {hardware.source} {hardware.date}"
        open_console(stderr=True).print(f"plan: {told} ({profile})")
    return overrides


_FLAGS = {
    "num_gpus": "--gpus",
    "tp_size": "--tp",
    "pp_size": "--pp",
    "vpp_size": "--vpp",
    "cp_size": "--cp",
    "ep_size": "--ep",
    "expert_tp_size": "--expert-tp",
    "sequence_parallel": "--sp",
    "lora_sharding": "--lora-sharding",
    "recompute": "--recompute",
    "micro_batch_tokens": "--tokens",
    "runs_in": "--runs-in",
}
"""What the planner calls an input -> the option that gives it."""


def add_space_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each choice of the planner that may be fixed."""
    for name, what in (
        ("tp_size", "tensor-parallel size"),
        ("pp_size", "number of pipeline stages"),
        ("vpp_size", "number of model chunks per stage (virtual pipeline)"),
        ("cp_size", "context-parallel size"),
        ("ep_size", "expert-parallel size (bases with routed experts)"),
        ("expert_tp_size", "tensor-parallel size of routed experts: 1, or TP"),
        ("micro_batch_tokens", "number of micro-batch tokens"),
    ):
        what = f"fix the {what}"
        parser.add_argument(_FLAGS[name], dest=name, type=int, metavar="N", help=what)
    parser.add_argument(
        "--sp", dest="sequence_parallel", choices=("on", "off"), help="fix sequence parallelism"
    )
    parser.add_argument(
        "--lora-sharding",
        choices=SHARDINGS,
        help="fix the LoRA sharding (default: parallel.lora_sharding)",
    )
    parser.add_argument("--recompute", choices=("none", "selective", "full"), help="fix recompute")
    parser.add_argument(
        "--runs-in",
        choices=("train", "megatron", "deepspeed", "any"),
        help="plans of this program, with its times; any: of all, a row each (default: the program "
        "of --write; megatron with --vpp above 1; train)",
    )


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what only you know of a cluster (--write slurm)")
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of sbatch, such as account=NAME, partition=NAME or time=12:00:00 (its "
        "default: 24:00:00); NAME= leaves out what would be written (repeatable)",
    )
    group.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a shell line before the start, such as 'module load cuda' or 'export "
        "NCCL_SOCKET_IFNAME=ib0' (repeatable)",
    )
    group.add_argument(
        "--environment",
        metavar="LINE",
        help="the shell line that activates the environment of the run (default: the venv or conda "
        "environment that tlora plan runs in)",
    )


def search_space(args: argparse.Namespace, config: RunConfig) -> SearchSpace:
    """Returns what the options and the configuration leave open."""
    known = {name: getattr(args, name, None) for name in _FLAGS}
    given = {name: value for name, value in known.items() if value is not None}
    if "sequence_parallel" in given:
        given["sequence_parallel"] = args.sequence_parallel == "on"
    return open_space(config, **given | {"runs_in": asked_runner(args)})


def asked_runner(args: argparse.Namespace) -> Runner | None:
    """Returns the program whose plans are asked for; None for those of any."""
    if args.runs_in is not None:
        return None if args.runs_in == "any" else args.runs_in
    if args.write is None:
        return "megatron" if (args.vpp_size or 1) > 1 else "train"
    kind = args.write[0]
    return "train" if kind == "slurm" else kind


@contextmanager
def naming_flags(args: argparse.Namespace) -> Iterator[None]:
    """Lets the planner's refusals name what the user typed."""
    try:
        yield
    except NothingAllowed as error:
        given = ", ".join(
            f"{flag} {value}"
            for name, flag in _FLAGS.items()
            if name in error.fixed and (value := getattr(args, name))
        )
        what = "what is fixed" if given else "the jobs and the configuration"
        raise must(what, f"allow some plan on --gpus {args.gpus}", given or error.fixed) from None
    except ValueError as error:
        name, space, rest = str(error).partition(" ")
        raise ConfigError(f"{_FLAGS.get(name, name)}{space}{rest}") from error
