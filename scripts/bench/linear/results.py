"""Rows of the layer benchmark: their CSV file, geometric means and tables."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.harness.rows import append_rows

NOT_IN_CSV = ("spread", "frozen_spread")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One provider in one cell; the fields are the CSV's columns but for `NOT_IN_CSV`."""

    gpu: str
    torch: str
    triton: str
    commit: str
    shape: str
    tokens: int
    adapters: int
    dropout: float
    provider: str
    fwd_us: float
    bwd_us: float
    frozen_fwd_us: float
    frozen_bwd_us: float
    ratio: float
    """Forward and backward over those of the frozen linear."""
    rel_error: float
    """The worst of y, dx and every dA and dB."""
    spread: float
    """The larger interquartile range over the median, of forward and backward."""
    frozen_spread: float

    @property
    def cell(self) -> str:
        """The measured case in one line."""
        return f"{self.shape} {self.tokens} x{self.adapters} p={self.dropout:g} {self.provider}"


COLUMNS = tuple(f.name for f in dataclasses.fields(Row) if f.name not in NOT_IN_CSV)


def ratio(fwd_us: float, bwd_us: float, frozen_fwd_us: float, frozen_bwd_us: float) -> float:
    """Time of forward and backward over that of the frozen linear."""
    return (fwd_us + bwd_us) / (frozen_fwd_us + frozen_bwd_us)


def append_csv(path: Path, row: Row) -> None:
    """Adds one row to a CSV file, its header first if the file is new."""
    values = dataclasses.asdict(row)
    append_rows(path, [{name: _shown(values[name]) for name in COLUMNS}])


def _shown(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def read_csv(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Rows of CSV files with numbers as numbers."""
    types = {
        f.name: {"int": int, "float": float}.get(str(f.type), str) for f in dataclasses.fields(Row)
    }
    rows = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            rows += [{k: types[k](v) for k, v in line.items()} for line in csv.DictReader(file)]
    return rows


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means over shapes, one entry a (provider, tokens, dropout, adapters)."""
    keys = ("provider", "dropout", "tokens", "adapters")

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[k] for k in keys)

    found = []
    for group, members in itertools.groupby(sorted(rows, key=key), key=key):
        ratios = {m["shape"]: m["ratio"] for m in members}
        mean = geometric_mean(list(ratios.values()))
        found.append({**dict(zip(keys, group, strict=True)), "ratio": mean, "shapes": len(ratios)})
    return found


def summary_table(entries: Sequence[dict[str, Any]]) -> str:
    """The summary as text: a line a (tokens, dropout, provider), a column a number of adapters.

    A star marks a mean over fewer shapes than the fullest one.
    """
    if not entries:
        return "nothing measured"
    adapters = sorted({e["adapters"] for e in entries})
    fullest = max(e["shapes"] for e in entries)
    lines = [f"{'tokens':>7} {'p':>4} {'provider':14}" + "".join(f"{f'x{n}':>9}" for n in adapters)]

    def line_of(entry: dict[str, Any]) -> tuple[Any, ...]:
        return entry["tokens"], entry["dropout"], entry["provider"]

    for (tokens, p, provider), group in itertools.groupby(sorted(entries, key=line_of), line_of):
        by_count = {e["adapters"]: e for e in group}
        cells = [_mean_cell(by_count.get(n), fullest) for n in adapters]
        lines.append(f"{tokens:>7} {p:>4g} {provider:14}" + "".join(f"{c:>9}" for c in cells))
    return "\n".join(lines)


def _mean_cell(entry: dict[str, Any] | None, fullest: int) -> str:
    if entry is None:
        return "-"
    return f"{entry['ratio']:.3f}" + ("*" if entry["shapes"] < fullest else "")


def shape_table(rows: Sequence[dict[str, Any]]) -> str:
    """Ratios of every cell as text: a line a (tokens, dropout, adapters, provider)."""
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    names = [s.replace("_tp4", "")[:11] for s in shapes]
    lines = [
        f"{'tokens':>7} {'p':>4} {'x':>3} {'provider':14}" + "".join(f"{n:>12}" for n in names)
    ]

    def line_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["tokens"], row["dropout"], row["adapters"], row["provider"]

    for group, members in itertools.groupby(sorted(rows, key=line_of), line_of):
        by_shape = {m["shape"]: f"{m['ratio']:.3f}" for m in members}
        tokens, p, adapters, provider = group
        cells = "".join(f"{by_shape.get(s, '-'):>12}" for s in shapes)
        lines.append(f"{tokens:>7} {p:>4g} {adapters:>3} {provider:14}" + cells)
    return "\n".join(lines)
