"""Trains the quickstart's tasks and GSM8K's text over an FP8 base and over the base as it is.

    python -m scripts.bench.fp8_quality --csv scripts/bench/results/fp8_quality.csv
    python -m scripts.bench.fp8_quality --tasks gsm8k --config configs/models/llama-3.1-8b.json

One `tlora train` for each base: every task with every seed, all in one super-model, since a job's
adapter does not depend on the others. Jobs are the quickstart's, with 200 steps; exact match is
that of fresh rows, more than the quickstart has. GSM8K's problems are text to learn as a whole.

Ends go to the CSV, curves beside it to `..._curves.csv`; `python -m scripts.bench.plot quality`
draws them. GSM8K is read from `--gsm8k` and left out where that is missing. `--config` takes a base
of random weights in that shape with the quickstart's tokenizer, which shows rounding in sums as
long as a real model's; its losses say nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scripts.bench.fp8_quality.jobs import QUICKSTART, TASKS, Study, job_name
from scripts.bench.fp8_quality.rows import CurveRow, EndRow, compare, curve, last_loss, read_job
from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.life import live
from scripts.bench.harness.rows import append_rows, gpu_name, versions

BASE = QUICKSTART.parent / "quickstart" / "base"
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints the comparison; returns 1 if a run fails."""
    args = _arguments(argv)
    curves: list[CurveRow] = []
    ends: list[EndRow] = []
    work = Path(args.work or tempfile.mkdtemp(prefix="fp8_quality_"))
    try:
        study = _study(args, work)
        for precision in args.precisions:
            found = _train(args, study, precision, work)
            if found is None:
                return 1
            curves += found[0]
            ends += found[1]
            if args.csv is not None:
                append_rows(_curves_file(args.csv), [asdict(row) for row in found[0]])
                append_rows(args.csv, [asdict(row) for row in found[1]])
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    for line in compare(ends, curves):
        print(line)
    return 0


def _curves_file(csv: Path) -> Path:
    return csv.with_name(f"{csv.stem}_curves.csv")


def _study(args: argparse.Namespace, work: Path) -> Study:
    tasks = tuple(args.tasks)
    if "gsm8k" in tasks and not args.gsm8k.is_file():
        print(f"gsm8k is left out: {args.gsm8k} is no file (--gsm8k)")
        tasks = tuple(task for task in tasks if task != "gsm8k")
    return Study(
        base=_random_base(args, work) | {"dtype": args.dtype},
        tasks=tasks,
        seeds=args.seeds,
        steps=args.steps,
        eval_rows=args.eval_rows,
        gsm8k=args.gsm8k,
        micro_batch_tokens=args.tokens,
    )


def _random_base(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The section `base_model`; a shape gets a folder with the quickstart's tokenizer."""
    if args.config is None:
        return {"path": str(BASE)}
    folder = work / "base"
    folder.mkdir(parents=True, exist_ok=True)
    for file in BASE.glob("token*"):
        shutil.copy(file, folder)
    own = json.loads((BASE / "config.json").read_text())
    shape = json.loads(args.config.read_text())
    shape |= {name: own[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    if args.layers is not None:
        shape["num_hidden_layers"] = args.layers
    (folder / "config.json").write_text(json.dumps(shape))
    return {"config": str(folder / "config.json"), "random_init": True}


def _train(
    args: argparse.Namespace, study: Study, precision: str, work: Path
) -> tuple[list[CurveRow], list[EndRow]] | None:
    """Rows of one run; None, with the end of its log, if it failed."""
    output_dir, config = work / precision, work / f"{precision}.json"
    shutil.rmtree(output_dir, ignore_errors=True)
    quantization = "fp8" if precision == "fp8" else None
    study.write(quantization, work / "data", output_dir, config)
    command = [sys.executable, "-m", "tlora_megatron.cli", "train", str(config)]
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    life = live(command, os.environ | {"PYTHONPATH": path}, work / f"{precision}.log", args.timeout)
    print(f"{precision}: {life.seconds:.0f} s, exit {life.code}", flush=True)
    if life.code != 0:
        print(life.output[-4000:])
        return None
    curves, ends = [], []
    base = "quickstart" if args.config is None else args.config.stem
    name = _SHORT[args.dtype] if quantization is None else precision
    for task in study.tasks:
        for seed in range(study.seeds):
            folder = output_dir / "jobs" / job_name(task, seed)
            losses, last = read_job(folder / "metrics.jsonl")
            common: dict[str, Any] = {"base": base, "precision": name, "task": task, "seed": seed}
            curves += [CurveRow(**common, step=s, loss=v) for s, v in curve(losses)]
            ends.append(_end(args, common, losses, last))
    return curves, ends


def _end(
    args: argparse.Namespace,
    common: dict[str, Any],
    losses: Sequence[float],
    last: dict[str, Any],
) -> EndRow:
    is_text = common["task"] == "gsm8k"
    return EndRow(
        **common,
        gpu=gpu_name(),
        versions=versions("megatron-core"),
        commit=args.commit,
        steps=len(losses),
        train_loss=last_loss(losses),
        eval_loss=round(last["eval_loss"], 5),
        exact_match="" if is_text else round(last["eval_exact_match"], 5),
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--precisions", nargs="+", choices=("wide", "fp8"), default=["wide", "fp8"])
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=200)
    add("--eval-rows", type=int, default=384, help="fresh rows of each of the quickstart's tasks")
    add("--gsm8k", type=Path, default=REPO.parent / "shared" / "data" / "text" / "gsm8k.jsonl")
    add("--config", type=Path, help="config.json of a base of random weights")
    add("--layers", type=int, help="fewer layers than that has")
    on_gpu = torch.cuda.is_available()
    add("--dtype", choices=_SHORT, default="bfloat16" if on_gpu else "float32")
    add("--tokens", type=int, default=8192 if on_gpu else 2048, help="rows of a micro-batch")
    add("--work", type=Path, help="keep runs and their logs in this folder")
    add("--timeout", type=float, default=1800.0, help="seconds that a run may take")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
