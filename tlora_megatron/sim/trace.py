"""Reads cluster traces (AcmeTrace, Philly, plain CSV), and fits them to a cluster."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Literal

from tlora_megatron.config.reader import ConfigError, must

End = Literal["completed", "failed", "cancelled"]

_COLUMNS = {
    "name": ("job_id", "jobid", "name", "id"),
    "submit_s": ("submit_time", "submit_s", "submitted_time", "arrival_s"),
    "duration_s": ("duration", "duration_s", "run_time"),
    "num_gpus": ("gpu_num", "num_gpus", "gpus"),
    "end": ("status", "state"),
    "tenant": ("vc", "tenant", "user", "queue"),
    "priority": ("priority",),
}
"""Columns that a trace must or may have, with their names in known formats."""
_REQUIRED = ("submit_s", "duration_s", "num_gpus")
_ENDS: dict[str, End] = {
    "failed": "failed",
    "node_fail": "failed",
    "timeout": "failed",
    "cancelled": "cancelled",
    "canceled": "cancelled",
    "killed": "cancelled",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """One job as the trace recorded it."""

    name: str
    submit_s: float
    """Submission, in seconds after the first one of the trace."""
    duration_s: float
    """Time for which it held its GPUs."""
    num_gpus: int
    end: End = "completed"
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The rows of a trace in order of submission, and what was left out."""

    name: str
    rows: tuple[TraceRow, ...]
    dropped: Mapping[str, int]
    """Number of rows left out, by reason."""


def read_trace(path: str | Path) -> Trace:
    """Reads a trace; unpacks `.gz` and recognises the format by its header.

    Jobs without GPUs or without a duration are left out and counted.

    Raises:
        ValueError: if the file is missing, holds no usable job, or a row that cannot be read.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise must("--trace", "be a readable text file", str(path), told) from error
    records = _philly_json(text, path) if text.lstrip()[:1] == "[" else _csv(text, path)
    rows, dropped = [], Counter[str]()
    for place, record in enumerate(records):
        row = _row(record, place, path)
        if isinstance(row, str):
            dropped[row] += 1
        else:
            rows.append(row)
    if not rows:
        raise must("--trace", "hold at least one job with GPUs and a duration", str(path))
    name = path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".json")
    rows.sort(key=lambda row: row.submit_s)
    return Trace(name=name, rows=_from_zero(rows), dropped=dict(sorted(dropped.items())))


def _from_zero(rows: Sequence[TraceRow]) -> tuple[TraceRow, ...]:
    return tuple(replace(row, submit_s=row.submit_s - rows[0].submit_s) for row in rows)


_Value = str | int | float | None
_Record = dict[str, _Value]
"""One job of a trace as it stands in the file, by the names of `_COLUMNS`."""


def _csv(text: str, path: Path) -> Iterator[_Record]:
    reader = csv.DictReader(io.StringIO(text))
    header = reader.fieldnames or ()
    columns = {}
    for key, names in _COLUMNS.items():
        found = next((name for name in names if name in header), None)
        if found is not None:
            columns[key] = found
        elif key in _REQUIRED:
            wanted = " or ".join(names)
            raise must(f"--trace {path}", f"have a column {wanted}", ", ".join(header) or None)
    for line in reader:
        yield {key: line[name] for key, name in columns.items()}


def _philly_json(text: str, path: Path) -> Iterator[_Record]:
    """Reads Philly's `cluster_job_log`; adds up attempts, takes the GPUs of the first one."""
    try:
        jobs = json.loads(text)
        for job in jobs:
            attempts = [
                a
                for a in job["attempts"]
                if not {a.get("start_time"), a.get("end_time")} & {None, "", "None"}
            ]
            spans = [_seconds(a["end_time"]) - _seconds(a["start_time"]) for a in attempts]
            gpus = [len(d["gpus"]) for a in attempts[:1] for d in a["detail"]]
            yield {
                "name": job["jobid"],
                "submit_s": job["submitted_time"],
                "duration_s": sum(spans),
                "num_gpus": sum(gpus),
                "end": job.get("status", ""),
                "tenant": job.get("vc", ""),
            }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise must("--trace", "be Philly's job log", f"{error!r} in {path}") from error


def _row(record: _Record, place: int, path: Path) -> TraceRow | str:
    """The row of a job, or the reason why it is left out."""
    try:
        num_gpus = _number(record["num_gpus"])
        duration_s = _number(record["duration_s"])
        priority = _number(record.get("priority") or 0)
        if not num_gpus > 0:
            return "no GPUs"
        if not duration_s > 0:
            return "no duration"
        submit_s = _seconds(record["submit_s"])
    except ValueError as error:
        raise must(f"row {place + 1} of {path}", "hold numbers", str(error)) from error
    return TraceRow(
        name=str(record.get("name") or place),
        submit_s=submit_s,
        duration_s=duration_s,
        num_gpus=round(num_gpus),
        end=_ENDS.get(str(record.get("end") or "").strip().lower(), "completed"),
        tenant=str(record.get("tenant") or ""),
        priority=round(priority),
    )


def _number(value: _Value) -> float:
    """A finite number; an empty value is 0."""
    if value is None or value == "":
        return 0.0
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r}")
    return number


def _seconds(value: _Value) -> float:
    """Seconds, given as a number or as a date (UTC if it has no zone)."""
    try:
        return _number(value)
    except ValueError:
        date = datetime.fromisoformat(str(value).strip())
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def offered_gpus(rows: Iterable[TraceRow]) -> float:
    """GPUs that the rows would keep busy on average between first and last submission."""
    rows = list(rows)
    work = math.fsum(row.num_gpus * row.duration_s for row in rows)
    span = max(row.submit_s for row in rows) - min(row.submit_s for row in rows)
    return work / span if span else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceShape:
    """Changes made to a trace before it is replayed, in this order."""

    only_completed: bool = False
    """Leave out jobs that failed or were cancelled in the trace. Otherwise their end is ignored:
    they held their GPUs as long as the trace says."""
    sample: float = 1.0
    """Share of the jobs to keep, drawn from the seed."""
    gpu_divisor: float = 1.0
    """Divisor of each job's GPUs; the result is rounded and at least 1."""
    oversize: Literal["skip", "clamp"] = "skip"
    """Jobs that ask for more GPUs than the cluster has: left out, or given all GPUs."""
    most_jobs: int | None = None
    """Number of jobs to keep, the first ones."""
    load: float | None = None
    """Offered load: arrivals are stretched or squeezed until the jobs, each alone, ask for so many
    times the GPU time that there is between the first and the last submission. None: as recorded.
    """

    def __post_init__(self) -> None:
        is_load = self.load is None or 0 < self.load < math.inf
        rules = (
            ("sample", "be in (0, 1]", self.sample, 0 < self.sample <= 1),
            ("gpu_divisor", "be at least 1", self.gpu_divisor, self.gpu_divisor >= 1),
            ("load", "be positive and finite", self.load, is_load),
            ("jobs", "be at least 1", self.most_jobs, self.most_jobs is None or self.most_jobs > 0),
        )
        for name, obligation, value, holds in rules:
            if not holds:
                raise must(f"--{name.replace('_', '-')}", obligation, value)


def shaped(trace: Trace, shape: TraceShape, num_gpus: int, seed: int) -> Trace:
    """Shapes a trace for `num_gpus` GPUs; refuses one without jobs, or a load for a burst."""
    rng = Random(f"sample {seed}")
    dropped = Counter(trace.dropped)
    rows: list[TraceRow] = []
    for row in trace.rows:
        if shape.only_completed and row.end != "completed":
            dropped[f"{row.end} in the trace"] += 1
            continue
        if shape.sample < 1 and rng.random() >= shape.sample:
            dropped["not sampled"] += 1
            continue
        asked = max(1, round(row.num_gpus / shape.gpu_divisor))
        if asked > num_gpus and shape.oversize == "skip":
            dropped["more GPUs than the cluster has"] += 1
            continue
        rows.append(replace(row, num_gpus=min(asked, num_gpus)))
    kept = _from_zero(rows[: shape.most_jobs])
    if len(kept) < len(rows):
        dropped["after the first so many"] += len(rows) - len(kept)
    if not kept:
        raise ConfigError(
            f"--trace must keep at least one job, got none of {len(trace.rows)}; --sample, "
            "--only-completed, --oversize and --jobs leave jobs out"
        )
    if shape.load is not None:
        recorded = offered_gpus(kept) / num_gpus
        if recorded == math.inf:
            raise must("--load", "be left out where all jobs come at once", shape.load)
        faster = shape.load / recorded
        kept = tuple(replace(row, submit_s=row.submit_s / faster) for row in kept)
    return Trace(name=trace.name, rows=kept, dropped=dict(sorted(dropped.items())))
