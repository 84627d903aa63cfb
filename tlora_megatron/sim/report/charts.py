"""Draws the pictures of a study; a policy has the same colour in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tlora_megatron.page.svg import GRID, MUTED, draw, paint_color
from tlora_megatron.sim.metrics import TimeLine, spread, time_line
from tlora_megatron.sim.study import PolicyRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE, _LOW, _WIDE = (6.2, 2.8), (6.2, 2.4), (12.6, 2.8)
"""Sizes of drawings in inches."""
_HOUR_S = 3600.0
_ROWS, _COLUMNS = 128, 480
"""GPUs and time bins in the picture of the cluster; of more GPUs only some are shown."""


def completion_times(runs: Sequence[PolicyRun]) -> str:
    """Share of the finished jobs by completion time, a line per policy."""
    finished = [
        sorted(r.jct_s for r in run.ledger.records if r.status == "finished") for run in runs
    ]

    def paint(axes: Axes) -> None:
        _shares(axes, finished)
        axes.set_xscale("log")
        axes.set_xlabel("completion time, s")
        axes.set_ylabel("share of jobs")

    return draw(_SIZE, "jct", paint, labels=True)


def slowdowns(runs: Sequence[PolicyRun]) -> str:
    """Share of the finished jobs by slowdown while they ran, a line per policy."""
    values = [
        sorted(r.slowdown for r in run.ledger.records if r.slowdown is not None) for run in runs
    ]
    bounds = {record.job.max_slowdown for run in runs for record in run.ledger.records}

    def paint(axes: Axes) -> None:
        _shares(axes, values)
        for bound in sorted(bounds)[:3]:
            axes.axvline(bound, color=MUTED, linewidth=0.8, linestyle="--")
        axes.set_xlabel("(end - start) / time alone; dashed: bound")
        axes.set_ylabel("share of jobs")

    return draw(_SIZE, "slowdown", paint, labels=True)


def _shares(axes: Axes, values: Iterable[list[float]]) -> None:
    """Plots cumulative shares of ascending values, about 400 points a line."""
    for place, ordered in enumerate(values):
        step = max(1, len(ordered) // 400)
        points = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
        x = [max(ordered[i], 1e-3) for i in points]
        y = [(i + 1) / len(ordered) for i in points]
        axes.plot(x, y, color=paint_color(place), linewidth=1.3)
    axes.grid(axis="x", color=GRID, linewidth=0.6)


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
