"""Options that many benchmarks have."""

from __future__ import annotations

import argparse
import os
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


def add_checkout(parser: argparse.ArgumentParser) -> None:
    checkout = os.environ.get("MEGATRON_LM_PATH")
    parser.add_argument("--megatron-lm", type=Path, default=checkout and Path(checkout))


def check_checkout(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with a usage error where `--megatron-lm` is none."""
    if not ((options.megatron_lm or Path("nowhere")) / "pretrain_gpt.py").is_file():
        parser.error("--megatron-lm (or MEGATRON_LM_PATH) must name a Megatron-LM checkout")
