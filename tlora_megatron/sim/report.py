"""Writes a study: its numbers as JSON and CSV, one HTML page with pictures, readable offline."""

from __future__ import annotations

import csv
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tlora_megatron.page import (
    GRID,
    MUTED,
    css_color,
    document,
    draw,
    facts,
    legend,
    paint_color,
    panels,
    swatch,
    table,
)
from tlora_megatron.sim.ledger import TimeLine, quantile, spread, time_line
from tlora_megatron.sim.study import PolicyRun, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SIZE, _LOW, _WIDE = (6.2, 2.8), (6.2, 2.4), (12.6, 2.8)
"""Sizes of drawings in inches."""
_HOUR_S = 3600.0
_ROWS, _COLUMNS = 128, 480
"""GPUs and time bins in the picture of the cluster; of more GPUs only some are shown."""


def completion_times(runs: Sequence[PolicyRun]) -> str:
    """Share of the finished jobs by completion time, a line per policy."""
    records = [run.ledger.records for run in runs]
    times = [sorted(r.jct_s for r in own if r.status == "finished") for own in records]
    return _shares("jct", "completion time, s", times, lambda axes: axes.set_xscale("log"))


def slowdowns(runs: Sequence[PolicyRun]) -> str:
    """Share of the finished jobs by slowdown while they ran, a line per policy."""
    records = [run.ledger.records for run in runs]
    values = [sorted(r.slowdown for r in own if r.slowdown is not None) for own in records]
    bounds = {record.job.max_slowdown for own in records for record in own}

    def mark(axes: Axes) -> None:
        for bound in sorted(bounds)[:3]:
            axes.axvline(bound, color=MUTED, linewidth=0.8, linestyle="--")

    return _shares("slowdown", "(end - start) / time alone; dashed: bound", values, mark)


def _shares(
    name: str, label: str, values: Iterable[list[float]], also: Callable[[Axes], None]
) -> str:
    """Draws cumulative shares of ascending values, about 400 points a line."""

    def paint(axes: Axes) -> None:
        for place, ordered in enumerate(values):
            step = max(1, len(ordered) // 400)
            points = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
            x = [max(ordered[i], 1e-3) for i in points]
            y = [(i + 1) / len(ordered) for i in points]
            axes.plot(x, y, color=paint_color(place), linewidth=1.3)
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        also(axes)
        axes.set_xlabel(label)
        axes.set_ylabel("share of jobs")

    return draw(_SIZE, name, paint, labels=True)


def over_time(runs: Sequence[PolicyRun], until_s: float) -> dict[str, str]:
    """Throughput, held GPUs and waiting jobs over time, by title."""
    lines = [time_line(run.ledger.records, run.ledger.segments, until_s) for run in runs]
    curves: Mapping[str, Callable[[TimeLine], Sequence[float]]] = {
        "Tokens per second, all GPUs": lambda line: line.tokens_per_s,
        "GPUs held": lambda line: line.busy_gpus,
        "Jobs waiting": lambda line: line.waiting,
    }
    return {title: _curve(title, lines, get) for title, get in curves.items()}


def _curve(
    title: str, lines: Sequence[TimeLine], get: Callable[[TimeLine], Sequence[float]]
) -> str:
    def paint(axes: Axes) -> None:
        for place, line in enumerate(lines):
            x = [(i + 0.5) * line.bin_s / _HOUR_S for i in range(len(get(line)))]
            axes.plot(x, get(line), color=paint_color(place), linewidth=1.1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("hours")

    return draw(_LOW, title, paint, labels=True)


def group_sizes(runs: Sequence[PolicyRun]) -> str:
    """Share of the held GPU time by the number of jobs in a group, a bar per policy."""
    labels = ("1", "2", "3-4", "5-8", "9+")
    edges = (1, 2, 4, 8)

    def paint(axes: Axes) -> None:
        width = 0.8 / len(runs)
        for place, run in enumerate(runs):
            time_s = [0.0] * len(labels)
            for s in run.ledger.segments:
                size = sum(s.num_jobs > edge for edge in edges)
                time_s[size] += len(s.gpus) * (s.end_s - s.begin_s)
            total = sum(time_s) or 1.0
            x = [i + (place - (len(runs) - 1) / 2) * width for i in range(len(labels))]
            axes.bar(x, [t / total for t in time_s], width * 0.9, color=paint_color(place))
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlabel("jobs in the group")
        axes.set_ylabel("share of held GPU time")

    return draw(_LOW, "sizes", paint, labels=True)


def gpu_time_line(run: PolicyRun, num_gpus: int, until_s: float) -> str:
    """The mean number of jobs that each GPU trains over time; idle GPUs are left blank."""
    step = -(-num_gpus // _ROWS)
    rows: dict[int, list[float]] = {g: [0.0] * _COLUMNS for g in range(0, num_gpus, step)}
    for s in run.ledger.segments:
        for gpu in s.gpus:
            if gpu in rows:
                spread(rows[gpu], until_s / _COLUMNS, s.begin_s, s.end_s, s.num_jobs)

    def paint(axes: Axes) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        shades = LinearSegmentedColormap.from_list("jobs", _SHADES)
        extent = (0, until_s / _HOUR_S, num_gpus, 0)
        image = axes.imshow(
            list(rows.values()), aspect="auto", cmap=shades, vmin=0, vmax=8, extent=extent
        )
        bar = axes.figure.colorbar(image, ax=axes, pad=0.01, fraction=0.04, aspect=14)
        bar.set_label("jobs on the GPU", color=MUTED)
        bar.ax.tick_params(colors=MUTED, length=0)
        bar.outline.set_visible(False)
        axes.set_xlabel("hours")
        axes.set_ylabel("GPU")

    return draw(_WIDE, f"gpus {run.policy}", paint, labels=True)


_SHADES = (
    *((0.0, "#ffffff00"), (0.125, "#9ecae1"), (0.25, "#4292c6"), (0.5, "#f0a830")),
    *((1.0, "#c0392b"),),
)
"""Colours of 0, 1, 2, 4 and 8 jobs, as shares of 8."""


Row = dict[str, str | int | float | None]
"""One line of a CSV file, by column."""

_JOB_COLUMNS = (
    *("policy", "job", "tenant", "num_gpus", "submit_s", "start_s", "end_s", "status"),
    *("isolated_s", "jct_s", "slowdown", "max_slowdown"),
)


def as_document(study: Study, runs: Sequence[PolicyRun]) -> dict[str, object]:
    """The document that `tlora simulate --json` prints."""
    return {
        "trace": study.trace.name,
        "cluster": study.cluster.name,
        "load": study.load if math.isfinite(study.load) else None,
        "seed": study.options.seed,
        "policies": {
            run.policy: {**asdict(run.summary), **_paid(study, run), "wall_s": run.wall_s}
            for run in runs
        },
        "least_jct_s": study.least_jct_s,
    }


def summary_rows(study: Study, runs: Sequence[PolicyRun]) -> list[Row]:
    """One row per policy with all numbers of its summary; equal runs give equal rows."""
    about: Row = {
        "trace": study.trace.name,
        "cluster": study.cluster.name,
        "profile": study.profile.name,
        "mix": study.mix.name,
        "jobs": len(study.jobs),
        "load": round(study.load, 4),
        "offered_load": round(study.offered_load, 4),
        "seed": study.options.seed,
    }
    least: Row = {"least_jct_s": _plain(study.least_jct_s)}
    rows = []
    for run in runs:
        numbers = {name: _plain(value) for name, value in asdict(run.summary).items()}
        rows.append(about | {"policy": run.policy} | numbers | _paid(study, run) | least)
    return rows


def _paid(study: Study, run: PolicyRun) -> Row:
    """What the GPU-hours that groups held cost, and their energy; None where it is not known."""
    hours, options = run.summary.gpu_hours, study.options
    price, watts = options.gpu_hour_price, options.gpu_watts
    cost = None if price is None else round(price * hours, 2)
    return {"cost": cost, "energy_kwh": None if watts is None else round(watts * hours / 1e3, 3)}


def write_csv(path: str | Path, rows: Sequence[Row]) -> None:
    """Writes rows, all with the same columns, to a CSV file."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def job_rows(runs: Sequence[PolicyRun]) -> list[Row]:
    """One row per policy and job, in the order in which jobs ended."""
    rows = []
    for run in runs:
        for record in run.ledger.records:
            job = record.job
            values = (
                *(run.policy, job.name, job.tenant, job.num_gpus, job.submit_s, record.start_s),
                *(record.end_s, record.status, job.isolated_s, record.jct_s, record.slowdown),
                job.max_slowdown,
            )
            rows.append(dict(zip(_JOB_COLUMNS, map(_plain, values), strict=True)))
    return rows


def _plain(value: str | int | float | None) -> str | int | float | None:
    return round(value, 6) if isinstance(value, float) else value


_SHOWN = 0.99
"""Pictures over time end when this share of the first policy's jobs have ended."""


def write_report(path: str | Path, study: Study, runs: Sequence[PolicyRun]) -> None:
    """Writes the page of a study; an `ImportError` without matplotlib."""
    until_s = quantile(sorted(record.end_s for record in runs[0].ledger.records), _SHOWN)
    pictures = {
        "Completion time": completion_times(runs),
        "Slowdown while running": slowdowns(runs),
        **over_time(runs, until_s),
        "Group sizes": group_sizes(runs),
    }
    num_gpus = study.cluster.shape.num_gpus
    lines = {run.policy: gpu_time_line(run, num_gpus, until_s) for run in runs}
    colors = {run.policy: css_color(place) for place, run in enumerate(runs)}
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in study.trace.dropped.items())
    about = {
        "offered load": f"{study.offered_load:.2f}",
        "attributes": study.mix.name,
        "bound on slowdown": f"{study.jobs[0].max_slowdown:g}",
        "GPU profile": f"{study.profile.name} ({study.profile.source})",
        "seed": str(study.options.seed),
        **({"left out": left_out} if left_out else {}),
    }
    rows: list[tuple[str, ...]] = [
        (f"{swatch(colors[run.policy])}{html.escape(run.policy)}", *cells_of(study, run, runs[0]))
        for run in runs
    ]
    rows += bound_rows(study, runs[0])
    page = document(
        f"{study.trace.name} on {study.cluster.name}",
        f"{len(study.jobs):,} jobs; policies are compared with {runs[0].policy}",
        f"{facts(about)}<h2>Policies</h2>{table(('policy', *columns_of(study)), rows)}"
        f"<h2>Pictures</h2>{legend(colors)}{panels(pictures, columns=2, least_px=480)}"
        f"<h2>What the GPUs do</h2>{panels(lines, columns=1, least_px=480)}",
    )
    Path(path).write_text(page, encoding="utf-8")


COLUMNS = (
    *("mean JCT", "against first", "p50", "p95", "p99", "queueing", "tokens/s", "against first"),
    *("utilisation", "GPUs held", "slowdown max", "jobs a group", "finished", "makespan"),
)
"""Columns of the table here and on the terminal, after the policy's name."""


def columns_of(study: Study) -> tuple[str, ...]:
    """`COLUMNS`, and what is paid for where a price or a power is given."""
    options = study.options
    is_paid = options.gpu_hour_price is not None or options.gpu_watts is not None
    return (*COLUMNS, "GPU-hours", "cost", "kWh") if is_paid else COLUMNS


def cells_of(study: Study, run: PolicyRun, first: PolicyRun) -> tuple[str, ...]:
    """The cells of a policy's row; `first` is the policy that it is compared with."""
    s, base = run.summary, first.summary
    paid = ("-" if value is None else f"{value:,.0f}" for value in _paid(study, run).values())
    return (
        _hours(s.mean_jct_s),
        _times(base.mean_jct_s, s.mean_jct_s),
        _hours(s.p50_jct_s),
        _hours(s.p95_jct_s),
        _hours(s.p99_jct_s),
        _hours(s.mean_queueing_s),
        f"{s.throughput_tokens_per_s:,.0f}",
        _times(s.throughput_tokens_per_s, base.throughput_tokens_per_s),
        f"{s.gpu_utilisation:.1%}",
        f"{s.gpu_allocation:.1%}",
        f"{s.max_slowdown:.2f}",
        f"{s.mean_group_size:.2f}",
        f"{s.jobs_finished:,}",
        _hours(s.makespan_s),
        *((f"{s.gpu_hours:,.1f}", *paid) if len(columns_of(study)) > len(COLUMNS) else ()),
    )


def bound_rows(study: Study, first: PolicyRun) -> list[tuple[str, ...]]:
    """The row below those of the policies, of a mean completion time only; none with faults."""
    least_s = study.least_jct_s
    if least_s is None:
        return []
    rest = ("",) * (len(columns_of(study)) - 2)
    return [("no policy beats", _hours(least_s), _times(first.summary.mean_jct_s, least_s), *rest)]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 360 else f"{seconds:,.0f} s"


def _times(value: float, by: float) -> str:
    return f"{value / by:.2f}x" if by else "-"
