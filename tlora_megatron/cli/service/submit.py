"""`tlora submit`: hands jobs to a service, and shows them until all have ended."""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tlora_megatron.cli.service.jobs import progress_words, state_words
from tlora_megatron.cli.service.ports import JobRow, Service
from tlora_megatron.cli.service.reaching import add_reach_argument, reach_service
from tlora_megatron.cli.tables import open_console
from tlora_megatron.config.reader import must
from tlora_megatron.service.rows import job_to_dict

_LINE_EVERY_S = 5.0


def wait_for(service: Service, jobs: Sequence[JobRow], console: Console) -> bool:
    """Waits until all jobs have ended; returns True if all of them have finished."""
    show = _Bars(console) if console.is_terminal else _Lines(console)
    ids = [job.id for job in jobs]
    try:
        while True:
            jobs = service.get(ids)
            show.update(jobs)
            if all(job.state.is_over for job in jobs):
                return all(job.state == "finished" for job in jobs)
            time.sleep(service.look_every_s)
    except KeyboardInterrupt:
        show.close()
        console.print("the jobs go on without this command; `tlora jobs` shows them")
        raise
    finally:
        show.close()


class _Bars:
    """A bar a job."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=console,
        )
        self._tasks = {}  # type: ignore[var-annotated]
        self._bars.start()

    def update(self, jobs: Sequence[JobRow]) -> None:
        """Shows where the jobs are."""
        for job in jobs:
            if job.id not in self._tasks:
                self._tasks[job.id] = self._bars.add_task(job.name, total=None, words="")
            total = job.num_steps or (1 if job.state.is_over else None)
            self._bars.update(
                self._tasks[job.id], total=total, completed=job.step, words=_words(job)
            )

    def close(self) -> None:
        """Leaves the bars as they are."""
        self._bars.stop()


class _Lines:
    """A line for each change of a state, and now and then one with the steps of what runs."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._states: dict[str, str] = {}
        self._line_s = clock()

    def update(self, jobs: Sequence[JobRow]) -> None:
        """Prints what is new."""
        for job in jobs:
            state = state_words(job)
            if self._states.get(job.id) != state:
                self._states[job.id] = state
                self._console.print(f"{job.name}: {_words(job)}")
        if self._clock() - self._line_s >= _LINE_EVERY_S:
            self._line_s = self._clock()
            running = [job for job in jobs if job.state == "running"]
            line = "  ".join(f"{job.name} {progress_words(job)}{_loss(job)}" for job in running)
            if line:
                self._console.print(line)

    def close(self) -> None:
        """Nothing is open."""


def _words(job: JobRow) -> str:
    """State, steps and loss of a job in one line, and why it failed."""
    steps = f"  {progress_words(job)}" if job.step or job.num_steps else ""
    why = f": {job.error}" if job.error else ""
    return f"{state_words(job)}{steps}{_loss(job)}{why}"


def _loss(job: JobRow) -> str:
    return "" if job.loss is None else f" loss {job.loss:.4f}"


_EPILOG = """\
examples:
  tlora submit configs/quickstart.yaml
  tlora submit math.yaml chat.yaml --wait
  tlora submit math.yaml --set lora.rank=8 --set name=math-r8
  tlora submit math.yaml --idempotency-key night-42   # again with the same key: the same jobs

A file is a run configuration, all of whose jobs are submitted, or a single job: the keys of one
entry of `jobs`, and `base_model`. Relative paths start at the file's folder. What a job asks of the
service stands in its section `service`: gpus, max_slowdown, priority.

exit code: 0 submitted (with --wait: all jobs finished), 1 a job failed or was cancelled,
2 a mistake in the input, 130 Ctrl-C while waiting: the jobs go on
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "submit",
        help="hand jobs to a service",
        description="Hands jobs to a service. They wait in its queue if nobody serves it now.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="jobs or run configurations, YAML or JSON"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="PATH=VALUE",
        help="set one value of every file, given as YAML (repeatable)",
    )
    parser.add_argument("--wait", action="store_true", help="show progress until all jobs end")
    parser.add_argument(
        "--idempotency-key",
        metavar="K",
        help="text that names this submission: with the same one, the same jobs are submitted once",
    )
    parser.add_argument("--json", action="store_true", help="print the jobs as JSON")
    add_reach_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Submits all jobs of all files, or none."""
    key = uuid.uuid4().hex if args.idempotency_key is None else _checked_key(args.idempotency_key)
    with reach_service(args) as service:
        jobs, new = service.submit(args.files, args.overrides, key)
        if not args.json:
            _tell(service, jobs, new)
        code = 0
        if args.wait:
            ended = wait_for(service, jobs, open_console(stderr=args.json))
            jobs = service.get([job.id for job in jobs])
            code = int(not ended)
        if args.json:
            print(json.dumps([job_to_dict(job) for job in jobs], indent=2))
        return code


def _checked_key(key: str) -> str:
    """Refuses what names nothing: a script's unset variable would submit its jobs twice."""
    if not key.strip() or not key.isprintable():
        raise must("--idempotency-key", "be text that can be printed, and not empty", key)
    return key


def _tell(service: Service, jobs: Sequence[JobRow], new: Collection[str]) -> None:
    console = open_console()
    for job in jobs:
        known = "" if job.id in new else " (submitted before, with the same key)"
        console.print(f"{job.id}  {job.name}  {job.state}{known}")
    if not service.is_served:
        console.print(
            f"no controller runs: the jobs wait until one does: {service.how_to_serve}",
            style="yellow",
        )
