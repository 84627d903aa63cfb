"""Rows of the doors' figures, and the load of the machine that they were taken on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench.harness.rows import append_rows


@dataclass(kw_only=True, slots=True)
class Notes:
    """Prints figures, keeps them as rows, and remembers which miss their limit."""

    csv: Path | None
    commit: str
    engine: str
    gpu: str = "cpu"
    world: int = 1
    missed: list[str] = field(default_factory=list)

    def row(
        self,
        case: str,
        value: float,
        unit: str,
        *,
        most: float | None = None,
        least: float | None = None,
    ) -> None:
        """Notes one figure, and whether it keeps its limits."""
        limit = "".join(
            f" (must {word} {bound:g})"
            for word, bound in (("<=", most), (">=", least))
            if bound is not None
        )
        print(f"{case}: {value:.4g} {unit}{limit}", flush=True)
        if (most is not None and value > most) or (least is not None and value < least):
            self.missed.append(case)
        found = {
            "gpu": self.gpu,
            "world": self.world,
            "commit": self.commit,
            "engine": self.engine,
            "case": case,
            "value": f"{value:.4g}",
            "unit": unit,
        }
        if self.csv is not None:
            append_rows(self.csv, [found])

    def spread(self, case: str, seconds: Sequence[float], *, p99_ms: float | None = None) -> None:
        """Notes median, 99th percentile and longest of some times."""
        times = sorted(1e3 * second for second in seconds)
        self.row(f"{case}, p50", times[len(times) // 2], "ms")
        self.row(
            f"{case}, p99", times[min(len(times) - 1, int(0.99 * len(times)))], "ms", most=p99_ms
        )
        self.row(f"{case}, longest", times[-1], "ms")

    @contextmanager
    def load(self, case: str) -> Iterator[None]:
        """Notes the load average before and after: a time from a busy machine says little."""
        self.row(f"{case}: load average before", os.getloadavg()[0], "")
        yield
        self.row(f"{case}: load average after", os.getloadavg()[0], "")
