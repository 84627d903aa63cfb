"""`tlora submit` and `tlora jobs`: sends jobs to a service, and shows them."""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from tlora_megatron.cli.service.in_folder import JobRow
from tlora_megatron.cli.service.job_table import (
    count_words,
    job_table,
    progress_words,
    state_words,
)
from tlora_megatron.cli.service.reaching import (
    Service,
    add_reach_argument,
    add_state_argument,
    check_states,
    reach_service,
)
from tlora_megatron.cli.tables import make_table, open_console, sweep_line, sweep_table
from tlora_megatron.config.job_rows import JobState, job_to_dict
from tlora_megatron.config.reader import must

_MOST_ROWS = 200
_MOST_REASONS = 5
"""Jobs of which the list says why they wait; `tlora logs` says it of any."""
_WATCH_EVERY_S = 0.5
_PAGE = 1000
_EPILOG = """\
examples:
  tlora jobs
  tlora jobs --watch
  tlora jobs --all --state failed
  tlora jobs --all --json | jq '.jobs[] | select(.state == "finished") | .id'
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "jobs",
        help="list the jobs of a service",
        description="Lists the jobs of a service, in the order in which they were submitted.",
        epilog=_EPILOG,
    )
    parser.add_argument("--all", action="store_true", help="also those that have ended")
    add_state_argument(parser)
    parser.add_argument("--watch", action="store_true", help="show changes until Ctrl-C")
    parser.add_argument(
        "--disk", action="store_true", help="show what jobs have on the disk, the largest first"
    )
    parser.add_argument(
        "--group",
        nargs="?",
        const="",
        metavar="SWEEP",
        help="show sweeps, a line each, or the trials of one, the best first",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_reach_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list, once or for as long as it is watched."""
    if args.watch and args.json:
        raise must("--watch", "be given without --json", True, "`tlora logs -f --json` follows")
    with reach_service(args) as service:
        states = _states(args)
        if args.group is not None:
            _show_sweeps(service, args)
        elif args.disk:
            _show_disk(service.disk(states), args)
        elif args.watch:
            _watch(service, states, args)
        elif args.json:
            document = {
                "service": service.place,
                "served": service.is_served,
                "counts": {str(state): count for state, count in service.counts().items()},
                "jobs": _with_speeds(service, [*service.all(states)]),
            }
            print(json.dumps(document, indent=2))
        else:
            open_console().print(_page(service, states, args), soft_wrap=False)
    return 0


def _with_speeds(service: Service, jobs: list[JobRow]) -> list[dict[str, Any]]:
    speeds = service.speeds(jobs)
    return [{**job_to_dict(job), **speeds.get(job.id, {})} for job in jobs]


def _show_sweeps(service: Service, args: argparse.Namespace) -> None:
    """A line for each sweep; of one that is named, a row for each trial, too."""
    found = [service.sweep(args.group)] if args.group else service.sweeps()
    if args.json:
        print(json.dumps(found[0] if args.group else found, indent=2))
        return
    console = open_console()
    for sweep in found:
        console.print(sweep_line(sweep))
    if args.group:
        console.print(sweep_table(found[0]), soft_wrap=False)
    elif not found:
        console.print("no sweeps; `tlora sweep --service` submits one")


def _show_disk(found: Iterable[tuple[JobRow, Mapping[str, int]]], args: argparse.Namespace) -> None:
    """A row a job: bytes of its checkpoints, its adapter and all else; then the sum by tenant."""
    rows = sorted(found, key=lambda row: -sum(row[1].values()))
    if args.json:
        jobs = [{**job_to_dict(job), "tenant": job.tenant, "disk": size} for job, size in rows]
        print(json.dumps({"jobs": jobs}, indent=2))
        return
    sizes = ("checkpoints", "adapter", "other", "all")
    table = make_table("job", "id", "tenant", "state", *sizes, right=sizes)
    tenants: Counter[str] = Counter()
    for job, size in rows:
        total, parts = sum(size.values()), [size.get(name, 0) for name in sizes[:2]]
        tenants[str(job.tenant)] += total
        if table.row_count < _MOST_ROWS:
            words = [decimal(count) for count in (*parts, total - sum(parts), total)]
            table.add_row(job.name, job.id, job.tenant, state_words(job), *words)
    told = (f"{tenant}: {decimal(total)}" for tenant, total in tenants.most_common())
    open_console().print(table, Text("\n".join(told), style="dim"), soft_wrap=False)


def _states(args: argparse.Namespace) -> list[str] | None:
    """The states that are asked for; None: all."""
    if args.states:
        return check_states(args.states)
    return None if args.all else [str(state) for state in JobState if not state.is_over]


def _page(service: Service, states: list[str] | None, args: argparse.Namespace) -> RenderableType:
    """The table, and below it what it leaves out and whether anybody serves."""
    jobs, counts = list(islice(service.all(states), _MOST_ROWS)), service.counts()
    lines = [count_words(counts)]
    why = service.why([job for job in jobs if job.state == "queued"])
    waiting = [f"{job.name} waits: {why[job.id]}" for job in jobs if job.id in why]
    lines += waiting[:_MOST_REASONS]
    more = sum(counts.get(state, 0) for state in JobState if states is None or state in states)
    if more > _MOST_ROWS:
        lines.append(f"{more - _MOST_ROWS:,} more jobs are not shown; --json lists all")
    if not (jobs or args.all or args.states):
        lines.append("no job waits or runs; --all also lists those that have ended")
    if not service.is_served:
        lines.append(f"no controller runs, so nothing moves: {service.how_to_serve}")
    words = Text("\n".join(lines), style="dim")
    speeds = service.speeds([job for job in jobs if job.gang is not None])
    return Group(job_table(jobs, speeds=speeds), words) if jobs else words


def _watch(service: Service, states: list[str] | None, args: argparse.Namespace) -> None:
    """Shows the list anew as jobs get on; ends with Ctrl-C."""
    console, last = open_console(), None
    while not console.is_terminal:  # again whenever some job has changed its state
        if (now := service.news()) != last:
            last = now
            console.print(_page(service, states, args), soft_wrap=False)
        time.sleep(_WATCH_EVERY_S)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(_page(service, states, args), refresh=True)
            time.sleep(_WATCH_EVERY_S)


_LINE_EVERY_S = 5.0
_STARTING_S = 5.0
"""So long `tlora submit` waits for a service that was started just before it."""


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
        for job in jobs:
            if job.id not in self._tasks:
                self._tasks[job.id] = self._bars.add_task(job.name, total=None, words="")
            total = job.num_steps or (1 if job.state.is_over else None)
            self._bars.update(
                self._tasks[job.id], total=total, completed=job.step, words=_words(job)
            )

    def close(self) -> None:
        self._bars.stop()


class _Lines:
    """A line for each change of a state, and now and then one with the steps of what runs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._line_s = time.monotonic()

    def update(self, jobs: Sequence[JobRow]) -> None:
        for job in jobs:
            state = state_words(job)
            if self._states.get(job.id) != state:
                self._states[job.id] = state
                self._console.print(f"{job.name}: {_words(job)}")
        if time.monotonic() - self._line_s >= _LINE_EVERY_S:
            self._line_s = time.monotonic()
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


_SUBMIT_EPILOG = """\
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


def add_submit_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "submit",
        help="hand jobs to a service",
        description="Hands jobs to a service. They wait in its queue if nobody serves it now.",
        epilog=_SUBMIT_EPILOG,
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
    parser.set_defaults(command=run_submit, waits_s=_STARTING_S)


def run_submit(args: argparse.Namespace) -> int:
    """Submits all jobs of all files, or none."""
    key = uuid.uuid4().hex if args.idempotency_key is None else args.idempotency_key
    # What names nothing, such as a script's unset variable, would submit its jobs twice.
    if not key.strip() or not key.isprintable():
        raise must("--idempotency-key", "be text that can be printed, and not empty", key)
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
