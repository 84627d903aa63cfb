"""How jobs look on a terminal: a table of them, and words for their states and times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from rich.table import Table

from tlora_megatron.cli.service.in_folder import JobRow
from tlora_megatron.cli.tables import make_table
from tlora_megatron.config.job_rows import JobState

STATE_STYLE = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "cancelled": "dim",
    "paused": "yellow",
}


def job_table(
    jobs: Iterable[JobRow],
    now_s: float | None = None,
    speeds: Mapping[str, Mapping[str, float | None]] | None = None,
) -> Table:
    """A row a job, in order: what it is called, how far it is, where it runs, its age now.

    Args:
        speeds: of jobs by id, as `FolderService.speeds` returns them; None = no column of theirs.
    """
    now_s = time.time() if now_s is None else now_s
    rates = () if speeds is None else ("tokens/s", "promised")
    columns = ("job", "id", "state", "steps", "loss", "tokens", *rates, "gang", "age")
    table = make_table(*columns, right=("steps", "loss", "tokens", *rates, "age"))
    for job in jobs:
        table.add_row(
            job.name,
            job.id,
            state_words(job),
            progress_words(job),
            "-" if job.loss is None else f"{job.loss:.4g}",
            f"{job.tokens:,}",
            *(_rates(speeds.get(job.id, {})) if speeds is not None else ()),
            job.gang or "-",
            duration_words((job.ended_at or now_s) - job.submitted_at),
            style=STATE_STYLE.get(job.state, ""),
        )
    return table


def _rates(speeds: Mapping[str, float | None]) -> Iterator[str]:
    for name in ("tokens_per_s", "promised_tokens_per_s"):
        rate = speeds.get(name)
        yield "-" if rate is None else f"{rate:,.0f}"


def count_words(counts: Mapping[JobState, int]) -> str:
    """How many jobs are in which state: `10 queued, 2 running, 5 finished`."""
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
