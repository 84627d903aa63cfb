"""`tlora jobs`: lists the jobs of a service."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tlora_megatron.cli.console import open_console
from tlora_megatron.cli.service.reach.opening import add_reach_argument, reach_service
from tlora_megatron.cli.service.reach.ports import Service
from tlora_megatron.cli.service.rows import count_words, job_table
from tlora_megatron.config.reader import must, nearest
from tlora_megatron.service.rows import job_to_dict

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
