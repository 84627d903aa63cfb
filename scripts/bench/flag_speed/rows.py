"""Rows of `flag_speed.csv`, and what they say together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""One mode of one life; the keys are the CSV's columns."""

LIMITS = {"bf16": (1.05, 1.06), "fp32": (1.05, 1.06), "fp8": (1.02, 1.06)}
"""Largest ratio of the flag's iteration to our own trainer's, TP 1 and above."""
STOCK_GOAL = 1.3
"""Ratio of stock LoRA's iteration to the flag's."""


def make_row(case: Any, mode: str, common: Mapping[str, Any], measured: Mapping[str, Any]) -> Row:
    """Puts a row together.

    Args:
        common: `gpu`, `megatron_lm`, `floor_ms`, which a life's rows share.
        measured: `step_ms`, `tokens`, `peak_bytes`.
    """
    return {
        "gpu": common["gpu"],
        "world": case.tp,
        "commit": case.commit,
        "megatron_lm": common["megatron_lm"],
        "impl": case.impl,
        "precision": case.precision,
        "layout": case.layout,
        "mode": mode,
        "rows": case.tokens,
        "tokens": measured["tokens"],
        "step_ms": measured["step_ms"],
        "floor_ms": common["floor_ms"],
        "peak_bytes": measured["peak_bytes"],
    }


def show(row: Row) -> str:
    """A row as a line."""
    over = f", {row['step_ms'] / row['floor_ms']:.3f}x floor" if row["floor_ms"] else ""
    return (
        f"{row['impl']:20} {row['layout']:16} {row['mode']:16} {row['step_ms']:8.1f} ms{over}, "
        f"{row['tokens']} tokens, {row['peak_bytes'] / 2**30:.1f} GiB"
    )


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """The flag's iteration over our own trainer's, and stock's over it, for each life."""
    for row in rows:
        if row["mode"].startswith("stock"):
            yield _beside_stock(row, rows)
        own = [r for r in rows if r["impl"] == row["impl"] and r["mode"] == "own"]
        if not row["mode"].startswith("flag") or not own:
            continue
        ratio = row["step_ms"] / own[0]["step_ms"]
        limits = LIMITS.get(row["precision"])
        limit = None if limits is None else limits[row["world"] > 1]
        said = (
            ""
            if limit is None or row["mode"] != "flag"
            else (", reached" if ratio <= limit else f", must be {limit}")
        )
        yield f"{row['impl']} {row['mode']}: {ratio:.3f} of our own trainer's{said}"


def _beside_stock(row: Row, rows: Sequence[Row]) -> str:
    flag = next(r for r in rows if r["impl"] == row["impl"] and r["mode"] == "flag")
    ratio = row["step_ms"] / flag["step_ms"]
    speeds = [1e3 * r["tokens"] / r["step_ms"] for r in (flag, row)]
    said = "" if ratio >= STOCK_GOAL else f", goal {STOCK_GOAL}"
    return (
        f"{row['impl']} {row['layout']} {row['mode']}: {ratio:.2f} of the flag's{said}; "
        f"tokens/s: flag {speeds[0]:.0f}, {row['mode']} {speeds[1]:.0f}"
    )
