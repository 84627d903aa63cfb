"""Pictures of a study: matplotlib's SVG, cut down to what a page needs.

Colours of text and grid are CSS variables, so that one drawing serves light and dark mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

from tlora_megatron.sim.metrics import TimeLine, spread, time_line
from tlora_megatron.sim.study import PolicyRun

COLORS = ("#7a7a7a", "#3fa0dc", "#d98200", "#009e73", "#b8559a", "#6a4fb3", "#c8500a")
_MUTED, _GRID = "#0000a1", "#0000a2"
_VARIABLES = {_MUTED: "var(--muted)", _GRID: "var(--grid)"}
_HOUR_S = 3600.0
_ROWS, _COLUMNS = 128, 480
"""GPUs and bins of the picture of the cluster; more GPUs are thinned out."""


def draw(size: tuple[float, float], salt: str, paint: Callable[[Any], None]) -> str:
    """An inline SVG of `size` inches; `salt` keeps its ids apart from those of other drawings.

    Raises:
        ImportError: if matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the report needs matplotlib; pip install matplotlib") from error
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 8}):
        figure = Figure(figsize=size)
        left, bottom = 0.6 / size[0], 0.42 / size[1]
        axes = figure.add_axes((left, bottom, 0.98 - left, 0.96 - bottom))
        paint(axes)
        axes.tick_params(length=0, colors=_MUTED, which="both")
        axes.xaxis.label.set_color(_MUTED)
        axes.yaxis.label.set_color(_MUTED)
        axes.spines[:].set_visible(False)
        buffer = StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r"font: [^;\"]*;?|font-family: [^;\"]*;?", "font-size: 8px;", svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    return svg


def completion_times(runs: Sequence[PolicyRun]) -> str:
    """Share of the finished jobs that took at most so long, a line a policy."""
    finished = {
        run.policy: sorted(r.jct_s for r in run.ledger.records if r.status == "finished")
        for run in runs
    }

    def paint(axes: Any) -> None:
        _shares(axes, finished)
        axes.set_xscale("log")
        axes.set_xlabel("completion time, s")
        axes.set_ylabel("share of jobs")

    return draw((6.2, 2.8), "jct", paint)


def slowdowns(runs: Sequence[PolicyRun]) -> str:
    """Share of the finished jobs with at most so much slowdown while they ran."""
    values = {
        run.policy: sorted(r.slowdown for r in run.ledger.records if r.slowdown is not None)
        for run in runs
    }
    bounds = {record.job.max_slowdown for run in runs for record in run.ledger.records}

    def paint(axes: Any) -> None:
        _shares(axes, values)
        for bound in sorted(bounds)[:3]:
            axes.axvline(bound, color=_MUTED, linewidth=0.8, linestyle="--")
        axes.set_xlabel("(end - start) / time alone; dashed: bound")
        axes.set_ylabel("share of jobs")

    return draw((6.2, 2.8), "slowdown", paint)


def _shares(axes: Any, values: dict[str, list[float]]) -> None:
    for place, ordered in enumerate(values.values()):
        step = max(1, len(ordered) // 400)
        points = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
        x = [max(ordered[i], 1e-3) for i in points]
        y = [(i + 1) / len(ordered) for i in points]
        axes.plot(x, y, color=COLORS[place % len(COLORS)], linewidth=1.3)
    axes.grid(color=_GRID, linewidth=0.6)


def over_time(runs: Sequence[PolicyRun], until_s: float) -> dict[str, str]:
    """Throughput, held GPUs and waiting jobs over time, by title."""
    lines = {
        run.policy: time_line(run.ledger.records, run.ledger.segments, until_s) for run in runs
    }
    curves: dict[str, Callable[[TimeLine], Sequence[float]]] = {
        "Tokens per second, all GPUs": lambda line: line.tokens_per_s,
        "GPUs held": lambda line: line.busy_gpus,
        "Jobs waiting": lambda line: line.waiting,
    }
    return {title: _curve(title, lines, get) for title, get in curves.items()}


def _curve(
    title: str, lines: dict[str, TimeLine], get: Callable[[TimeLine], Sequence[float]]
) -> str:
    def paint(axes: Any) -> None:
        for place, line in enumerate(lines.values()):
            x = [(i + 0.5) * line.bin_s / _HOUR_S for i in range(len(get(line)))]
            axes.plot(x, get(line), color=COLORS[place % len(COLORS)], linewidth=1.1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("hours")
        axes.grid(color=_GRID, linewidth=0.6)

    return draw((6.2, 2.4), title, paint)


def group_sizes(runs: Sequence[PolicyRun]) -> str:
    """Share of the held GPU time by the number of jobs its group trains."""
    labels = ("1", "2", "3-4", "5-8", "9+")
    edges = (1, 2, 4, 8)

    def paint(axes: Any) -> None:
        width = 0.8 / len(runs)
        for place, run in enumerate(runs):
            time_s = [0.0] * len(labels)
            for s in run.ledger.segments:
                size = sum(s.num_jobs > edge for edge in edges)
                time_s[size] += len(s.gpus) * (s.end_s - s.begin_s)
            total = sum(time_s) or 1.0
            x = [i + (place - (len(runs) - 1) / 2) * width for i in range(len(labels))]
            color = COLORS[place % len(COLORS)]
            axes.bar(x, [t / total for t in time_s], width * 0.9, color=color)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlabel("jobs in the group")
        axes.set_ylabel("share of held GPU time")
        axes.grid(axis="y", color=_GRID, linewidth=0.6)

    return draw((6.2, 2.8), "sizes", paint)


def gpu_time_line(run: PolicyRun, num_gpus: int, until_s: float) -> str:
    """What each GPU does over time: the mean number of jobs it trains; white is idle."""
    step = -(-num_gpus // _ROWS)
    rows: dict[int, list[float]] = {g: [0.0] * _COLUMNS for g in range(0, num_gpus, step)}
    for s in run.ledger.segments:
        for gpu in s.gpus:
            if gpu in rows:
                spread(rows[gpu], until_s / _COLUMNS, s.begin_s, s.end_s, s.num_jobs)

    def paint(axes: Any) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        colors = ("#ffffff00", "#9ecae1", "#4292c6", "#f0a830", "#c0392b")
        shades = LinearSegmentedColormap.from_list("jobs", list(zip(_STOPS, colors, strict=True)))
        extent = (0, until_s / _HOUR_S, num_gpus, 0)
        image = axes.imshow(
            list(rows.values()), aspect="auto", cmap=shades, vmin=0, vmax=8, extent=extent
        )
        bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=12)
        bar.set_label("jobs on the GPU", color=_MUTED)
        bar.ax.tick_params(colors=_MUTED, length=0)
        bar.outline.set_visible(False)
        axes.set_xlabel("hours")
        axes.set_ylabel("GPU")

    return draw((12.4, 2.8), f"gpus {run.policy}", paint)


_STOPS = (0.0, 0.125, 0.25, 0.5, 1.0)
"""Of the colours of 0, 1, 2, 4 and 8 jobs."""
