"""`tlora cancel`, `tlora pause` and `tlora resume`: ask a service to end or hold jobs."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from tlora_megatron.cli.console import open_console
from tlora_megatron.cli.service.opening import (
    Service,
    add_service_argument,
    find_jobs,
    open_service,
)
from tlora_megatron.cli.service.rows import job_to_dict
from tlora_megatron.config.reader import ConfigError

if TYPE_CHECKING:
    from tlora_megatron.service.store import Job, Wish

_WORDS: dict[Wish, tuple[str, str]] = {
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
    for wish, (short, long) in _WORDS.items():
        parser = commands.add_parser(
            wish,
            help=short,
            description=long,
            epilog=f"examples:\n  tlora {wish} mirror\n  tlora {wish} mirror sums --service DIR\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("names", nargs="+", metavar="NAME", help="name or id of a job")
        add_service_argument(parser)
        parser.add_argument("--json", action="store_true", help="print the jobs as JSON")
        parser.set_defaults(command=partial(run, wish))


def run(wish: Wish, args: argparse.Namespace) -> int:
    """Writes the wish into the store, for all jobs or for none."""
    from tlora_megatron.service.store import IllegalChange

    with open_service(args) as service:
        jobs = find_jobs(service, args.names)
        try:
            with service.store.transaction():
                asked = [service.store.jobs.wish(job.id, wish, by="tlora") for job in jobs]
        except IllegalChange as error:
            raise ConfigError(str(error)) from error
        if args.json:
            print(json.dumps([job_to_dict(job) for job in asked], indent=2))
        else:
            _tell(service, wish, asked)
    return 0


def _tell(service: Service, wish: str, jobs: list[Job]) -> None:
    console = open_console()
    for job in jobs:
        console.print(f"{job.name} ({job.id}): {wish} asked; it is {job.state}")
    if not service.is_served:
        console.print(
            f"no controller runs: it is done when one does: {service.how_to_serve}", style="yellow"
        )
