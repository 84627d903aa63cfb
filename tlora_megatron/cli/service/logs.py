"""`tlora logs`: tells what has happened to a job of a service, and its steps."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_megatron.cli.console import open_console
from tlora_megatron.cli.service.opening import (
    Service,
    add_service_argument,
    find_jobs,
    open_service,
)
from tlora_megatron.training.metrics import METRICS_FILE

if TYPE_CHECKING:
    from tlora_megatron.service.store import Event, Job

_LOOK_EVERY_S = 0.1
_PAGE = 1000
_IN_METRICS = ("evaluated",)
"""Events that are lines of the job's own metrics, too."""
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
    add_service_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Prints the log, and what is added to it until the job is over."""
    console = open_console()
    with open_service(args) as service:
        (job,) = find_jobs(service, [args.name])
        for row in _rows(service, job, follow=args.follow):
            if args.json:
                print(json.dumps(row), flush=True)
            elif row.get("event") not in _FOR_PROGRAMS:
                console.print(_line(row))
    return 0


def _rows(service: Service, job: Job, *, follow: bool) -> Iterator[Row]:
    """Events in order, each behind the steps that came before it."""
    steps = _Steps(service.home.job(job.id) / METRICS_FILE)
    seq = 0
    while True:
        # Looked at first: what the job did before it was over is then read below.
        is_over = service.store.jobs.get(job.id).state.is_over
        steps.read()
        while events := service.store.events.after(seq, job=job.id, limit=_PAGE):
            for event in events:
                yield from steps.until(_step_of(event))
                if event.kind not in _IN_METRICS:
                    yield _event_row(event)
            seq = events[-1].seq
        yield from steps.until(math.inf)
        if is_over or not follow:
            return
        time.sleep(_LOOK_EVERY_S)


def _step_of(event: Event) -> float:
    """The step behind which an event comes; behind its end a job takes none."""
    from tlora_megatron.service.store import OVER

    is_end = event.kind == "state" and event.body.get("to") in OVER
    return math.inf if is_end else event.body.get("step", -1)


class _Steps:
    """Reads a job's `metrics.jsonl` while it is written.

    A job that goes on from a checkpoint takes steps again, and the file is cut before. A step that
    has been told is not told twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self._waiting: list[Row] = []
        self._last = {"step": 0, "evaluation": -1}

    def read(self) -> None:
        """Takes what is new in the file; a line that is not whole yet waits."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset, self._waiting = found.st_ino, 0, []
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._waiting += [
            {"kind": _kind(row), **row} for row in map(json.loads, whole.splitlines())
        ]

    def until(self, step: float) -> Iterator[Row]:
        """Yields what waits up to a step."""
        while self._waiting and self._waiting[0]["step"] <= step:
            row = self._waiting.pop(0)
            if row["step"] > self._last[row["kind"]]:
                self._last[row["kind"]] = row["step"]
                yield row


def _kind(row: Row) -> str:
    return "evaluation" if "eval_loss" in row else "step"


def _event_row(event: Event) -> Row:
    return {"kind": "event", "at": event.at, "event": event.kind, **event.body}


def _line(row: Row) -> str:
    """One line for a person."""
    if row["kind"] == "step":
        return f"          step {row['step']}  " + _numbers(row, ("loss", "lr", "tokens"))
    if row["kind"] == "evaluation":
        return f"          step {row['step']}  " + _numbers(row, ("eval_loss", "eval_exact_match"))
    at = datetime.fromtimestamp(row["at"]).strftime("%H:%M:%S")
    return f"{at}  {_event_words(row)}"


def _event_words(row: Row) -> str:
    """What happened, and its facts: `running -> finished: its last step is done`."""
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
