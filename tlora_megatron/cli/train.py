"""Shows a running training: a bar per job on a terminal, otherwise a line now and then."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tlora_megatron.cli.live import add_live_arguments, change_live_run
from tlora_megatron.cli.planner_options import (
    add_plan_arguments,
    check_plan_arguments,
    planned_overrides,
)
from tlora_megatron.cli.tables import global_rank, open_console, print_run, print_sweep
from tlora_megatron.config.load import ignored_settings, load_config
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.integrations.megatron import imports
from tlora_megatron.model.layout import lay_out_world
from tlora_megatron.model.weight_files import read_ahead
from tlora_megatron.ops.kernel_build import build_early
from tlora_megatron.runtime.ranks import cli_command, run_ranks, threads_per_rank
from tlora_megatron.training.run.output_dir import CONFIG_NAME, with_live_changes
from tlora_megatron.training.signals import StopSignals, exit_code

_MOST_JOBS_IN_A_LINE = 8


@dataclass(slots=True)
class _JobState:
    step: int
    max_steps: int | None
    first_step: int
    begin_s: float
    loss: float | None = None
    bar: TaskID | None = None

    @property
    def is_done(self) -> bool:
        return self.max_steps is not None and self.step >= self.max_steps

    def left_s(self, now_s: float) -> float:
        """Seconds that it still takes at its mean pace; inf = unknown."""
        done = self.step - self.first_step
        left = (self.max_steps or self.step) - self.step
        return left * (now_s - self.begin_s) / done if done else math.inf


class _Bars(Progress):
    """One bar per job, and a line below with the speed of the whole run."""

    footer = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.footer, style="dim")


_LINE_EVERY_S = 5.0


class RichProgress:
    """Shows events as live bars if `console` is a terminal, otherwise as a line now and then.

    Args:
        resumes: an earlier run was here, though its jobs may have no checkpoints.
    """

    def __init__(
        self,
        console: Console,
        *,
        resumes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._resumes = resumes
        self._clock = clock
        self._start_s = self._last_line_s = clock()
        self._tokens_per_s: float | None = None
        self._jobs: dict[str, _JobState] = {}
        self._prepared: dict[str, int | None] = {}
        """Last steps of jobs that are about to join."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", markup=False),
            TextColumn("{task.fields[lr]}", markup=False),
        )
        self._bars = _Bars(*columns, console=console) if console.is_terminal else None
        self._is_open = False

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Shows an event of the run; kinds that say nothing to a person are passed over."""
        if kind == "begun":
            self._begin(body["jobs"])
        elif kind == "progress":
            self._show_rate(body["tokens_per_s"])
        elif job is None:
            return
        elif kind == "prepared":
            self._prepared[job] = body["num_steps"]
        elif kind == "joined":
            self._add(job, body["from_step"], self._prepared.pop(job, None))
            self._print(f"{job}: joins at step {body['from_step']}")
        elif kind == "stepped":
            self._show_step(job, body["step"], body["loss"], body["lr"])
        elif kind == "left" and job in self._jobs:
            self._jobs[job].max_steps = self._jobs[job].step
            cancelled = f"is saved at step {body['step']} and leaves: cancelled"
            self._print(f"{job}: {body.get('reason', cancelled)}")
        elif kind == "note":
            self._print(f"{job}: {body['message']}")

    def close(self) -> None:
        """Ends the display; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._bars is not None:
            self._bars.stop()
        else:
            self._print(self._line(list(self._jobs)))

    def _begin(self, jobs: Mapping[str, tuple[int, int | None]]) -> None:
        self._is_open = True
        self._start_s = self._last_line_s = self._clock()
        for name, (step, max_steps) in jobs.items():
            self._add(name, step, max_steps)
        resumes = self._resumes or any(job.step for job in self._jobs.values())
        if resumes:
            self._print(f"going on: {', '.join(map(_describe_start, self._jobs.items()))}")
        if self._bars is not None:
            self._bars.start()
        elif not resumes:
            self._print(f"training {len(jobs)} jobs: {', '.join(jobs)}")

    def _add(self, name: str, step: int, max_steps: int | None) -> None:
        if name in self._jobs and self._bars is not None:  # it was cancelled, and comes back
            bar = self._jobs[name].bar
            if bar is not None:
                self._bars.remove_task(bar)
        self._jobs[name] = _JobState(step, max_steps, step, self._clock())
        if self._bars is not None:
            self._jobs[name].bar = self._bars.add_task(
                name, total=max_steps, completed=step, loss="", lr=""
            )

    def _show_step(self, name: str, step: int, loss: float, lr: float) -> None:
        job = self._jobs[name]
        job.step, job.loss = step, loss
        if self._bars is not None and job.bar is not None:
            self._bars.update(job.bar, completed=step, loss=f"loss {loss:.4f}", lr=f"lr {lr:.2e}")
        else:
            self._print_line_if_due()

    def _show_rate(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        if self._bars is not None:
            self._bars.footer = "  ".join([f"{tokens_per_s:,.0f} tokens/s", *self._left()])
        else:
            self._print_line_if_due()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_line_if_due(self) -> None:
        now_s = self._clock()
        if now_s - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = now_s
            names = [name for name, job in self._jobs.items() if not job.is_done]
            self._print(self._line(names, *self._left()))

    def _left(self) -> list[str]:
        """When all jobs that have an end are there, as a list of one; empty = unknown."""
        now_s = self._clock()
        going = [job for job in self._jobs.values() if not job.is_done and job.max_steps]
        left_s = max((job.left_s(now_s) for job in going), default=math.inf)
        if left_s == math.inf:
            return []
        units = {"h": 3600, "min": 60, "s": 1}
        unit = next(unit for unit, seconds in units.items() if left_s >= 2 * seconds or unit == "s")
        return [f"~{left_s / units[unit]:.0f} {unit} left"]

    def _line(self, names: list[str], *left: str) -> str:
        minutes, seconds = divmod(int(self._clock() - self._start_s), 60)
        parts = [f"[{minutes:02d}:{seconds:02d}]"]
        if self._tokens_per_s is not None:
            parts.append(f"{self._tokens_per_s:,.0f} tokens/s")
        parts += left
        parts += [_describe(name, self._jobs[name]) for name in names[:_MOST_JOBS_IN_A_LINE]]
        if len(names) > _MOST_JOBS_IN_A_LINE:
            parts.append(f"and {len(names) - _MOST_JOBS_IN_A_LINE} more")
        return "  ".join(parts)


def _describe_start(item: tuple[str, _JobState]) -> str:
    name, job = item
    if job.is_done:
        return f"{name} has ended"
    return f"{name} {'continues' if job.step else 'begins'} at step {job.step}"


def _describe(name: str, job: _JobState) -> str:
    total = "" if job.max_steps is None else f"/{job.max_steps}"
    loss = "" if job.loss is None else f" loss {job.loss:.4f}"
    return f"{name} {job.step}{total}{loss}"


_EPILOG = """\
examples:
  tlora train configs/quickstart.yaml --nproc 2
  tlora train run.yaml --nproc 8 --plan auto --hardware h200
  tlora train run.yaml --set jobs.gsm8k.lora.rank=8 --set run.seed=1 --output-dir runs/rank8
  tlora train run.yaml --set run.deterministic=true     # the same bits whoever trains beside a job
  tlora train run.yaml --add job.yaml --cancel gsm8k    # of the run that trains: others train on
  torchrun --nnodes 2 --nproc-per-node 8 ... -m tlora_megatron.cli train run.yaml

exit code: 0 all jobs finished, 1 a job or the run failed, 2 a mistake in the input,
128 + n stopped by signal n (SIGTERM, SIGINT, SIGUSR1): all jobs are saved, run it again to continue
"""

_DECISIONS = (
    "tlora_megatron.integrations.megatron.nano_batches",
    "tlora_megatron.ops.kernel_build",
    "tlora_megatron.runtime.backbone",
    "tlora_megatron.runtime.choices",
    "tlora_megatron.training.round_timing",
    "tlora_megatron.training.run.determinism",
)
"""Loggers of what a run decides or makes itself; shown together with warnings."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that change a configuration: `--set` and `--output-dir`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="PATH=VALUE",
        help="set one value, given as YAML: jobs[0].lora.rank=8 or jobs.NAME.lora.rank=8 "
        "(repeatable)",
    )
    parser.add_argument(
        "--output-dir", metavar="DIR", help="directory for the results, instead of run.output_dir"
    )


def add_nproc_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="start N processes on this machine; has no effect under torchrun",
    )


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train all jobs of a configuration together",
        description="Trains all jobs of a configuration together.",
        epilog=_EPILOG,
    )
    parser.add_argument("config", metavar="CONFIG", help="configuration file, YAML or JSON")
    add_config_arguments(parser)
    add_nproc_argument(parser)
    add_plan_arguments(parser)
    add_live_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Trains, in this process or in `--nproc` of them, and prints the results."""
    if args.add or args.cancel:
        return change_live_run(args)
    check_plan_arguments(args)
    if args.plan is not None:
        asked = load_config(args.config, args.overrides, args.output_dir, settle=False)
        args.overrides = [*args.overrides, *planned_overrides(args, asked)]
    # Here even when other processes are going to train: a mistake then costs no start of N ranks.
    return train_config(args, load_config(args.config, args.overrides, args.output_dir))


def train_config(args: argparse.Namespace, config: RunConfig) -> int:
    """Trains a configuration that `train` or `sweep` has read, and prints the results."""
    config, notes = with_live_changes(config)
    # What needs neither torch nor other processes: the disk's reading, the kernels.
    if config.base_model.path is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        read_ahead(Path(config.base_model.path))
    if config.base_model.dtype == "bfloat16":
        build_early()
    if args.nproc is not None and "RANK" not in os.environ:
        if args.nproc > 1:
            return _launch(args, config)
        os.environ.setdefault("OMP_NUM_THREADS", threads_per_rank(1))
    is_main = global_rank() == 0
    if is_main:
        _print_warnings(config, notes)
    signals = StopSignals(speaks=is_main)
    with signals.install():
        summary = _train(config, signals, is_main=is_main, stderr=args.json)
        if is_main and summary:
            if args.json:
                print(json.dumps(summary, indent=2))
            else:
                show = print_run if config.sweep is None else print_sweep
                show(open_console(), summary, config.run.output_dir)
    return run_exit_code(summary, signals)


def run_exit_code(summary: dict[str, Any], signals: StopSignals) -> int:
    """Returns the exit code of a run by its summary, empty but on the writer, and its signals."""
    if signals.stopped_by:
        return exit_code(signals.stopped_by)
    states = {job["status"] for job in summary.get("jobs", {}).values()}
    return int(not states <= {"finished", "cancelled"})


def _launch(args: argparse.Namespace, config: RunConfig) -> int:
    lay_out_world(config.parallel, args.nproc)
    verb = "train" if config.sweep is None else "sweep"
    argv = [verb, args.config, *(f"--set={override}" for override in args.overrides)]
    if args.output_dir is not None:
        argv.append(f"--output-dir={args.output_dir}")
    if args.json:
        argv.append("--json")
    return run_ranks(cli_command(argv), args.nproc, stop_timeout_s=config.run.stop_timeout_s)


def _train(
    config: RunConfig, signals: StopSignals, *, is_main: bool, stderr: bool
) -> dict[str, Any]:
    gc.disable()  # imports and the building of a model make no garbage; the loop turns it on
    imports.quieten()
    from tlora_megatron.runtime.controller import train_run
    from tlora_megatron.runtime.ranks import join_agent, leave_process_group

    join_agent()
    if is_main:
        for name in _DECISIONS:
            logging.getLogger(name).setLevel(logging.INFO)
    resumes = config.run.resume != "never" and (Path(config.run.output_dir) / CONFIG_NAME).is_file()
    show = RichProgress(open_console(stderr=stderr), resumes=resumes) if is_main else None
    try:
        summary = train_run(config, show, signals)
    finally:
        gc.enable()
        if show is not None:  # also when it fails: a live display left on hides the cursor
            show.close()
    # Not when it fails: a rank that waits here for the others would keep torchrun from ending them.
    leave_process_group()
    return summary


def _print_warnings(config: RunConfig, notes: Sequence[str]) -> None:
    console = open_console(stderr=True)
    for sentence in notes:
        console.print(f"note: {sentence}")
    for sentence in ignored_settings(config):
        console.print(f"warning: {sentence}", style="yellow")
    for error in config.job_errors:
        console.print(f"warning: job {error.name} is left out: {error.message}", style="yellow")


def positive(text: str) -> int:
    """The positive integer that an option is given."""
    # argparse would put the name of this function in the place of int's own error.
    if not text.strip().lstrip("+").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text}")
    return int(text)
