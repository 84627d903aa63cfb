"""`tlora logs`: tells what has happened to a job of a service, and its steps."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from tlora_megatron.cli.service.ports import find_jobs
from tlora_megatron.cli.service.reaching import add_reach_argument, reach_service
from tlora_megatron.cli.tables import open_console

_FOR_PROGRAMS = ("granted", "released")
_UNTOLD = ("kind", "at", "event", "tenant", "name", "by", "epoch", "digest", "lease", "round")
"""Events and facts that a person has no use for; `--json` has them."""
_EPILOG = """\
examples:
  tlora logs mirror
  tlora logs -f mirror          # follows until the job has ended
  tlora logs mirror --json      # one JSON object a line
"""

Row = dict[str, Any]


def add_parser(commands: Any) -> None:
    """Adds the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "logs",
        help="tell what happens to a job of a service",
        description="Prints the events of a job and its steps, as the service has recorded them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="name or id of a job")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_reach_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Prints the log, and what is added to it until the job is over."""
    console = open_console()
    with reach_service(args) as service:
        (job,) = find_jobs(service, [args.name])
        for row in service.history(job, follow=args.follow):
            if args.json:
                print(json.dumps(row), flush=True)
            elif row.get("event") not in _FOR_PROGRAMS:
                console.print(_line(row))
    return 0


def _line(row: Row) -> str:
    """One line for a person."""
    if row["kind"] == "step":
        return f"          step {row['step']}  " + _numbers(row, ("loss", "lr", "tokens"))
    if row["kind"] == "evaluation":
        return f"          step {row['step']}  " + _numbers(row, ("eval_loss", "eval_exact_match"))
    at = datetime.fromtimestamp(row["at"]).strftime("%H:%M:%S")
    return f"{at}  {_event_words(row)}"


def _event_words(row: Row) -> str:
    """Says an event with its facts: `running -> finished: its last step is done`."""
    facts = {key: row[key] for key in row if key not in _UNTOLD and row[key]}
    why = facts.pop("why", None) or facts.pop("error", None) or facts.pop("message", None)
    words = row["event"]
    if words == "state":
        words = f"{facts.pop('from', '')} -> {facts.pop('to', '')}"
    elif words in ("seat", "said"):
        words = facts.pop("phase", None) or facts.pop("what", words)
    if "stall_s" in facts:
        facts["the others waited"] = f"{1e3 * facts.pop('stall_s'):.0f} ms"
    rest = ", ".join(f"{key} {_short(value)}" for key, value in facts.items())
    return words + (f": {why}" if why else "") + (f" ({rest})" if rest else "")


def _numbers(row: Row, keys: tuple[str, ...]) -> str:
    return "  ".join(f"{key} {_short(row[key])}" for key in keys if row.get(key) is not None)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
