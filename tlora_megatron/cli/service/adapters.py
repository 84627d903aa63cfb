"""`tlora adapters`: copies the adapter of a finished job out of a service."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tlora_megatron.cli.service.ports import JobRow, find_jobs
from tlora_megatron.cli.service.reaching import add_reach_argument, reach_service
from tlora_megatron.cli.tables import open_console
from tlora_megatron.config.reader import must


def add_parser(commands: Any) -> None:
    """Adds the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "adapters",
        help="copy the adapter of a finished job out of a service",
        description="Copies the adapter of a finished job, as a folder that PEFT and vLLM load.",
        epilog="examples:\n  tlora adapters mirror --out mirror-adapter\n"
        "  tlora inspect mirror-adapter\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="name or id of a finished job")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder to make; one that exists is refused"
    )
    add_reach_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Copies the adapter, whole or not at all."""
    out = Path(args.out)
    if out.exists() or out.is_symlink():
        raise must("--out", "name a folder that does not exist yet", str(out))
    if not out.absolute().parent.is_dir():
        raise must("--out", "lie in a folder that exists", str(out))
    with reach_service(args) as service:
        (job,) = find_jobs(service, [args.name])
        _check_finished(job)
        service.fetch_adapter(job, out)
    open_console().print(f"adapter of {job.name} ({job.id}): {out}")
    return 0


def _check_finished(job: JobRow) -> None:
    if job.state != "finished":
        steps = f"{job.state} at step {job.step}"
        remedy = "" if job.state.is_over else f"wait for it with: tlora logs -f {job.name}"
        raise must(f"job {job.name}", "be finished", steps, remedy)
