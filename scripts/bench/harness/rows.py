"""Rows of measurements: the CSV files they go to, and the machine and commit they are of."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows in the file's order of columns; a new file takes the first row's.

    Raises:
        ValueError: if the file has other columns.
    """
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        columns = next(csv.reader(file), None)
        writer = csv.DictWriter(file, columns or list(rows[0]), lineterminator="\n")
        for row in rows:
            if set(row) != set(writer.fieldnames):
                raise ValueError(
                    f"columns of {path} must be {', '.join(row)}, got "
                    f"{', '.join(writer.fieldnames)}; name another file"
                )
        if columns is None:
            writer.writeheader()
        writer.writerows(rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces the rows of a file; without rows the file stays as it is."""
    if rows:
        path.unlink(missing_ok=True)
    append_rows(path, rows)


def checkout_commit() -> str:
    """The short name of the commit that is checked out; "unknown" where git cannot say."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def gpu_name() -> str:
    """The GPU of this process, or "cpu"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def versions(*packages: str) -> str:
    """Versions of torch and of more packages, as `torch 2.11.0, deepspeed 0.19.8`.

    Packages that are not installed, but lie in a folder of their own, are left out.
    """
    import torch

    found = [f"torch {torch.__version__}"]
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


@dataclass(kw_only=True, slots=True)
class Figures:
    """Prints figures of a service, keeps them as rows, and remembers which miss their limit."""

    csv: Path | None
    commit: str
    engine: str
    gpu: str = "cpu"
    world: int = 1
    about: str = ""
    """Begins the name of every case."""
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
        bounds = {"<=": most, ">=": least}
        limit = "".join(f" (must {word} {x:g})" for word, x in bounds.items() if x is not None)
        shown = f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
        print(f"{case}: {shown} {unit}{limit}", flush=True)
        if (most is not None and value > most) or (least is not None and value < least):
            self.missed.append(case)
        named = {"gpu": self.gpu, "world": self.world, "commit": self.commit}
        named |= {"engine": self.engine, "case": f"{self.about}{case}"}
        if self.csv is not None:
            append_rows(self.csv, [named | {"value": shown, "unit": unit}])

    def spread(self, case: str, seconds: Sequence[float], *, p99_ms: float | None = None) -> None:
        times = sorted(1e3 * second for second in seconds)
        late = times[min(len(times) - 1, int(0.99 * len(times)))]
        self.row(f"{case}, p50", times[len(times) // 2], "ms")
        self.row(f"{case}, p99", late, "ms", most=p99_ms)
        self.row(f"{case}, longest", times[-1], "ms")

    @contextlib.contextmanager
    def load(self, case: str) -> Iterator[None]:
        """Notes the load average before and after: a time from a busy machine says little."""
        self.row(f"{case}load average before", os.getloadavg()[0], "")
        yield
        self.row(f"{case}load average after", os.getloadavg()[0], "")
