"""Rows of the layer benchmark: their CSV file, geometric means and a table."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.harness.rows import append_rows

Row = dict[str, Any]
"""One provider in one cell; `ratio` is forward and backward over those of the frozen linear,
`rel_error` the worst of y, dx and every dA and dB."""
_TEXTS = ("gpu", "torch", "triton", "commit", "shape", "provider")
_COUNTS = ("tokens", "adapters")
NOT_IN_CSV = ("spread", "frozen_spread")
"""The larger interquartile range over the median, of forward and backward."""


def cell_of(row: Row) -> str:
    return (
        f"{row['shape']} {row['tokens']} x{row['adapters']} p={row['dropout']:g} {row['provider']}"
    )


def append_csv(path: Path, row: Row) -> None:
    kept = {name: value for name, value in row.items() if name not in NOT_IN_CSV}
    shown = {n: f"{v:.5g}" if isinstance(v, float) else v for n, v in kept.items()}
    append_rows(path, [shown])


def read_csv(paths: Iterable[Path]) -> list[Row]:
    kinds = dict.fromkeys(_TEXTS, str) | dict.fromkeys(_COUNTS, int)
    rows = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                rows.append({name: kinds.get(name, float)(value) for name, value in line.items()})
    return rows


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: Sequence[Row]) -> list[Row]:
    """Geometric means over shapes, one entry a (provider, dropout, tokens, adapters)."""
    keys = ("provider", "dropout", "tokens", "adapters")

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[k] for k in keys)

    found = []
    for group, members in itertools.groupby(sorted(rows, key=key), key=key):
        ratios = {m["shape"]: m["ratio"] for m in members}
        mean = geometric_mean(list(ratios.values()))
        found.append({**dict(zip(keys, group, strict=True)), "ratio": mean, "shapes": len(ratios)})
    return found


def summary_table(entries: Sequence[Row]) -> str:
    """The summary as text: a line a (tokens, dropout, provider), a column a number of adapters.

    A star marks a mean over fewer shapes than the fullest one.
    """
    if not entries:
        return "nothing measured"
    adapters = sorted({e["adapters"] for e in entries})
    fullest = max(e["shapes"] for e in entries)
    lines = [f"{'tokens':>7} {'p':>4} {'provider':14}" + "".join(f"{f'x{n}':>9}" for n in adapters)]

    def line_of(entry: Row) -> tuple[Any, ...]:
        return entry["tokens"], entry["dropout"], entry["provider"]

    for (tokens, p, provider), group in itertools.groupby(sorted(entries, key=line_of), line_of):
        cells = dict.fromkeys(adapters, "-")
        for e in group:
            cells[e["adapters"]] = f"{e['ratio']:.3f}" + "*" * (e["shapes"] < fullest)
        line = "".join(f"{c:>9}" for c in cells.values())
        lines.append(f"{tokens:>7} {p:>4g} {provider:14}{line}")
    return "\n".join(lines)
