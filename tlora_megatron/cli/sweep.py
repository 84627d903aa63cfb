"""`tlora sweep`: trains the trials of a sweep together, and stops the worst of them early."""

from __future__ import annotations

import argparse
import json
import uuid
from dataclasses import asdict
from typing import Any

from tlora_megatron.cli.planner_options import DEFAULT_HARDWARE, add_hardware_arguments
from tlora_megatron.cli.service.reaching import reach_service
from tlora_megatron.cli.tables import open_console, sweep_line
from tlora_megatron.cli.train import add_config_arguments, add_nproc_argument, train_config
from tlora_megatron.config.load import load_sweep
from tlora_megatron.config.reader import must
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.runtime.planning.plan_inputs import parse_lengths, run_hardware
from tlora_megatron.runtime.planning.sweep_times import sweep_times

_EPILOG = """\
examples:
  tlora sweep configs/quickstart_sweep.yaml --nproc 2
  tlora sweep sweep.yaml --dry-run --hardware h200
  tlora sweep sweep.yaml --set sweep.trials=48 --output-dir runs/more
  tlora sweep sweep.yaml --service http://host:8017    # its trials as jobs of a service

results: OUT/sweep.csv, OUT/sweep.json, OUT/report.html, OUT/jobs/TRIAL/adapter
exit code: as of `tlora train`; the same command continues a sweep that was stopped
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        help="train many trials of one job together, and stop the worst of them early",
        description="Trains many trials of one job together, and stops the worst of them early.",
        epilog=_EPILOG,
    )
    parser.add_argument("config", metavar="SWEEP", help="file of the sweep, YAML or JSON")
    add_config_arguments(parser)
    add_nproc_argument(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing; print how long it will take, with and without stopping, on --nproc "
        "GPUs of --hardware",
    )
    add_hardware_arguments(parser)
    parser.add_argument(
        "--service",
        metavar="PLACE",
        help="hand the trials to a service, by its folder or its address, http://HOST:PORT",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Trains the trials, in this process or in `--nproc` of them, and prints what was found."""
    if args.service is not None:
        return _submit(args)
    for name in ("hardware", "lengths"):
        if not args.dry_run and getattr(args, name) is not None:
            raise must(f"--{name}", "come with --dry-run", getattr(args, name))
    config = load_sweep(
        args.config, args.overrides, args.output_dir, files_may_be_missing=args.dry_run
    )
    if args.dry_run:
        return _tell_times(args, config)
    return train_config(args, config)


def _submit(args: argparse.Namespace) -> int:
    """Hands the trials to a service."""
    for name in ("dry_run", "nproc", "hardware", "lengths", "output_dir"):
        if getattr(args, name):
            given = f"--{name.replace('_', '-')}"
            raise must(given, "be left out with --service", getattr(args, name))
    with reach_service(args) as service:
        found = service.submit_sweep(args.config, args.overrides, uuid.uuid4().hex)
        if args.json:
            print(json.dumps(found, indent=2))
        else:
            open_console().print(f"{found['id']}  {sweep_line(found)}")
            told = f"see it with: tlora jobs --group {found['name']}"
            console = open_console()
            console.print(told if service.is_served else f"{told}; {service.how_to_serve} runs it")
    return 0


def _tell_times(args: argparse.Namespace, config: RunConfig) -> int:
    """Prints what the planner predicts."""
    hardware = run_hardware(args.hardware or DEFAULT_HARDWARE, config)
    num_gpus = args.nproc or 1
    lengths = None if args.lengths is None else parse_lengths(args.lengths)
    times = sweep_times(config, hardware, num_gpus, lengths)
    if args.json:
        print(json.dumps({**asdict(times), "time_s": times.time_s}, indent=2))
        return 0
    console = open_console()
    where = f"{num_gpus} x {hardware.gpu}: {times.layout} (profile {hardware.name})"
    console.print(f"{len(config.jobs)} trials on {where}; without start and evaluations")
    for part in times.stretches:
        trials = f"{part.num_trials} trial{'s' if part.num_trials > 1 else ''}"
        console.print(f"{_duration(part.time_s):>10}  {trials} to step {part.to_step:,}")
    if config.sweep is not None and config.sweep.spec.stop is not None:
        console.print(f"{_duration(times.time_s):>10}  together, with stopping", style="bold")
    console.print(f"{_duration(times.whole_s):>10}  all trials together to their ends")
    console.print(f"{_duration(times.alone_s):>10}  all trials to their ends, one after another")
    return 0


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
