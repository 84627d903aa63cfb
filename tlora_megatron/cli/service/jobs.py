"""`tlora jobs`: lists the jobs of a service."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tlora_megatron.cli.console import open_console
from tlora_megatron.cli.service.opening import Service, add_service_argument, open_service
from tlora_megatron.cli.service.rows import count_words, job_table, job_to_dict
from tlora_megatron.config.reader import must, nearest

if TYPE_CHECKING:
    from tlora_megatron.service.store import Job, JobState

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
    add_service_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list, once or for as long as it is watched."""
    if args.watch and args.json:
        raise must("--watch", "be given without --json", True, "`tlora logs -f --json` follows")
    with open_service(args) as service:
        states = _states(args)
        if args.watch:
            _watch(service, states, args)
        elif args.json:
            print(json.dumps(_document(service, states), indent=2))
        else:
            open_console().print(_page(service, states, args), soft_wrap=False)
    return 0


def list_jobs(service: Service, states: list[JobState] | None = None) -> Iterator[Job]:
    """All jobs in these states (None: in any), in the order in which they were submitted."""
    after = 0
    while True:
        page = service.store.jobs.page(states=states, after=after, limit=_PAGE)
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1].number


def _states(args: argparse.Namespace) -> list[JobState] | None:
    """The states that are asked for; None: all."""
    from tlora_megatron.service.store import JobState

    names = [str(state) for state in JobState]
    for given in args.states:
        if given not in names:
            raise must("--state", f"be one of {', '.join(names)}", given, nearest(given, names))
    if args.states:
        return [JobState(given) for given in args.states]
    return None if args.all else [state for state in JobState if not state.is_over]


def _document(service: Service, states: list[JobState] | None) -> dict[str, Any]:
    return {
        "service": str(service.home.root),
        "served": service.is_served,
        "counts": {str(state): count for state, count in service.store.jobs.counts().items()},
        "jobs": [job_to_dict(job) for job in list_jobs(service, states)],
    }


def _page(
    service: Service, states: list[JobState] | None, args: argparse.Namespace
) -> RenderableType:
    """The table, and below it what it leaves out and whether anybody serves."""
    jobs = list(list_jobs(service, states))
    lines = [count_words(service.store.jobs.counts())]
    if len(jobs) > _MOST_ROWS:
        lines.append(f"{len(jobs) - _MOST_ROWS:,} more jobs are not shown; --json lists all")
    if not (jobs or args.all or args.states):
        lines.append("no job waits or runs; --all also lists those that have ended")
    if not service.is_served:
        lines.append(f"no controller runs, so nothing moves: {service.how_to_serve}")
    words = Text("\n".join(lines), style="dim")
    return Group(job_table(jobs[:_MOST_ROWS]), words) if jobs else words


def _watch(service: Service, states: list[JobState] | None, args: argparse.Namespace) -> None:
    """Shows the list anew as jobs get on; ends with Ctrl-C."""
    console = open_console()
    if not console.is_terminal:
        _watch_lines(console, service, states, args)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(_page(service, states, args), refresh=True)
            time.sleep(_WATCH_EVERY_S)


def _watch_lines(
    console: Console, service: Service, states: list[JobState] | None, args: argparse.Namespace
) -> None:
    """Prints the list again whenever some job has changed its state."""
    last = -1
    while True:
        if (now := service.store.events.last()) != last:
            last = now
            console.print(_page(service, states, args), soft_wrap=False)
        time.sleep(_WATCH_EVERY_S)
