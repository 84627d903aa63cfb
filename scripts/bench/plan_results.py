"""Rows of `plan_vs_measured`: the CSV, the summary of errors and choices, the picture."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case; the fields are the CSV's columns."""

    gpu: str
    commit: str
    gpus: int
    model: str
    layers: int
    tp: int
    pp: int
    dp: int
    recompute: str
    jobs: int
    tokens: int
    """Micro-batch budget."""
    predicted_s: float
    """Of a round."""
    measured_s: float
    predicted_bytes: int
    """Most that one GPU's tensors take."""
    measured_bytes: int
    predicted_round_tokens: int
    """Rows of all jobs in a round."""
    measured_round_tokens: int

    @property
    def time_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def tokens_error(self) -> float:
        """Of the tokens of a round."""
        return self.predicted_round_tokens / self.measured_round_tokens - 1

    @property
    def rate_error(self) -> float:
        """Of tokens per second: what is left where the rounds measured were not the mean ones."""
        predicted = self.predicted_round_tokens / self.predicted_s
        return predicted * self.measured_s / self.measured_round_tokens - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less 1; 0 where memory is not measured."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0


def show(row: Row) -> str:
    """A row for reading."""
    return (
        f"{row.predicted_s * 1e3:8.1f} ms predicted, {row.measured_s * 1e3:8.1f} measured "
        f"({row.time_error:+.1%}); {row.predicted_bytes / 2**30:6.1f} GiB, "
        f"{row.measured_bytes / 2**30:6.1f} ({row.memory_error:+.1%}); tokens "
        f"{row.predicted_round_tokens}, {row.measured_round_tokens}"
    )


def read_csv(path: Path) -> list[Row]:
    """All rows of a file."""
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(Row)}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(**cast(Any, {k: kinds[k](v) for k, v in row.items()}))
            for row in csv.DictReader(file)
        ]


def report(rows: Sequence[Row]) -> list[str]:
    """Errors over all rows, and of each mix run under several layouts the choice."""
    lines = [f"{len(rows)} cases"]
    for what, errors in (
        ("step time", [row.time_error for row in rows]),
        ("tokens/s", [row.rate_error for row in rows]),
        ("tokens a round", [row.tokens_error for row in rows]),
    ):
        sizes = [abs(error) for error in errors]
        lines.append(
            f"{what}: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, "
            f"mean {statistics.fmean(errors):+.1%}"
        )
    memory = [row.memory_error for row in rows if row.measured_bytes]
    if memory:
        lines.append(f"peak memory: {min(memory):+.1%} to {max(memory):+.1%}")
    groups = defaultdict(list)
    for row in rows:
        groups[row.gpu, row.gpus, row.model, row.layers, row.recompute, row.jobs].append(row)
    for key, members in groups.items():
        layouts = {(r.tp, r.pp, r.dp) for r in members}
        if len(layouts) > 1:
            lines.append(_choice(key, members))
    return lines


def _choice(key: tuple[Any, ...], rows: Sequence[Row]) -> str:
    def measured(row: Row) -> float:
        return row.measured_round_tokens / row.measured_s

    chosen = max(rows, key=lambda row: row.predicted_round_tokens / row.predicted_s)
    best = max(rows, key=measured)
    where = f"{key[0]} x{key[1]} {key[2]}/{key[3]} {key[5]} jobs"
    return (
        f"{where}: chosen TP{chosen.tp} PP{chosen.pp} DP{chosen.dp} {measured(chosen):,.0f} "
        f"tokens/s, {measured(chosen) / measured(best):.1%} of the best measured, "
        f"TP{best.tp} PP{best.pp} DP{best.dp}"
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured step time and peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = plt.subplots(1, 2, figsize=(11, 5))
    parts = (
        ("step time, s", [(r.measured_s, r.predicted_s, r) for r in rows], 0.1),
        (
            "peak memory, GiB",
            [
                (r.measured_bytes / 2**30, r.predicted_bytes / 2**30, r)
                for r in rows
                if r.measured_bytes
            ],
            0.1,
        ),
    )
    for axis, (title, points, band) in zip(axes, parts, strict=True):
        for gpus in sorted({row.gpus for *_, row in points}):
            for model, marker in (("8b", "o"), ("70b", "s"), ("tiny", "^")):
                own = [p for p in points if p[2].gpus == gpus and p[2].model.endswith(model)]
                if own:
                    xs, ys = [p[0] for p in own], [p[1] for p in own]
                    axis.scatter(xs, ys, marker=marker, label=f"{gpus} GPU, {model}", alpha=0.8)
        if points:
            ends = [min(p[0] for p in points) * 0.8, max(p[0] for p in points) * 1.2]
            axis.plot(ends, ends, color="grey", linewidth=1)
            low, high = ([e * (1 + s * band) for e in ends] for s in (-1, 1))
            axis.fill_between(ends, low, high, color="grey", alpha=0.15, label="within 10 %")
            axis.set(xscale="log", yscale="log")
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_locator(LogLocator(subs=(1, 2, 5)))
                side.set_major_formatter(StrMethodFormatter("{x:g}"))
                side.set_minor_formatter(NullFormatter())
        axis.set(title=title, xlabel="measured", ylabel="predicted")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
