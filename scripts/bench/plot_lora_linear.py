#!/usr/bin/env python3
"""Draws the ratio to the frozen linear against the number of adapters, a panel a token count.

    python scripts/bench/plot_lora_linear.py scripts/bench/results/lora_linear.csv

A point is the geometric mean over the shapes that every curve of the panel has at all its points,
so that none looks better for the shapes it lacks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from linear_results import geometric_mean, read_csv

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
FIRST = ("tlora", "tlora_cuda", "tlora_triton", "tlora_torch")
"""The package's own: drawn thick."""
CEILING = 2.5
"""The axis ends here at most: what is slower leaves the panel rather than flatten the rest."""


def curves(
    rows: Sequence[dict[str, Any]], tokens: int, dropout: float
) -> dict[str, list[tuple[int, float]]]:
    """By provider: number of adapters and mean ratio, ascending; later rows of a cell win."""
    inside = [r for r in rows if r["tokens"] == tokens and r["dropout"] == dropout]
    by_point: dict[tuple[str, int], dict[str, float]] = {}
    for row in inside:
        by_point.setdefault((row["provider"], row["adapters"]), {})[row["shape"]] = row["ratio"]
    shapes = set.intersection(*(set(ratios) for ratios in by_point.values()))
    found: dict[str, list[tuple[int, float]]] = {}
    for (provider, adapters), ratios in sorted(by_point.items()):
        if shapes and provider != "frozen":
            mean = geometric_mean([ratios[s] for s in shapes])
            found.setdefault(provider, []).append((adapters, mean))
    return found


def plot(rows: Sequence[dict[str, Any]], dropout: float, path: Path) -> None:
    """Writes the picture.

    Raises:
        ValueError: if no row has this dropout.
    """
    token_counts = sorted({r["tokens"] for r in rows if r["dropout"] == dropout})
    if not token_counts:
        raise ValueError(f"dropout must be one of the CSV's, got {dropout}")
    width = 1 + 3.6 * len(token_counts)
    figure, axes = plt.subplots(
        1, len(token_counts), figsize=(width, 3.8), sharey=True, squeeze=False
    )
    order = sorted({r["provider"] for r in rows} - {"frozen"}, key=lambda p: (p not in FIRST, p))
    panels = [curves(rows, tokens, dropout) for tokens in token_counts]
    for panel, found, tokens in zip(axes[0], panels, token_counts, strict=True):
        _panel(panel, found, order, f"{tokens:,} tokens")
    axes[0][0].set_ylim(0.97, _top(panels))
    axes[0][0].set_ylabel("forward + backward / frozen linear")
    handles, labels = _legend(axes[0])
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=min(len(labels), 2 * len(token_counts) + 1),
        frameon=False,
    )
    gpus = ", ".join(sorted({r["gpu"] for r in rows}))
    figure.suptitle(f"Multi-adapter LoRA linear, bf16, dropout {dropout:g}, {gpus}", fontsize=11)
    figure.tight_layout(rect=(0, 0.08 if len(token_counts) > 2 else 0.2, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(
    axes: Axes, found: dict[str, list[tuple[int, float]]], order: Sequence[str], title: str
) -> None:
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


def _top(panels: Sequence[dict[str, list[tuple[int, float]]]]) -> float:
    """Upper end of the ratio's axis: the highest point, or what the thick curves need."""
    points = [(p, ratio) for found in panels for p in found for _, ratio in found[p]]
    highest = max((ratio for _, ratio in points), default=1.0)
    needed = max((ratio for p, ratio in points if p in FIRST), default=highest)
    return 1.03 * min(highest, max(CEILING, needed))


def _legend(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """One entry a provider over all panels."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws one picture from the CSVs named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "lora_linear.png")
    args = parser.parse_args(argv)
    plot(read_csv(args.csv), args.dropout, args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
