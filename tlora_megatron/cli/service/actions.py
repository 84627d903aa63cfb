"""`tlora cancel`, `tlora pause` and `tlora resume`: ask a service to end or hold jobs."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from tlora_megatron.cli.service.ports import JobRow, RequestedAction, Service, find_jobs
from tlora_megatron.cli.service.reaching import add_reach_argument, reach_service
from tlora_megatron.cli.tables import open_console
from tlora_megatron.service.rows import job_to_dict

_WORDS: dict[RequestedAction, tuple[str, str]] = {
    "cancel": (
        "end jobs of a service before their time",
        "Ends jobs for good: the round under way ends, and they leave; their neighbours go on. "
        "Checkpoints stay in a job's folder.",
    ),
    "pause": (
        "hold jobs of a service",
        "Saves jobs and takes them out of their super-model, or holds them back in the queue, "
        "until `tlora resume`.",
    ),
    "resume": (
        "let paused jobs of a service go on",
        "Puts paused jobs back into the queue; they go on at the step where they were saved.",
    ),
}


def add_parser(commands: Any) -> None:
    """Adds the three subcommands to argparse's `commands`."""
    for action, (short, long) in _WORDS.items():
        parser = commands.add_parser(
            action,
            help=short,
            description=long,
            epilog=(
                f"examples:\n  tlora {action} mirror\n  tlora {action} mirror sums --service DIR\n"
            ),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("names", nargs="+", metavar="NAME", help="name or id of a job")
        add_reach_argument(parser)
        parser.add_argument("--json", action="store_true", help="print the jobs as JSON")
        parser.set_defaults(command=partial(run, action))


def run(action: RequestedAction, args: argparse.Namespace) -> int:
    """Asks it of all jobs that are named."""
    with reach_service(args) as service:
        asked = service.request_action(find_jobs(service, args.names), action)
        if args.json:
            print(json.dumps([job_to_dict(job) for job in asked], indent=2))
        else:
            _tell(service, action, asked)
    return 0


def _tell(service: Service, action: str, jobs: list[JobRow]) -> None:
    console = open_console()
    for job in jobs:
        told = f"{action} asked; it is" if job.wish == action else "nothing to resume: it is"
        console.print(f"{job.name} ({job.id}): {told} {job.state}")
    if not service.is_served:
        console.print(
            f"no controller runs: it is done when one does: {service.how_to_serve}", style="yellow"
        )
