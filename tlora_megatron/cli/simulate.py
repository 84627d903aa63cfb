"""`tlora simulate`: replays a cluster trace under several scheduling policies."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from tlora_megatron.cli.tables import check_output, make_table, open_console
from tlora_megatron.config.reader import must, read_spec
from tlora_megatron.config.schema import shared_fields
from tlora_megatron.scheduler.registry import POLICIES
from tlora_megatron.sim.cluster import FaultRates, load_cluster
from tlora_megatron.sim.report import (
    as_document,
    bound_rows,
    cells_of,
    columns_of,
    job_rows,
    summary_rows,
    write_csv,
    write_report,
)
from tlora_megatron.sim.study import Options, PolicyRun, Study, check_policies
from tlora_megatron.sim.trace import TraceShape, read_trace
from tlora_megatron.sim.workload import load_mix, shipped_mixes

_EPILOG = """\
examples:
  tlora simulate --trace philly.csv.gz --policy isolated,tlora,tlora_best \\
      --cluster configs/hardware/cluster-128xA100.yaml --sample 0.05 --html report.html
  tlora simulate --trace trace_kalos.csv --policy isolated,tlora --gpu-divisor 8 --load 2 \\
      --cluster configs/hardware/cluster-128xH100.yaml --json

The other policies are compared with the first one.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="replay a cluster trace under scheduling policies",
        description="Replays a cluster trace under several scheduling policies.",
        epilog=_EPILOG,
    )
    policies = ",".join(POLICIES)
    parser.add_argument(
        "--trace", required=True, metavar="FILE", help="trace: CSV (.gz) or Philly's JSON"
    )
    parser.add_argument(
        "--policy",
        default=policies,
        metavar="A,B",
        help=f"policies to compare (default: {policies})",
    )
    parser.add_argument(
        "--cluster", required=True, metavar="FILE", help="YAML description of the cluster"
    )
    mixes = ", ".join(shipped_mixes())
    parser.add_argument(
        "--mix",
        default="paper",
        help=f"mix of LoRA attributes: {mixes}, or a file (default: paper)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random draws (default: 0)")
    _add_trace_arguments(parser)
    for option, unit, what in (
        ("--gpu-hour-price", "PRICE", "of a GPU that a group holds: fills the column cost"),
        ("--gpu-watts", "W", "that such a GPU draws: fills the column kWh"),
    ):
        parser.add_argument(option, type=float, metavar=unit, help=what)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--csv", metavar="FILE", help="write a CSV file with a row per policy")
    parser.add_argument(
        "--jobs-csv", metavar="FILE", help="write a CSV file with a row per policy and job"
    )
    parser.add_argument("--html", metavar="FILE", help="write an HTML report with pictures")
    parser.set_defaults(command=run)


_SHAPE = {
    "load": "offered load: arrivals are stretched or squeezed until the jobs, each alone, ask for "
    "so many times the GPUs' time between first and last submission (default: as recorded)",
    "sample": "share of the jobs to keep (default: {:g})",
    "gpu_divisor": "divisor of each job's GPUs (default: {:g})",
}
_FAULTS = {
    "job_failures": "share of jobs that fail (default: {:g})",
    "cancellations": "share of jobs that are cancelled (default: {:g})",
    "node_mtbf_hours": "mean hours between failures of a node; 0: no failures (default)",
    "speed_error": "share by which speeds may differ from the planner's (default: {:g})",
    "node_repair_hours": "hours until a failed node is back (default: {:g})",
}


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("changes to the trace")
    _add_floats(group, TraceShape(), _SHAPE)
    add = group.add_argument
    add(
        "--only-completed", action="store_true", help="leave out jobs that failed or were cancelled"
    )
    add(
        "--oversize",
        choices=("skip", "clamp"),
        default=TraceShape().oversize,
        help="jobs larger than the cluster: leave out, or give all GPUs (default: skip)",
    )
    only = "keep only the first N jobs"
    add("--jobs", dest="most_jobs", type=int, metavar="N", help=only)
    add("--max-slowdown", type=float, help="bound on every job's slowdown (default: the mix's)")
    group = parser.add_argument_group("failures and cancellations")
    _add_floats(group, FaultRates(), _FAULTS)


def _add_floats(group: Any, defaults: TraceShape | FaultRates, words: Mapping[str, str]) -> None:
    """Adds an option for each number of a section."""
    for name, what in words.items():
        default = getattr(defaults, name)
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=float, default=default, help=what.format(default))


def run(args: argparse.Namespace) -> int:
    """Simulates, prints the table, and writes the files asked for."""
    policies = [name for name in args.policy.split(",") if name]
    check_policies(policies)
    if args.seed < 0:
        raise must("--seed", "be at least 0", args.seed)
    # Before the run, which may take long.
    for option in ("csv", "jobs_csv", "html"):
        if (path := getattr(args, option)) is not None:
            name = f"--{option.replace('_', '-')}"
            check_output(name, path, (args.trace, args.cluster, args.mix))
    cluster, profile = load_cluster(args.cluster)
    mix, specs = load_mix(args.mix)
    study = Study(
        trace=read_trace(args.trace),
        cluster=cluster,
        profile=profile,
        mix=mix,
        specs=specs,
        options=_options(args),
    )
    runs = _run_all(study, policies)
    if args.json:
        print(json.dumps(as_document(study, runs), indent=2))
    else:
        _print_table(open_console(), study, runs)
    if args.csv:
        write_csv(args.csv, summary_rows(study, runs))
    if args.jobs_csv:
        write_csv(args.jobs_csv, job_rows(runs))
    if args.html:
        write_report(args.html, study, runs)
    return 0


def _options(args: argparse.Namespace) -> Options:
    if args.max_slowdown is not None and not args.max_slowdown >= 1:
        raise must("--max-slowdown", "be at least 1", args.max_slowdown)
    for name in ("gpu_hour_price", "gpu_watts"):
        if (value := getattr(args, name)) is not None and not 0 <= value < math.inf:
            raise must(f"--{name.replace('_', '-')}", "be a number from 0 on", value)
    return Options(
        shape=TraceShape(**shared_fields(args, TraceShape)),
        seed=args.seed,
        max_slowdown=args.max_slowdown,
        gpu_hour_price=args.gpu_hour_price,
        gpu_watts=args.gpu_watts,
        faults=read_spec(FaultRates, shared_fields(args, FaultRates), "faults"),
    )


def _run_all(study: Study, policies: list[str]) -> list[PolicyRun]:
    """Runs every policy in turn, with progress bars on a terminal."""
    console = open_console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for policy in policies:
            task = progress.add_task(policy, total=1.0)

            def advance(done: float, task: TaskID = task) -> None:
                progress.update(task, completed=done)

            runs.append(study.run(policy, advance))
            progress.update(task, completed=1.0)
    return runs


def _print_table(console: Console, study: Study, runs: list[PolicyRun]) -> None:
    options = study.options
    console.print(
        f"{study.trace.name} on {study.cluster.name}: {len(study.jobs):,} jobs, "
        f"offered load {study.offered_load:.2f}, "
        f"mix {study.mix.name}, seed {options.seed}"
    )
    for reason, count in study.trace.dropped.items():
        console.print(f"left out: {count:,} jobs, {reason}", style="dim")
    columns = (*columns_of(study), "run in")
    table = make_table("policy", *columns, right=columns)
    for entry in runs:
        table.add_row(entry.policy, *cells_of(study, entry, runs[0]), f"{entry.wall_s:.1f} s")
    for row in bound_rows(study, runs[0]):
        table.add_row(*row)
    console.print(table, soft_wrap=False)
