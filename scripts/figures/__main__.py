"""Says which figures of the pages disagree with their rows, and which rows are stale.

    python -m scripts.figures           # figures that disagree with their row or have no address
    python -m scripts.figures --stale   # figures of rows older than the code that they measure
    python -m scripts.figures --json    # every figure with its address, value and rows

docs/figures.yaml holds the addresses and says how to write one. Returns 1 if a figure disagrees
or has no address; stale figures are printed, no more.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scripts.figures.check import Report, checked
from scripts.figures.stale import stale_lines

REPO = Path(__file__).resolve().parents[2]


def _json(report: Report) -> str:
    figures = [
        {
            **{"page": f.place.page, "section": f.place.section, "cell": f.place.cell},
            **{"text": f.text, "address": f.address, "value": f.value, "rows": f.rows},
        }
        for f in report.figures
    ]
    return json.dumps({"problems": report.problems, "figures": figures}, indent=1)


def main(arguments: list[str] | None = None, repo: Path = REPO) -> int:
    """Prints what was asked for; 1 if any figure disagrees."""
    parser = argparse.ArgumentParser(prog="python -m scripts.figures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--stale", action="store_true", help="figures of rows older than the code")
    parser.add_argument("--json", action="store_true", help="all figures, for programs")
    asked = parser.parse_args(arguments)
    report = checked(repo)
    if asked.json:
        print(_json(report))
    elif asked.stale:
        print("\n".join(stale_lines(repo, report)) or "no figure is stale")
    else:
        print("\n".join(report.problems))
        print(f"{len(report.figures)} figures, {len(report.problems)} problems")
    return 1 if report.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
