#!/usr/bin/env python
"""Compares sweeps that stop trials early with the same grids run to their ends, on a small base.

    python -m scripts.sweep_study --seeds 0 1 2 3 4 --rows scripts/bench/results/sweep.csv

A row a seed, of the jobs' data order and initial adapters: steps and samples that stopping saves,
and the place that its best trial has in the whole grid.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.bench.harness.rows import append_rows, checkout_commit

SWEEP = Path(__file__).parents[1] / "configs" / "quickstart_sweep.yaml"
GRID = (
    "sweep.over={optimizer.lr: [3.0e-4, 1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3, 1.6e-2], "
    "lora.rank: [4, 8, 16, 32]}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60, help="of each trial")
    parser.add_argument("--keep", type=float, default=0.34, help="as sweep.stop.keep")
    parser.add_argument("--rows", type=Path, required=True, help="CSV to append to")
    args = parser.parse_args()
    for seed in args.seeds:
        append_rows(args.rows, [compare(seed, args.steps, args.keep)])


def compare(seed: int, steps: int, keep: float) -> dict[str, Any]:
    """Runs one seed's sweep and its whole grid; returns the row."""
    with tempfile.TemporaryDirectory() as folder:
        own = [GRID, f"run.seed={seed}", f"job.max_steps={steps}"]
        begin_s = time.perf_counter()
        halved = sweep(Path(folder, "halved"), [*own, f"sweep.stop.keep={keep}"])
        middle_s = time.perf_counter()
        whole = sweep(Path(folder, "whole"), [*own, "sweep.stop=null"])
        end_s = time.perf_counter()
    places = [row["trial"] for row in whole["ranking"]]
    tokens = [sum(row["tokens"] for row in found["ranking"]) for found in (halved, whole)]
    best = halved["best"]
    return {
        "commit": checkout_commit(),
        "device": "cpu",
        "seed": seed,
        "trials": len(places),
        "steps": steps,
        "keep": keep,
        "steps_saved": f"{halved['steps_saved']:.3f}",
        "tokens_saved": f"{1 - tokens[0] / tokens[1]:.3f}",
        "best": best["trial"],
        "settings": json.dumps(best["settings"]),
        "eval_loss": f"{best['value']:.5g}",
        "place_in_grid": places.index(best["trial"]) + 1,
        "grid_best": whole["best"]["trial"],
        "grid_eval_loss": f"{whole['best']['value']:.5g}",
        "halved_s": f"{middle_s - begin_s:.1f}",
        "grid_s": f"{end_s - middle_s:.1f}",
    }


def sweep(out: Path, settings: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tlora_megatron.cli", "sweep", str(SWEEP), "--json"]
    words = [f"--set={setting}" for setting in settings]
    subprocess.run([*command, f"--output-dir={out}", *words], check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((out / "sweep.json").read_text()))


if __name__ == "__main__":
    main()
