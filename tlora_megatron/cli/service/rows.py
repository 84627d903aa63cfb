"""Jobs of a service as rows of a table and as plain values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tlora_megatron.cli.service.reach.ports import JobRow

if TYPE_CHECKING:
    from tlora_megatron.service.store import JobState

STATE_STYLE = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "cancelled": "dim",
    "paused": "yellow",
}


def job_table(jobs: Iterable[JobRow], now_s: float | None = None) -> Table:
    """A row a job: what it is called, how far it is, where it runs.

    Args:
        jobs: in the order of the rows.
        now_s: Unix time from which ages count; None: now.
    """
    now_s = time.time() if now_s is None else now_s
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("job", "id", "state", "steps", "loss", "tokens", "gang", "age"):
        right = column in ("steps", "loss", "tokens", "age")
        table.add_column(column, no_wrap=True, justify="right" if right else "left")
    for job in jobs:
        table.add_row(*_cells(job, now_s), style=STATE_STYLE.get(job.state, ""))
    return table


def _cells(job: JobRow, now_s: float) -> tuple[str, ...]:
    return (
        job.name,
        job.id,
        state_words(job),
        progress_words(job),
        "-" if job.loss is None else f"{job.loss:.4g}",
        f"{job.tokens:,}",
        job.gang or "-",
        duration_words((job.ended_at or now_s) - job.submitted_at),
    )


def count_words(counts: Mapping[JobState, int]) -> str:
    """How many jobs are in which state: `10 queued, 2 running, 5 finished`."""
    from tlora_megatron.service.store import JobState

    found = ((state, counts.get(state, 0)) for state in JobState)
    return ", ".join(f"{count:,} {state}" for state, count in found if count) or "no jobs"


def state_words(job: JobRow) -> str:
    """The state, and what was asked for and is not done yet: `running, cancel asked`."""
    return f"{job.state}, {job.wish} asked" if job.wish else str(job.state)


def progress_words(job: JobRow) -> str:
    """Steps done, and how many there will be if that is known: `12/200`."""
    return f"{job.step}/{job.num_steps}" if job.num_steps else str(job.step)


def duration_words(seconds: float) -> str:
    """A duration by its two largest units: `7 s`, `3 min 5 s`, `2 h 10 min`, `4 d 3 h`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])
