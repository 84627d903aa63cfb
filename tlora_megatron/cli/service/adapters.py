"""`tlora adapters`: copies the adapter of a finished job out of a service."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_megatron.cli.console import open_console
from tlora_megatron.cli.service.opening import (
    Service,
    add_service_argument,
    find_jobs,
    open_service,
)
from tlora_megatron.config.reader import must

if TYPE_CHECKING:
    from tlora_megatron.service.store import Job

ADAPTER = "adapter"
_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


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
    add_service_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Copies the adapter, whole or not at all."""
    out = Path(args.out)
    if out.exists() or out.is_symlink():
        raise must("--out", "name a folder that does not exist yet", str(out))
    if not out.absolute().parent.is_dir():
        raise must("--out", "lie in a folder that exists", str(out))
    with open_service(args) as service:
        (job,) = find_jobs(service, [args.name])
        _copy(_adapter_of(service, job), out)
    open_console().print(f"adapter of {job.name} ({job.id}): {out}")
    return 0


def _adapter_of(service: Service, job: Job) -> Path:
    folder = service.home.job(job.id) / ADAPTER
    if job.state != "finished":
        steps = f"{job.state} at step {job.step}"
        remedy = "" if job.state.is_over else f"wait for it with: tlora logs -f {job.name}"
        raise must(f"job {job.name}", "be finished", steps, remedy)
    if not folder.is_dir():
        raise RuntimeError(f"the adapter of job {job.name} must lie in {folder}, got nothing there")
    return folder


def _copy(source: Path, out: Path) -> None:
    """Copies the plain files of a folder into a new one, which appears when all are there."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        for name in sorted(os.listdir(source)):
            _copy_file(source / name, partial / name)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_file(source: Path, target: Path) -> None:
    with open(os.open(source, _NO_LINK), "rb") as reader, target.open("xb") as writer:
        if not stat.S_ISREG(os.fstat(reader.fileno()).st_mode):
            raise RuntimeError(f"an adapter must consist of plain files, got {source}")
        shutil.copyfileobj(reader, writer)
