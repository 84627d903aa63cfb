"""`tlora jobs`: lists the jobs of a service, as rows of a table or as plain values."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tlora_megatron.cli.service.ports import JobRow, Service
from tlora_megatron.cli.service.reaching import add_reach_argument, reach_service
from tlora_megatron.cli.tables import open_console
from tlora_megatron.config.reader import must, nearest
from tlora_megatron.service.rows import job_to_dict

if TYPE_CHECKING:
    from tlora_megatron.service.store import JobState


STATE_STYLE = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "cancelled": "dim",
    "paused": "yellow",
}


def job_table(jobs: Iterable[JobRow], now_s: float | None = None) -> Table:
    """A row a job, in order: what it is called, how far it is, where it runs, its age now."""
    now_s = time.time() if now_s is None else now_s
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("job", "id", "state", "steps", "loss", "tokens", "gang", "age"):
        right = column in ("steps", "loss", "tokens", "age")
        table.add_column(column, no_wrap=True, justify="right" if right else "left")
    for job in jobs:
        table.add_row(*_cells(job, now_s), style=STATE_STYLE.get(job.state, ""))
    return table


def _cells(job: JobRow, now_s: float) -> tuple[str, ...]:
    return (
        job.name,
        job.id,
        state_words(job),
        progress_words(job),
        "-" if job.loss is None else f"{job.loss:.4g}",
        f"{job.tokens:,}",
        job.gang or "-",
        duration_words((job.ended_at or now_s) - job.submitted_at),
    )


def count_words(counts: Mapping[JobState, int]) -> str:
    """How many jobs are in which state: `10 queued, 2 running, 5 finished`."""
    from tlora_megatron.service.store import JobState

    found = ((state, counts.get(state, 0)) for state in JobState)
    return ", ".join(f"{count:,} {state}" for state, count in found if count) or "no jobs"


def state_words(job: JobRow) -> str:
    """The state, and what was asked for and is not done yet: `running, cancel asked`."""
    return f"{job.state}, {job.wish} asked" if job.wish else str(job.state)


def progress_words(job: JobRow) -> str:
    """Steps done, and how many there will be if that is known: `12/200`."""
    return f"{job.step}/{job.num_steps}" if job.num_steps else str(job.step)


def duration_words(seconds: float) -> str:
    """A duration by its two largest units: `7 s`, `3 min 5 s`, `2 h 10 min`, `4 d 3 h`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


if TYPE_CHECKING:
    pass

_MOST_ROWS = 200
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
    """Adds the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "jobs",
        help="list the jobs of a service",
        description="Lists the jobs of a service, in the order in which they were submitted.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="also those that have ended")
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        dest="states",
        metavar="S",
        help="only jobs in this state (repeatable): queued, running, failed, ...",
    )
    parser.add_argument("--watch", action="store_true", help="show changes until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_reach_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list, once or for as long as it is watched."""
    if args.watch and args.json:
        raise must("--watch", "be given without --json", True, "`tlora logs -f --json` follows")
    with reach_service(args) as service:
        states = _states(args)
        if args.watch:
            _watch(service, states, args)
        elif args.json:
            print(json.dumps(_document(service, states), indent=2))
        else:
            open_console().print(_page(service, states, args), soft_wrap=False)
    return 0


def _states(args: argparse.Namespace) -> list[str] | None:
    """The states that are asked for; None: all."""
    from tlora_megatron.service.store import JobState

    names = [str(state) for state in JobState]
    for given in args.states:
        if given not in names:
            raise must("--state", f"be one of {', '.join(names)}", given, nearest(given, names))
    if args.states:
        return list(args.states)
    return None if args.all else [str(state) for state in JobState if not state.is_over]


def _document(service: Service, states: list[str] | None) -> dict[str, Any]:
    return {
        "service": service.place,
        "served": service.is_served,
        "counts": {str(state): count for state, count in service.counts().items()},
        "jobs": [job_to_dict(job) for job in service.all(states)],
    }


def _page(service: Service, states: list[str] | None, args: argparse.Namespace) -> RenderableType:
    """The table, and below it what it leaves out and whether anybody serves."""
    jobs = list(service.all(states))
    lines = [count_words(service.counts())]
    if len(jobs) > _MOST_ROWS:
        lines.append(f"{len(jobs) - _MOST_ROWS:,} more jobs are not shown; --json lists all")
    if not (jobs or args.all or args.states):
        lines.append("no job waits or runs; --all also lists those that have ended")
    if not service.is_served:
        lines.append(f"no controller runs, so nothing moves: {service.how_to_serve}")
    words = Text("\n".join(lines), style="dim")
    return Group(job_table(jobs[:_MOST_ROWS]), words) if jobs else words


def _watch(service: Service, states: list[str] | None, args: argparse.Namespace) -> None:
    """Shows the list anew as jobs get on; ends with Ctrl-C."""
    console = open_console()
    if not console.is_terminal:
        _watch_lines(console, service, states, args)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(_page(service, states, args), refresh=True)
            time.sleep(_WATCH_EVERY_S)


def _watch_lines(
    console: Console, service: Service, states: list[str] | None, args: argparse.Namespace
) -> None:
    """Prints the list again whenever some job has changed its state."""
    last: object = None
    while True:
        if (now := service.news()) != last:
            last = now
            console.print(_page(service, states, args), soft_wrap=False)
        time.sleep(_WATCH_EVERY_S)
