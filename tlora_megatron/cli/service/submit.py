"""`tlora submit`: hands jobs to a service."""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from tlora_megatron.cli.console import open_console
from tlora_megatron.cli.service.reach.opening import add_reach_argument, reach_service
from tlora_megatron.cli.service.reach.ports import JobRow, Service
from tlora_megatron.cli.service.waiting import wait_for
from tlora_megatron.config.reader import must
from tlora_megatron.service.rows import job_to_dict

if TYPE_CHECKING:
    pass

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
