"""`tlora cancel`, `pause`, `resume`, `rm`, `adapters`, `logs`: acts on jobs and tells of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tlora_megatron.cli.service.in_folder import JobRow, Row
from tlora_megatron.cli.service.reaching import (
    Service,
    add_reach_argument,
    add_state_argument,
    check_states,
    find_jobs,
    reach_service,
)
from tlora_megatron.cli.tables import open_console
from tlora_megatron.config.job_rows import OVER, JobState, job_to_dict
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.service.settings import read_age_s

_WORDS: dict[str, tuple[str, str]] = {
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
    "rm": (
        "remove jobs of a service that have ended, with their files",
        "Removes jobs that have ended from all lists and deletes their folders. One that an "
        "unfinished job names, or that a client uses in an open session, is refused.",
    ),
}
_UNFINISHED = frozenset(JobState) - OVER
_CHOSEN = {
    "cancel": _UNFINISHED,
    "pause": _UNFINISHED - {JobState.PAUSED},
    "resume": frozenset({JobState.PAUSED}),
    "rm": OVER,
}
"""States of the jobs that are chosen where `--state` names none."""
_CHOICES = ("all", "states", "tenant", "pattern", "older_than", "group")
_MOST_LINES = 20


def add_parser(commands: Any) -> None:
    for command, (short, long) in _WORDS.items():
        choice = "--state failed --older-than 30d" if command == "rm" else "--name 'sweep-*'"
        parser = commands.add_parser(
            command,
            help=short,
            description=f"{long} Each job is asked on its own: one that refuses leaves the others "
            "alone.",
            epilog=f"examples:\n  tlora {command} mirror\n  tlora {command} {choice} --dry-run\n",
        )
        parser.add_argument("names", nargs="*", metavar="NAME", help="name or id of a job")
        parser.add_argument("--all", action="store_true", help="all jobs for which it is possible")
        add_state_argument(parser)
        parser.add_argument("--tenant", metavar="T", help="only jobs of this tenant")
        parser.add_argument(
            "--name", dest="pattern", metavar="GLOB", help="only jobs of such names, as in 'a-*'"
        )
        parser.add_argument(
            "--older-than", metavar="AGE", help="only jobs that ended, or came, before: 30d, 12h"
        )
        parser.add_argument("--group", metavar="SWEEP", help="only the trials of this sweep")
        if command == "rm":
            parser.add_argument(
                "--checkpoints-only",
                action="store_const",
                dest="action",
                const="remove_checkpoints",
                help="delete what jobs could go on from; adapters, metrics and the jobs stay",
            )
        parser.add_argument("--dry-run", action="store_true", help="only show which jobs it is")
        parser.add_argument("--yes", action="store_true", help="do not ask about chosen jobs")
        add_reach_argument(parser)
        parser.add_argument("--json", action="store_true", help="print the jobs as JSON")
        parser.set_defaults(command=partial(run, command))
        parser.set_defaults(action="remove" if command == "rm" else command)


def run(command: str, args: argparse.Namespace) -> int:
    """Does it to each job by itself; raises `ConfigError` at the end for those that refused."""
    is_choice = any(getattr(args, name) for name in _CHOICES)
    if is_choice == bool(args.names):
        rule = "be given, or be chosen by --state, --tenant, --name, --older-than, --group or --all"
        raise must("NAME...", rule, "both" if is_choice else "neither")
    with reach_service(args) as service:
        jobs: Sequence[JobRow] = find_jobs(service, args.names)
        if is_choice:
            jobs = _chosen(service, command, args)
        refused: Mapping[str, str] = {}
        if not args.dry_run and (not is_choice or args.yes or _agreed(command, len(jobs))):
            jobs, refused = service.act(args.action, jobs)
        elif not args.dry_run:
            return 1
        if args.json:
            print(json.dumps([job_to_dict(job) for job in jobs], indent=2))
        else:
            _tell(service, command, jobs, args)
    if refused:
        told = list(refused.values())[:_MOST_LINES]
        all_jobs = len(refused) + len(jobs)
        first = [f"{len(refused):,} of {all_jobs:,} jobs refused:"] if all_jobs > 1 else []
        raise ConfigError("\n".join([*first, *told]))
    return 0


def _chosen(service: Service, command: str, args: argparse.Namespace) -> list[JobRow]:
    """The jobs that all options let through."""
    states = check_states(args.states) or [str(state) for state in _CHOSEN[command]]
    found = [
        job
        for job in service.all(states, args.tenant)
        if fnmatchcase(job.name, args.pattern or "*")
    ]
    if args.group is not None:
        trials = {row["job"] for row in service.sweep(args.group)["ranking"]}
        found = [job for job in found if job.id in trials]
    if args.older_than is None:
        return found
    before = time.time() - read_age_s(args.older_than, "--older-than")
    return [job for job in found if (job.ended_at or job.submitted_at) < before]


def _agreed(command: str, count: int) -> bool:
    """Asks before many jobs are met at once; refuses where nobody can answer."""
    if not count:
        return True
    if not sys.stdin.isatty():
        raise must("--yes", f"be given to {command} {count:,} chosen jobs", "no terminal to ask at")
    return input(f"{command} {count:,} jobs? [y/N] ").strip().lower() in ("y", "yes")


def _tell(service: Service, command: str, jobs: Sequence[JobRow], args: argparse.Namespace) -> None:
    console = open_console()
    done = {"remove": "removed", "remove_checkpoints": "its checkpoints are deleted"}
    for job in jobs[:_MOST_LINES]:
        told = f"{command} asked; it is {job.state}"
        if args.dry_run:
            told = f"would be asked to {command}; it is {job.state}"
        elif job.wish != command:
            told = done.get(args.action, f"nothing to resume: it is {job.state}")
        console.print(f"{job.name} ({job.id}): {told}")
    if len(jobs) > _MOST_LINES or not jobs:
        console.print(f"{len(jobs):,} jobs in all")
    if command != "rm" and not service.is_served:
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
        "--best", action="store_true", help="NAME is a sweep: copy that of its best trial"
    )
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
        (job,) = find_jobs(service, [_best(service, args.name) if args.best else args.name])
        if job.state != "finished":
            steps = f"{job.state} at step {job.step}"
            remedy = "" if job.state.is_over else f"wait for it with: tlora logs -f {job.name}"
            raise must(f"job {job.name}", "be finished", steps, remedy)
        service.fetch_adapter(job, out)
    open_console().print(f"adapter of {job.name} ({job.id}): {out}")
    return 0


def _best(service: Service, name: str) -> str:
    """The id of the best trial of a sweep; refuses one of which none has finished."""
    found = service.sweep(name)
    if found["best"] is None:
        raise must(f"sweep {name}", "have a trial that has finished", found["states"])
    return str(found["best"]["job"])


_FOR_PROGRAMS = ("granted", "released")
_UNTOLD = ("kind", "at", "event", "tenant", "name", "by", "epoch", "digest", "lease", "round")
"""Events and facts that a person has no use for; `--json` has them."""
_EPILOG = """\
examples:
  tlora logs mirror
  tlora logs -f mirror          # follows until the job has ended
  tlora logs --tail 20 mirror   # the last 20 lines
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
    parser.add_argument("--tail", type=int, metavar="N", help="begin with the last N lines")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_reach_argument(parser)
    parser.set_defaults(command=run_logs)


def run_logs(args: argparse.Namespace) -> int:
    """Prints the log, and what is added to it until the job is over."""
    console = open_console()
    if args.tail is not None and args.tail < 0:
        raise must("--tail", "be at least 0", args.tail)
    with reach_service(args) as service:
        (job,) = find_jobs(service, [args.name])

        def rows(*, follow: bool = False) -> Iterator[Row]:
            found = service.history(job, follow=follow)
            return (row for row in found if args.json or row.get("event") not in _FOR_PROGRAMS)

        left_out = 0 if args.tail is None else max(0, sum(1 for _ in rows()) - args.tail)
        for row in islice(rows(follow=args.follow), left_out, None):
            if args.json:
                print(json.dumps(row), flush=True)
            else:
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
