#!/usr/bin/env python3
"""Draws and tabulates a simulation sweep: each policy over `isolated` of the same cell.

python scripts/bench/plot_simulation.py loads       # results/simulation_loads.png and a table
python scripts/bench/plot_simulation.py ablations   # a table
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
COLORS = {
    "isolated": "#7a7a7a",
    "isolated_sjf": "#3fa0dc",
    "mlora": "#d98200",
    "tlora": "#009e73",
    "tlora_best": "#b8559a",
}
METRICS = {
    "mean_jct_s": "mean JCT: isolated / policy",
    "throughput_tokens_per_s": "tokens/s: policy / isolated",
    "gpu_utilisation": "utilisation: policy / isolated",
}
Row = dict[str, str]
Ratios = dict[tuple[str, str, float, str], dict[str, list[float]]]


def read(path: Path) -> list[Row]:
    """The rows of a sweep."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def ratios(rows: list[Row]) -> Ratios:
    """By source, variant, load and policy: each metric over `isolated`, a value a seed.

    Where a variant has no `isolated` of its own, that of the variant `base` is taken.
    """
    first = {
        (r["source"], r["variant"], r["target_load"], r["seed"]): r
        for r in rows
        if r["policy"] == "isolated"
    }
    found: Ratios = defaultdict(lambda: defaultdict(list))
    for r in rows:
        place = (r["target_load"], r["seed"])
        base = first.get((r["source"], r["variant"], *place)) or first.get(
            (r["source"], "base", *place)
        )
        if base is None:
            continue
        cell = found[(r["source"], r["variant"], float(r["target_load"]), r["policy"])]
        for metric in METRICS:
            ratio = float(r[metric]) / float(base[metric])
            cell[metric].append(1 / ratio if metric.endswith("jct_s") else ratio)
    return found


def plot(found: Ratios, path: Path) -> None:
    """One column a trace, one row a metric; bands span the seeds."""
    sources = list(dict.fromkeys(source for source, *_ in found))
    metrics = list(METRICS)[:2]
    figure, grid = plt.subplots(
        len(metrics), len(sources), figsize=(3.4 * len(sources), 5.6), squeeze=False
    )
    for metric, line in zip(metrics, grid, strict=True):
        for source, axes in zip(sources, line, strict=True):
            _panel(axes, found, source, metric)
            axes.set_title(source if metric == metrics[0] else "", fontsize=10)
        line[0].set_ylabel(METRICS[metric], fontsize=9)
    grid[0][0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, found: Ratios, source: str, metric: str) -> None:
    for policy, color in COLORS.items():
        cells = sorted(
            (load, cell[metric])
            for (name, _, load, other), cell in found.items()
            if (name, other) == (source, policy)
        )
        loads = [load for load, _ in cells]
        axes.plot(
            loads,
            [statistics.median(values) for _, values in cells],
            color=color,
            marker="o",
            markersize=3,
            linewidth=1.3,
            label=policy,
        )
        low, high = ([pick(values) for _, values in cells] for pick in (min, max))
        axes.fill_between(loads, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 3, 5], ["0.5", "1", "2", "3", "5"])
    axes.minorticks_off()
    if metric.endswith("jct_s"):
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
        axes.minorticks_off()
    axes.grid(color="#e3e7ec", linewidth=0.6)
    axes.set_xlabel("load", fontsize=8)


def table(found: Ratios) -> str:
    """Markdown: median over seeds, smallest and largest where there are several."""
    lines = ["| trace | variant | load | policy | JCT | tokens/s | utilisation | seeds |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (source, variant, load, policy), cell in found.items():
        if policy != "isolated":
            cells = " | ".join(_spread(cell[metric]) for metric in METRICS)
            seeds = len(cell["mean_jct_s"])
            lines.append(f"| {source} | {variant} | {load:g} | {policy} | {cells} | {seeds} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}-{max(values):.2f})"


def main() -> int:
    """Draws and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("loads", "ablations", "mixes"))
    part = parser.parse_args().part
    found = ratios(read(RESULTS / f"simulation_{part}.csv"))
    if part == "loads":
        plot(found, RESULTS / "simulation_loads.png")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
