#!/usr/bin/env python
"""Compares sweeps that stop trials early with the same grids run to their ends, on a small base.

    python -m scripts.sweep_study --seeds 0 1 2 3 4 --rows scripts/bench/results/sweep.csv
    python -m scripts.sweep_study --size 8b --steps 100 --rows sweep_8b.csv     # on a GPU

A row a seed, of the jobs' data order and initial adapters: steps and samples that stopping saves,
and the place that its best trial has in the whole grid. With `--size`, the times of 24 trials over
random weights of that shape, with rows as long as gsm8k's: which of them are best means nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.around_training.base import shape_of, write_config
from scripts.bench.harness.rows import append_rows, checkout_commit
from tlora_megatron.config.job import ScheduleSpec

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
    parser.add_argument("--folder", type=Path, help="keeps the runs; those in it go on")
    parser.add_argument("--rows", type=Path, required=True, help="CSV to append to")
    parser.add_argument("--size", choices=("8b", "toy"), help="times over random weights")
    args = parser.parse_args()
    if args.size is not None:
        append_rows(args.rows, [times(args.size, args.steps, args.keep)])
        return
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as made:
            row = compare(args.folder or Path(made), seed, args.steps, args.keep)
        append_rows(args.rows, [row])


def times(size: str, steps: int, keep: float) -> dict[str, Any]:
    """Runs one sweep over random weights; returns the row."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_config(shape_of(size), root)
        draw = random.Random(0)
        for name, count in (("train", 2000), ("eval", 16)):
            # gsm8k's rows have 40 to 400 tokens, 170 in the mean; a token is a byte here.
            lengths = (
                round(min(400, max(40, draw.lognormvariate(5.0, 0.45)))) for _ in range(count)
            )
            rows = (
                {"prompt": "a" * (length // 2), "completion": "b" * (length // 2)}
                for length in lengths
            )
            (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        job = {"name": "gsm8k", "batch_size": 8, "max_seq_len": 512, "max_steps": steps}
        over = {"optimizer.lr": {"log_uniform": [1e-5, 1e-3]}, "lora.rank": [8, 16, 32, 64]}
        document = {
            "base_model": {"config": "config.json", "random_init": True, "dtype": "bfloat16"},
            "run": {"output_dir": str(root / "out"), "micro_batch_tokens": 8192}
            | {"tensorboard": False, "checkpoint_every_steps": 0},
            "job": job | {"data": {"train": "train.jsonl", "eval": "eval.jsonl"}},
            "sweep": {"over": over, "trials": 24, "stop": {"keep": keep, "at": [0.1, 0.3]}},
        }
        path = root / "sweep.json"
        path.write_text(json.dumps(document))
        found = sweep(root / "out", [], path)
        run = json.loads((root / "out" / "summary.json").read_text())["run"]
    return {
        "gpu": run["device"],
        "commit": checkout_commit(),
        "model": size,
        "trials": 24,
        "steps": steps,
        "steps_saved": f"{found['steps_saved']:.3f}",
        "tokens": sum(row["tokens"] for row in found["ranking"]),
        "rounds_s": f"{run['train_time_s']:.1f}",
        "tokens_per_s": f"{run['tokens_per_s']:.0f}",
        "wall_s": f"{run['wall_time_s']:.1f}",
        "time_s": json.dumps({key: round(value, 1) for key, value in run["time_s"].items()}),
    }


def compare(folder: Path, seed: int, steps: int, keep: float) -> dict[str, Any]:
    """Runs one seed's sweep and its whole grid; returns the row."""
    own = [GRID, f"run.seed={seed}", f"job.max_steps={steps}"]
    halved = sweep(folder / f"halved{seed}", [*own, f"sweep.stop.keep={keep}"])
    whole = sweep(folder / f"grid{seed}", [*own, "sweep.stop=null"])
    places = [row["trial"] for row in whole["ranking"]]
    tokens = [sum(row["tokens"] for row in found["ranking"]) for found in (halved, whole)]
    best = halved["best"]
    config = json.loads((folder / f"halved{seed}" / "config.json").read_text())
    schedule = ScheduleSpec(**config["jobs"][0]["schedule"])
    return {
        "commit": checkout_commit(),
        "device": "cpu",
        "seed": seed,
        "trials": len(places),
        "steps": steps,
        "keep": keep,
        "warmup_steps": schedule.num_warmup_steps(steps),
        "steps_saved": f"{halved['steps_saved']:.3f}",
        "tokens_saved": f"{1 - tokens[0] / tokens[1]:.3f}",
        "best": best["trial"],
        "settings": json.dumps(best["settings"]),
        "eval_loss": f"{best['value']:.5g}",
        "place_in_grid": places.index(best["trial"]) + 1,
        "grid_best": whole["best"]["trial"],
        "grid_eval_loss": f"{whole['best']['value']:.5g}",
    }


def sweep(out: Path, settings: list[str], file: Path = SWEEP) -> dict[str, Any]:
    command = [sys.executable, "-m", "tlora_megatron.cli", "sweep", str(file), "--json"]
    words = [f"--set={setting}" for setting in settings]
    subprocess.run([*command, f"--output-dir={out}", *words], check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((out / "sweep.json").read_text()))


if __name__ == "__main__":
    main()
