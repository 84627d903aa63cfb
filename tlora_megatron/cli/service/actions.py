"""`tlora cancel`, `pause`, `resume`, `adapters`, `logs`: acts on jobs, copies and tells of them."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from tlora_megatron.cli.service.in_folder import JobRow, RequestedAction, Row
from tlora_megatron.cli.service.reaching import (
    Service,
    add_reach_argument,
    find_jobs,
    reach_service,
)
from tlora_megatron.cli.tables import open_console
from tlora_megatron.config.reader import must
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
    for action, (short, long) in _WORDS.items():
        parser = commands.add_parser(
            action,
            help=short,
            description=long,
            epilog=(
                f"examples:\n  tlora {action} mirror\n  tlora {action} mirror sums --service DIR\n"
            ),
        )
        parser.add_argument("names", nargs="+", metavar="NAME", help="name or id of a job")
        add_reach_argument(parser)
        parser.add_argument("--json", action="store_true", help="print the jobs as JSON")
        parser.set_defaults(command=partial(run, action))


def run(action: RequestedAction, args: argparse.Namespace) -> int:
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


def add_adapters_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "adapters",
        help="copy the adapter of a finished job out of a service",
        description="Copies the adapter of a finished job, as a folder that PEFT and vLLM load.",
        epilog="examples:\n  tlora adapters mirror --out mirror-adapter\n"
        "  tlora inspect mirror-adapter\n",
    )
    parser.add_argument("name", metavar="NAME", help="name or id of a finished job")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder to make; one that exists is refused"
    )
    add_reach_argument(parser)
    parser.set_defaults(command=run_adapters)


def run_adapters(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if out.exists() or out.is_symlink():
        raise must("--out", "name a folder that does not exist yet", str(out))
    if not out.absolute().parent.is_dir():
        raise must("--out", "lie in a folder that exists", str(out))
    with reach_service(args) as service:
        (job,) = find_jobs(service, [args.name])
        if job.state != "finished":
            steps = f"{job.state} at step {job.step}"
            remedy = "" if job.state.is_over else f"wait for it with: tlora logs -f {job.name}"
            raise must(f"job {job.name}", "be finished", steps, remedy)
        service.fetch_adapter(job, out)
    open_console().print(f"adapter of {job.name} ({job.id}): {out}")
    return 0


_FOR_PROGRAMS = ("granted", "released")
_UNTOLD = ("kind", "at", "event", "tenant", "name", "by", "epoch", "digest", "lease", "round")
"""Events and facts that a person has no use for; `--json` has them."""
_EPILOG = """\
examples:
  tlora logs mirror
  tlora logs -f mirror          # follows until the job has ended
  tlora logs mirror --json      # one JSON object a line
"""


def add_logs_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "logs",
        help="tell what happens to a job of a service",
        description="Prints the events of a job and its steps, as the service has recorded them.",
        epilog=_EPILOG,
    )
    parser.add_argument("name", metavar="NAME", help="name or id of a job")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_reach_argument(parser)
    parser.set_defaults(command=run_logs)


def run_logs(args: argparse.Namespace) -> int:
    """Prints the log, and what is added to it until the job is over."""
    console = open_console()
    with reach_service(args) as service:
        (job,) = find_jobs(service, [args.name])
        for row in service.history(job, follow=args.follow):
            if args.json:
                print(json.dumps(row), flush=True)
            elif row.get("event") not in _FOR_PROGRAMS:
                console.print(_line(row))
        if not args.json and job.state == "queued" and (why := service.why([job])):
            console.print(f"          waits: {why[job.id]}")
    return 0


def _line(row: Row) -> str:
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
