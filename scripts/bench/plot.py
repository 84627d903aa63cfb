"""Draws the pictures of measured rows.

    python -m scripts.bench.plot linear       # results/lora_linear.png
    python -m scripts.bench.plot planner      # results/plan_vs_measured.png
    python -m scripts.bench.plot loads        # results/simulation_loads.png

`--csv` and `--out` name other files.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from scripts.bench.harness.arguments import RESULTS
from scripts.bench.linear.results import geometric_mean
from scripts.bench.linear.results import read_csv as read_linear
from scripts.bench.planner.results import Row as PlanRow
from scripts.bench.planner.results import read_csv as read_plans

# The multi-adapter linear: ratio to the frozen linear against the number of adapters.

FIRST = ("tlora", "tlora_cuda", "tlora_triton", "tlora_torch")
"""The package's own: drawn thick."""
CEILING = 2.5
"""The axis ends here at most: what is slower leaves the panel rather than flatten the rest."""
Curves = dict[str, list[tuple[int, float]]]
"""By provider: number of adapters and mean ratio, ascending."""


def linear_curves(rows: Sequence[dict[str, Any]], tokens: int, dropout: float) -> Curves:
    """Geometric means over the shapes that every curve has at all its points.

    So no curve looks better for the shapes it lacks. Later rows of a cell win.
    """
    inside = [r for r in rows if r["tokens"] == tokens and r["dropout"] == dropout]
    by_point: dict[tuple[str, int], dict[str, float]] = {}
    for row in inside:
        by_point.setdefault((row["provider"], row["adapters"]), {})[row["shape"]] = row["ratio"]
    shapes = set.intersection(*(set(ratios) for ratios in by_point.values()))
    found: Curves = {}
    for (provider, adapters), ratios in sorted(by_point.items()):
        if shapes and provider != "frozen":
            mean = geometric_mean([ratios[s] for s in shapes])
            found.setdefault(provider, []).append((adapters, mean))
    return found


def plot_linear(rows: Sequence[dict[str, Any]], dropout: float, path: Path) -> None:
    """Writes the picture, a panel a token count."""
    token_counts = sorted({r["tokens"] for r in rows if r["dropout"] == dropout})
    if not token_counts:
        raise ValueError(f"dropout must be one of the CSV's, got {dropout}")
    width = 1 + 3.6 * len(token_counts)
    figure, axes = plt.subplots(
        1, len(token_counts), figsize=(width, 3.8), sharey=True, squeeze=False
    )
    order = sorted({r["provider"] for r in rows} - {"frozen"}, key=lambda p: (p not in FIRST, p))
    panels = [linear_curves(rows, tokens, dropout) for tokens in token_counts]
    for panel, found, tokens in zip(axes[0], panels, token_counts, strict=True):
        _linear_panel(panel, found, order, f"{tokens:,} tokens")
    axes[0][0].set_ylim(0.97, _top(panels))
    axes[0][0].set_ylabel("forward + backward / frozen linear")
    handles, labels = _legend(axes[0])
    columns = min(len(labels), 2 * len(token_counts) + 1)
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False)
    gpus = ", ".join(sorted({r["gpu"] for r in rows}))
    figure.suptitle(f"Multi-adapter LoRA linear, bf16, dropout {dropout:g}, {gpus}", fontsize=11)
    figure.tight_layout(rect=(0, 0.08 if len(token_counts) > 2 else 0.2, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _linear_panel(axes: Axes, found: Curves, order: Sequence[str], title: str) -> None:
    for index, provider in enumerate(order):
        if provider not in found:
            continue
        width = 2.4 if provider in FIRST else 1.3
        points = tuple(zip(*found[provider], strict=True))
        axes.plot(*points, marker="o", color=f"C{index}", label=provider, linewidth=width)
    axes.axhline(1.0, color="0.5", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    counts = sorted({count for points in found.values() for count, _ in points})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("adapters")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)


def _top(panels: Sequence[Curves]) -> float:
    """Upper end of the ratio's axis: the highest point, or what the thick curves need."""
    points = [(p, ratio) for found in panels for p in found for _, ratio in found[p]]
    highest = max((ratio for _, ratio in points), default=1.0)
    needed = max((ratio for p, ratio in points if p in FIRST), default=highest)
    return 1.03 * min(highest, max(CEILING, needed))


def _legend(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


# The planner: predicted against measured.


class _Point(NamedTuple):
    measured: float
    predicted: float
    row: PlanRow


def plot_planner(rows: Sequence[PlanRow], path: Path) -> None:
    """Predicted against measured step time and peak memory."""
    figure, (times, memory) = plt.subplots(1, 2, figsize=(11, 5))
    _planner_panel(times, "step time, s", [_Point(r.measured_s, r.predicted_s, r) for r in rows])
    peaks = [
        _Point(r.measured_bytes / 2**30, r.predicted_bytes / 2**30, r)
        for r in rows
        if r.measured_bytes
    ]
    _planner_panel(memory, "peak memory, GiB", peaks)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _planner_panel(axes: Axes, title: str, points: Sequence[_Point], band: float = 0.1) -> None:
    for gpus in sorted({point.row.gpus for point in points}):
        for model, marker in (("8b", "o"), ("70b", "s"), ("tiny", "^")):
            own = [p for p in points if p.row.gpus == gpus and p.row.model.endswith(model)]
            if own:
                xs, ys = [p.measured for p in own], [p.predicted for p in own]
                axes.scatter(xs, ys, marker=marker, label=f"{gpus} GPU, {model}", alpha=0.8)
    if points:
        ends = [min(p.measured for p in points) * 0.8, max(p.measured for p in points) * 1.2]
        axes.plot(ends, ends, color="grey", linewidth=1)
        low, high = ([e * (1 + s * band) for e in ends] for s in (-1, 1))
        axes.fill_between(ends, low, high, color="grey", alpha=0.15, label=f"within {band:.0%}")
        axes.set(xscale="log", yscale="log")
        for side in (axes.xaxis, axes.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter(StrMethodFormatter("{x:g}"))
            side.set_minor_formatter(NullFormatter())
    axes.set(title=title, xlabel="measured", ylabel="predicted")
    axes.legend(fontsize=8)


# The simulator: each policy over `isolated` of the same cell.

COLORS = {
    "isolated": "#7a7a7a",
    "isolated_sjf": "#3fa0dc",
    "mlora": "#d98200",
    "tlora": "#009e73",
    "sjf_rightsize": "#c9b400",
    "tlora_best": "#b8559a",
    "tlora_elastic": "#c0392b",
}
YARDSTICKS = {"least_jct_s": "no policy beats"}
METRICS = {
    "mean_jct_s": "mean JCT: isolated / policy",
    "throughput_tokens_per_s": "tokens/s: policy / isolated",
}
Ratios = dict[tuple[str, float, str], dict[str, list[float]]]
"""By source, load and policy: each metric over `isolated`, a value a seed."""


def simulation_ratios(rows: Sequence[Mapping[str, str]]) -> Ratios:
    """Every row over `isolated` of the same trace, load and seed."""
    cells = ((r["source"], float(r["target_load"] or 0), r["seed"]) for r in rows)
    placed = list(zip(cells, rows, strict=True))
    first = {cell: r for cell, r in placed if r["policy"] == "isolated"}
    found: Ratios = defaultdict(lambda: defaultdict(list))
    for cell, r in placed:
        if cell not in first:
            continue
        source, load, _ = cell
        for metric in METRICS:
            ratio = float(r[metric]) / float(first[cell][metric])
            value = 1 / ratio if metric.endswith("jct_s") else ratio
            found[source, load, r["policy"]][metric].append(value)
        if r["policy"] == "isolated":
            for column, name in YARDSTICKS.items():
                ratio = float(r["mean_jct_s"]) / float(r[column])
                found[source, load, name]["mean_jct_s"].append(ratio)
    return found


def plot_loads(found: Ratios, path: Path) -> None:
    """One column a trace, one row a metric; bands span the seeds."""
    sources = list(dict.fromkeys(source for source, *_ in found))
    metrics = list(METRICS)
    figure, grid = plt.subplots(
        len(metrics), len(sources), figsize=(3.4 * len(sources), 5.6), squeeze=False
    )
    for metric, line in zip(metrics, grid, strict=True):
        for source, axes in zip(sources, line, strict=True):
            _load_panel(axes, found, source, metric)
            axes.set_title(source if metric == metrics[0] else "", fontsize=10)
        line[0].set_ylabel(METRICS[metric], fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


_LINE = {"marker": "o", "markersize": 3, "linewidth": 1.3}


def _load_panel(axes: Axes, found: Ratios, source: str, metric: str) -> None:
    for policy, color in {**COLORS, **dict.fromkeys(YARDSTICKS.values(), "#222222")}.items():
        cells = sorted(
            (load, cell[metric])
            for (name, load, other), cell in found.items()
            if (name, other) == (source, policy) and metric in cell
        )
        loads = [load for load, _ in cells]
        middle = [statistics.median(values) for _, values in cells]
        if policy in COLORS:
            axes.plot(loads, middle, color=color, label=policy, **_LINE)
            low, high = ([pick(values) for _, values in cells] for pick in (min, max))
            axes.fill_between(loads, low, high, color=color, alpha=0.15, linewidth=0)
        elif cells:
            dashes = ":" if policy == YARDSTICKS["least_jct_s"] else "--"
            axes.plot(loads, middle, color=color, label=policy, linestyle=dashes, linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 3, 5], ["0.5", "1", "2", "3", "5"])
    axes.minorticks_off()
    if metric.endswith("jct_s"):
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
        axes.minorticks_off()
    axes.grid(color="#e3e7ec", linewidth=0.6)
    axes.set_xlabel("load", fontsize=8)


# The command line.


def _simulation(csv_path: Path, out: Path, dropout: float) -> None:
    with csv_path.open(newline="") as file:
        plot_loads(simulation_ratios(list(csv.DictReader(file))), out)


_PARTS: dict[str, tuple[str, Callable[[Path, Path, float], None]]] = {
    "linear": ("lora_linear", lambda rows, out, p: plot_linear(read_linear([rows]), p, out)),
    "planner": ("plan_vs_measured", lambda rows, out, p: plot_planner(read_plans(rows), out)),
    "loads": ("simulation_loads", _simulation),
}
"""The stem of the CSV and of the picture, and what draws it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=_PARTS)
    parser.add_argument("--csv", type=Path, help="rows; those in results/ by default")
    parser.add_argument("--out", type=Path, help="picture; beside the rows by default")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the linear's rows")
    args = parser.parse_args(argv)
    stem, draw = _PARTS[args.what]
    csv_path = args.csv or RESULTS / f"{stem}.csv"
    draw(csv_path, args.out or csv_path.with_suffix(".png"), args.dropout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
