"""The picture of losses over an FP8 base beside those over the base as it is."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

_LEAST_LOSS = 1e-4
"""Losses below are drawn here: they would stretch the logarithmic axis."""


def plot_curves(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """A panel a task: the mean over seeds of each base, and the range of its seeds."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(0.6 + 2.7 * len(tasks), 3.3), squeeze=False
    )
    for axes, task in zip(panels[0], tasks, strict=True):
        _panel(axes, [row for row in rows if row["task"] == task])
        axes.set_title(task, fontsize=10)
    panels[0][0].set_ylabel("training loss")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axes: Axes, rows: Sequence[Mapping[str, str]]) -> None:
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        points[row["precision"]][int(row["step"])].append(max(_LEAST_LOSS, float(row["loss"])))
    for index, (precision, curve) in enumerate(points.items()):
        steps, color = sorted(curve), f"C{index}"
        means = [statistics.fmean(curve[step]) for step in steps]
        style = "--" if precision == "fp8" else "-"
        axes.plot(steps, means, style, color=color, label=precision, linewidth=1.5)
        low, high = ([pick(curve[step]) for step in steps] for pick in (min, max))
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
