"""`tlora profile`: measures this machine for the planner."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tlora_megatron.cli.tables import global_rank, open_console
from tlora_megatron.config.reader import must
from tlora_megatron.integrations.megatron import imports
from tlora_megatron.planner.hardware import HardwareProfile, load_profile

_EPILOG = """\
examples:
  tlora profile --out h200.json
  torchrun --standalone --nproc-per-node 4 -m tlora_megatron.cli profile --out h200.json \\
      --gpus-per-node 8
Started by torchrun with several processes, it also measures the links between them. What joins
nodes is written into the file by hand: inter_node, the link of one network card, and nics_per_node.
`tlora plan --hardware FILE` reads the result.
"""
_TABLES = ("gemms", "fp8_gemms", "attention", "collectives")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="measure this machine for the planner",
        description="Measures this machine for the planner.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="JSON file to write"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=180.0,
        metavar="S",
        help="approximate seconds to measure; points without time are left out (default: 180)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="number of GPUs that the measured link connects (default: those of this machine)",
    )
    parser.add_argument(
        "--sizes",
        choices=("auto", "full", "tiny"),
        default="auto",
        help="full: shapes of 8B and 70B models; tiny: takes seconds on a CPU; auto: full on a GPU "
        "(default: auto)",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures, writes the file, and reads it back as a check."""
    if args.out.suffix != ".json":
        raise must("--out", "end with .json", str(args.out))
    if args.gpus_per_node is not None and args.gpus_per_node < 1:
        raise must("--gpus-per-node", "be at least 1", args.gpus_per_node)
    is_main = global_rank() == 0
    profile = _measure(args, is_main=is_main)
    if is_main:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(profile_json(profile), encoding="utf-8")
        load_profile(args.out)
        _print_summary(open_console(), profile, args.out)
    return 0


def _measure(args: argparse.Namespace, *, is_main: bool) -> HardwareProfile:
    imports.quieten()
    import torch

    from tlora_megatron.profiling.profile import ProfileRequest, measure_profile
    from tlora_megatron.profiling.sizes import FULL, TINY
    from tlora_megatron.runtime.ranks import leave_process_group

    full = args.sizes == "full" or (args.sizes == "auto" and torch.cuda.is_available())
    columns = TextColumn("{task.description:12}"), BarColumn(), TaskProgressColumn()
    console = open_console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not is_main) as progress:
        task = progress.add_task("starting", total=1.0)
        profile = measure_profile(
            ProfileRequest(
                name=args.out.stem,
                sizes=FULL if full else TINY,
                budget_s=args.budget_s,
                gpus_per_node=args.gpus_per_node,
                on_stage=lambda stage, done: progress.update(
                    task, description=stage, completed=done
                ),
            )
        )
    leave_process_group()
    return profile


def profile_json(profile: HardwareProfile) -> str:
    """The text of a profile's file: one line per point of a table, four digits per number."""
    lines = []
    for key, value in asdict(profile).items():
        if key in _TABLES:
            rows = ",\n".join(f"  {json.dumps(_rounded(row))}" for row in value)
            text = f"[\n{rows}\n ]" if rows else "[]"
        else:
            text = json.dumps(_rounded(value))
        lines.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _print_summary(console: Console, profile: HardwareProfile, path: Path) -> None:
    best = max(point.forward_flops_per_s for point in profile.gemms)
    console.print(f"{profile.gpu}, {profile.versions}")
    console.print(
        f"GEMMs up to {best / 1e12:.4g} TFLOP/s ({len(profile.gemms)} points), "
        f"copy {profile.copy_bytes_per_s / 1e12:.3g} TB/s, "
        f"elementwise {profile.stream_bytes_per_s / 1e12:.3g} TB/s"
    )
    host = profile.host
    console.print(
        f"host: {host.layer_s * 1e3:.3g} ms a layer, {host.round_s * 1e3:.3g} ms a round, "
        f"{host.job_step_s * 1e3:.3g} ms a job's step"
    )
    link = profile.intra_node
    console.print(
        f"link: {link.bytes_per_s / 1e9:.4g} GB/s, {link.latency_s * 1e6:.3g} us "
        f"({len(profile.collectives)} collectives), overlap {profile.overlap:.2f}, stretch "
        f"{profile.stretch:.2f}"
    )
    if profile.notes:
        console.print(f"notes: {profile.notes}")
    console.print(f"written: {path}")
