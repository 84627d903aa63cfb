"""The `tlora` command: runs one subcommand and turns errors into a message and an exit code."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import select
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tlora_megatron
from tlora_megatron.cli.tables import global_rank, open_console
from tlora_megatron.config.reader import ConfigError, nearest
from tlora_megatron.runtime.ranks import describe_failure
from tlora_megatron.service.logs import formatter

_OTHER_RANKS_WAIT_S = 5.0
_EPILOG = """\
examples:
  tlora train configs/quickstart.yaml --nproc 2
  tlora inspect runs/quickstart
  tlora plan configs/quickstart.yaml --gpus 8 --hardware h200
  tlora serve
  tlora submit configs/quickstart.yaml --wait

`tlora COMMAND --help` shows the options and examples of a command.
"""

_PREFIX = "TLORA_"
VARIABLES = (
    *("ATTENTION", "BEGIN_S", "CACHE_DIR", "DEBUG", "FLAG_COMPUTE", "GANG_HOST", "KERNELS"),
    *("SERVICE", "TOKEN"),
)
"""Variables of the environment that the package reads, each behind the prefix."""

logger = logging.getLogger(__name__)

_COMMANDS = {
    **{name: name for name in ("train", "inspect", "data", "convert", "plan")},
    **{name: name for name in ("profile", "simulate")},
    "doctor": "doctor",
    "serve": "service.serve",
    "submit": "service.jobs:add_submit_parser",
    "jobs": "service.jobs",
    "logs": "service.actions:add_logs_parser",
    **dict.fromkeys(("cancel", "pause", "resume", "rm"), "service.actions"),
    "adapters": "service.actions:add_adapters_parser",
    "token": "service.tokens",
}
"""Command -> module of `cli`, and the function that adds it: the imports of all take 0.2 s."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; None: `sys.argv`.

    Returns:
        0 on success; 2 for a mistake in the configuration, the data or the command line; 1 for a
        failure while running, or a run with a job that did not finish; 130 on Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser(argv[0] if argv else None).parse_args(argv)
    level = logging.WARNING if global_rank() == 0 else logging.ERROR
    configure_logging(level, getattr(args, "log_format", "text"))
    tell_of_misspelt_variables()
    try:
        code = int(args.command(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as error:
        if not _reader_is_gone():
            show_error(error)
        return 1
    except (ValueError, NotImplementedError) as error:
        show_error(error)
        return 2
    except (RuntimeError, OSError, ImportError) as error:
        show_error(error)
        return 1


def _reader_is_gone() -> bool:
    """True if nobody reads this process's output any more, as behind `| head`; then it has none."""
    with suppress(OSError, ValueError):
        output = sys.stdout.fileno()
        poll = select.poll()
        poll.register(output, 0)  # errors are told though nobody asks for them
        if any(state & select.POLLERR for _, state in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # what is buffered goes there
            return True
    return False


class _Parser(argparse.ArgumentParser):
    """Prints descriptions and examples as they are written; so do the parsers of its commands."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **fields)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of one command, or of all where that is none of them."""
    parser = _Parser(prog="tlora", description=tlora_megatron.__doc__, epilog=_EPILOG)
    version = f"%(prog)s {tlora_megatron.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    chosen = _COMMANDS.get(command or "")
    for place in dict.fromkeys(_COMMANDS.values()) if chosen is None else (chosen,):
        module, _, function = place.partition(":")
        found = importlib.import_module(f"tlora_megatron.cli.{module}")
        getattr(found, function or "add_parser")(commands)
    return parser


def show_error(error: Exception) -> None:
    """Prints an error's message; ranks other than the first wait, since theirs may be the same."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Most errors meet every rank, and torchrun ends this one as soon as its node's first has
        # reported. What only this rank has met must still be seen.
        time.sleep(_OTHER_RANKS_WAIT_S)
    if os.environ.get("TLORA_DEBUG") == "1":
        traceback.print_exception(error)
    where = f" on rank {global_rank()}" if global_rank() else ""
    console = open_console(stderr=True)
    console.print(f"error{where}: {describe_failure(error)}", style="red")
    if not isinstance(error, ConfigError):
        console.print("TLORA_DEBUG=1 shows where it was raised", style="dim")


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which live bars replace while they are shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def configure_logging(level: int, log_format: str = "text") -> None:
    """Shows the package's log messages of this level and above."""
    logger = logging.getLogger("tlora_megatron")
    logger.setLevel(level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(formatter(log_format, "%(levelname)s: %(message)s"))
        logger.addHandler(handler)


def tell_of_misspelt_variables() -> None:
    """Warns of variables that are like one of ours; others with our prefix are of scripts."""
    for name in os.environ:
        is_ours = name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in VARIABLES
        meant = nearest(name.removeprefix(_PREFIX), VARIABLES, likeness=0.8) if is_ours else ""
        if meant:
            told = meant.replace("mean ", f"mean {_PREFIX}")
            logger.warning("the environment's %s has no effect; %s", name, told)
