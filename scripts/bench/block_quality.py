#!/usr/bin/env python3
r"""Evaluation losses of standard and block-diagonal adapters of as many parameters, side by side.

    python scripts/bench/block_quality.py --text TEXT.jsonl \
        --csv scripts/bench/results/block_quality.csv

Trains the quickstart's tasks and one text on the quickstart's base, every task with each
parametrisation and seed, all jobs together in one super-model on the CPU (or one GPU). Settings are
the quickstart's; only ranks differ: for every task the standard rank, from the quickstart's up, for
which each number of blocks has a rank of nearly as many parameters. alpha / rank is the task's for
all. `parameters` counts the adapter's. TEXT has rows of `text` or of `prompt` and `completion`,
which are joined and cut to the base's positions; its last rows are for evaluation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from result_rows import checkout_commit, write_rows

from tlora_megatron.config.job import HF_TARGETS, DataSpec, JobSpec, LoraSpec
from tlora_megatron.config.load import load_config
from tlora_megatron.layers.slab import factor_names, factor_shape
from tlora_megatron.model.spec import ModelSpec, read_model_spec

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TEXT_ROWS, TEXT_EVAL_ROWS = 1000, 96


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One trained job; the fields are the CSV's columns."""

    commit: str
    task: str
    parametrization: str
    num_blocks: int
    rank: int
    parameters: int
    seed: int
    steps: int
    eval_loss_before: float
    eval_loss_after: float
    exact_match_after: float | None


def main() -> None:
    """Trains, prints a table and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="JSONL of a real text; None = no such task")
    parser.add_argument("--num-blocks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of every job; None = the quickstart's")
    parser.add_argument("--csv", type=Path, help="written anew")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args, Path(folder))
    show(rows)
    if args.csv is not None:
        write_rows(args.csv, [asdict(row) for row in rows])


def run(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Trains all jobs in one process of their own."""
    config = load_config(QUICKSTART, (), str(folder / "quickstart"))
    base = Path(str(config.base_model.path))
    spec = read_model_spec(base / "config.json")
    tasks = list(config.jobs)
    if args.text is not None:
        tasks.append(text_task(args.text, folder, spec))
    jobs = {}
    for task in tasks:
        for lora in equal_adapters(task.lora, spec, args.num_blocks):
            for seed in range(args.seeds):
                name = f"{task.name}-{lora.num_blocks}-{seed}"
                steps = args.steps or task.max_steps
                jobs[name] = (task.name, replace(
                    task, name=name, lora=lora, seed=seed, max_steps=steps, eval_every_steps=None
                ))  # fmt: skip
    document = {
        "base_model": {"path": str(base), "dtype": "float32"},
        "run": {"output_dir": str(folder / "out"), "micro_batch_tokens": 8192},
        "jobs": [asdict(job) for _, job in jobs.values()],
    }
    (folder / "run.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "tlora_megatron.cli", "train", str(folder / "run.json")]
    subprocess.run([*command, "--nproc", "1"], check=True, cwd=Path(__file__).parents[2])
    summary = json.loads((folder / "out" / "summary.json").read_text())["jobs"]
    return [
        _row(task, job, summary[name], num_parameters(job.lora, spec))
        for name, (task, job) in jobs.items()
    ]


def text_task(path: Path, folder: Path, spec: ModelSpec) -> JobSpec:
    """A job that goes on with a text's rows, on all linears."""
    texts = []
    for line in path.read_text().splitlines()[:TEXT_ROWS]:
        row = json.loads(line)
        texts.append(row.get("text") or f"{row['prompt']}\n{row['completion']}")
    parts = {"train": texts[:-TEXT_EVAL_ROWS], "eval": texts[-TEXT_EVAL_ROWS:]}
    for part, rows in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in rows)
        (folder / f"{part}.jsonl").write_text(lines)
    quickstart = load_config(QUICKSTART, (), str(folder / "quickstart")).jobs[-1]
    return replace(
        quickstart,
        name=path.stem.replace("_", "-"),
        data=DataSpec(train=str(folder / "train.jsonl"), eval=str(folder / "eval.jsonl")),
        lora=LoraSpec(rank=8, alpha=16, target_modules=HF_TARGETS),
        batch_size=8,
        max_seq_len=spec.max_positions,
        max_steps=100,
    )


def equal_adapters(lora: LoraSpec, spec: ModelSpec, numbers: Sequence[int]) -> list[LoraSpec]:
    """A standard adapter and one of each number of blocks, of nearly as many parameters.

    Ranks from the given one to four times as much; alpha / rank stays (alpha / sqrt(rank) too).
    """

    def at(rank: int, blocks: int) -> LoraSpec:
        kind: Any = "standard" if blocks == 1 else "block_diagonal"
        alpha = lora.scaling * (rank**0.5 if lora.use_rslora else rank)
        return replace(lora, rank=rank, alpha=alpha, parametrization=kind, num_blocks=blocks)

    def mix(rank: int) -> list[LoraSpec]:
        wanted = num_parameters(at(rank, 1), spec)
        a_block = [num_parameters(at(blocks, blocks), spec) for blocks in numbers]
        ranks = [max(1, round(wanted / n)) * b for n, b in zip(a_block, numbers, strict=True)]
        return [at(rank, 1), *(at(r, b) for r, b in zip(ranks, numbers, strict=True))]

    def mismatch(adapters: list[LoraSpec]) -> float:
        wanted, *others = (num_parameters(adapter, spec) for adapter in adapters)
        return max(abs(other / wanted - 1) for other in others)

    mixes = [mix(rank) for rank in range(lora.rank, 4 * lora.rank + 1)]
    return next((m for m in mixes if mismatch(m) < 0.025), min(mixes, key=mismatch))


def num_parameters(lora: LoraSpec, spec: ModelSpec) -> int:
    """Of an adapter over the whole model."""
    shapes = (factor_shape(spec, name, lora) for name in factor_names(spec, lora))
    return sum(rows * columns for rows, columns in shapes)


def _row(task: str, job: JobSpec, found: dict[str, Any], parameters: int) -> Row:
    if found["status"] != "finished":
        raise SystemExit(f"{job.name} must finish, got {found['status']}: {found['reason']}")
    return Row(
        commit=checkout_commit(),
        task=task,
        parametrization=job.lora.parametrization,
        num_blocks=job.lora.num_blocks,
        rank=job.lora.rank,
        parameters=parameters,
        seed=job.seed,
        steps=found["steps"],
        eval_loss_before=found["eval_loss_before"],
        eval_loss_after=found["eval_loss_after"],
        exact_match_after=found["exact_match_after"],
    )


def show(rows: Sequence[Row]) -> None:
    """Mean and range of the evaluation loss over seeds, one line a task and parametrisation."""
    print("task          blocks  rank  parameters  before   after (least to most)  exact match")
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.task, row.num_blocks), []).append(row)
    for (task, blocks), group in groups.items():
        after = [row.eval_loss_after for row in group]
        exact = [row.exact_match_after for row in group if row.exact_match_after is not None]
        match = f"{statistics.mean(exact):.2f}" if exact else "-"
        print(
            f"{task:13} {blocks:6} {group[0].rank:5} {group[0].parameters:11,} "
            f"{group[0].eval_loss_before:7.3f} {statistics.mean(after):7.4f} "
            f"({min(after):.4f} to {max(after):.4f}) {match:>7}"
        )


if __name__ == "__main__":
    main()
