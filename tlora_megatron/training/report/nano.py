"""The report's section on nano-batches: the time of every measured step, by their number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tlora_megatron.page.document import legend
from tlora_megatron.page.svg import NUM_COLORS, css_color
from tlora_megatron.training.nano.trace import TraceLine, read_trace
from tlora_megatron.training.report.curves import scatter
from tlora_megatron.training.report.jobs import Curve


def nano_section(output_dir: Path) -> str:
    """The section as HTML; empty if the run did not choose its number of nano-batches."""
    lines = read_trace(output_dir)
    if not lines:
        return ""
    counts = sorted({line.nano_batches for line in lines})
    colors = {count: (count - 1) % NUM_COLORS for count in counts}
    curves = {colors[count]: _times(lines, count) for count in counts}
    names = legend({str(count): css_color(colors[count]) for count in counts})
    return (
        "<h2>Nano-batches</h2><p>Milliseconds per thousand tokens over the measured steps, by the "
        f"number of nano-batches; kept at the end: <b>{lines[-1].kept}</b></p>"
        f"<figure>{scatter(curves)}{names}</figure>"
    )


def _times(lines: Sequence[TraceLine], count: int) -> Curve:
    """The steps with this number of nano-batches, and their milliseconds per thousand tokens."""
    mine = [line for line in lines if line.nano_batches == count and line.tokens]
    steps = np.array([line.step for line in mine], dtype=float)
    return steps, np.array([1e6 * line.time_s / line.tokens for line in mine])
