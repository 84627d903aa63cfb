"""What a report shows of nano-batches: the time of every measured step, by their number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tlora_megatron.training.nano.trace import TraceLine, read_trace
from tlora_megatron.training.report.curves import scatter
from tlora_megatron.training.report.jobs import NUM_COLORS, Curve


def nano_section(output_dir: Path) -> str:
    """The part of the page; nothing where the run did not choose its nano-batches."""
    lines = read_trace(output_dir)
    if not lines:
        return ""
    counts = sorted({line.nano_batches for line in lines})
    colors = {count: (count - 1) % NUM_COLORS for count in counts}
    curves = {colors[count]: _times(lines, count) for count in counts}
    names = "".join(
        f'<span><i class="swatch" style="background:var(--c{colors[n]})"></i>{n}</span> '
        for n in counts
    )
    return (
        "<h2>Nano-batches</h2><p>Milliseconds a thousand tokens over the measured steps, by the "
        f"number of nano-batches; kept at the end: <b>{lines[-1].kept}</b></p>"
        f'<figure>{scatter(curves)}<p class="legend">{names}</p></figure>'
    )


def _times(lines: Sequence[TraceLine], count: int) -> Curve:
    """Steps at a count, and their milliseconds a thousand tokens."""
    mine = [line for line in lines if line.nano_batches == count and line.tokens]
    steps = np.array([line.step for line in mine], dtype=float)
    return steps, np.array([1e6 * line.time_s / line.tokens for line in mine])
