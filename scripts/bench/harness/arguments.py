"""Options that every benchmark has."""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.bench.harness.rows import checkout_commit

REPO = Path(__file__).parents[3]
RESULTS = Path(__file__).parents[1] / "results"
"""Where rows and pictures of the repository lie."""


def bench_parser(description: str | None, *, csv: Path | None = None) -> argparse.ArgumentParser:
    """A parser with `--csv` and `--commit`, which shows the module's docstring as its help.

    Args:
        csv: the file that rows are appended to where none is named; None = no file.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, default=csv, help="append rows to this file")
    parser.add_argument(
        "--commit", default=checkout_commit(), help="of the package, where git is not at hand"
    )
    return parser
