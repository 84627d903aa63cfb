"""Rows of measurements: the CSV files they go to, and the machine and commit they are of."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import subprocess
from collections.abc import Mapping, Sequence
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
