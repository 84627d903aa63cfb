"""What a report shows of nano-batches: the time of every measured step, by their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tlora_megatron.training.metrics import read_metrics
from tlora_megatron.training.nano_controller import TRACE_FILE
from tlora_megatron.training.report_curves import scatter
from tlora_megatron.training.report_jobs import NUM_COLORS, Curve


def nano_section(output_dir: Path) -> str:
    """The part of the page; nothing where the run did not choose its nano-batches.

    Raises:
        ValueError: if the trace is corrupt.
    """
    path = output_dir / TRACE_FILE
    records = read_metrics(path) if path.exists() else []
    if not records:
        return ""
    counts = sorted({record["nano_batches"] for record in records})
    colors = {count: (count - 1) % NUM_COLORS for count in counts}
    curves = {colors[count]: _times(records, count) for count in counts}
    names = "".join(
        f'<span><i class="swatch" style="background:var(--c{colors[n]})"></i>{n}</span> '
        for n in counts
    )
    kept = records[-1]["kept"]
    return (
        "<h2>Nano-batches</h2><p>Milliseconds a thousand tokens over the measured steps, by the "
        f"number of nano-batches; kept at the end: <b>{kept}</b></p>"
        f'<figure>{scatter(curves)}<p class="legend">{names}</p></figure>'
    )


def _times(records: list[dict[str, Any]], count: int) -> Curve:
    """Steps at a count, and their milliseconds a thousand tokens."""
    mine = [r for r in records if r["nano_batches"] == count and r["tokens"]]
    steps = np.array([r["step"] for r in mine], dtype=float)
    return steps, np.array([1e6 * r["time_s"] / r["tokens"] for r in mine])
