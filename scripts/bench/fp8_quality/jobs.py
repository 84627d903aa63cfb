"""The runs that are compared: the quickstart's tasks and GSM8K's text, each with several seeds."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.bench.harness.arguments import REPO
from scripts.quickstart_tasks import JOBS

QUICKSTART = REPO / "configs" / "quickstart.yaml"
TASKS = (*JOBS, "gsm8k")
_GSM8K: dict[str, Any] = {
    "lora": {"rank": 16, "alpha": 32},
    "batch_size": 4,
    "max_seq_len": 256,
    "optimizer": {"lr": 2.0e-3},
    "schedule": {"name": "cosine", "warmup_steps": 10, "min_lr": 1.0e-4},
}
_TEXT_ROWS, _TEXT_EVAL_ROWS = 800, 64
_EVALS = 4
"""Evaluations of a job, its last step's included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The trainings that run on each base."""

    base: Mapping[str, Any]
    """The section `base_model` without its quantisation."""
    tasks: tuple[str, ...]
    seeds: int
    steps: int
    eval_rows: int
    """Fresh rows on which each of the quickstart's tasks is evaluated."""
    gsm8k: Path
    """JSON lines of prompt and completion."""
    micro_batch_tokens: int

    def write(self, quantization: str | None, data: Path, output_dir: Path, path: Path) -> None:
        """Writes the configuration of a run that trains all tasks with all seeds together.

        Args:
            quantization: as `base_model.quantization`.
            data: folder of files for the jobs; those that are there stay.
        """
        data.mkdir(parents=True, exist_ok=True)
        files = {task: self._files(task, data) for task in self.tasks}
        jobs = [
            self._job(task, seed) | {"data": files[task]}
            for task, seed in itertools.product(self.tasks, range(self.seeds))
        ]
        document = {
            "base_model": dict(self.base) | {"quantization": quantization},
            "run": {
                "output_dir": str(output_dir),
                "micro_batch_tokens": self.micro_batch_tokens,
                "checkpoint_every_steps": 0,
                "resume": "never",
                "tensorboard": False,
                "nano_batches": 1,
            },
            "jobs": jobs,
        }
        path.write_text(json.dumps(document, indent=1))

    def _job(self, task: str, seed: int) -> dict[str, Any]:
        """A job as the quickstart has it, with its own seed and number of steps."""
        if task == "gsm8k":
            chosen = dict(_GSM8K)
        else:
            document = yaml.safe_load(QUICKSTART.read_text())
            (chosen,) = (job for job in document["jobs"] if job["name"] == task)
        every = max(1, self.steps // _EVALS)
        return chosen | {
            "name": job_name(task, seed),
            "seed": seed,
            "max_steps": self.steps,
            "eval_every_steps": every,
        }

    def _files(self, task: str, data: Path) -> dict[str, str]:
        train, held_out = data / f"{task}_train.jsonl", data / f"{task}_eval.jsonl"
        if not train.exists():
            if task == "gsm8k":
                rows = list(itertools.islice(_texts(self.gsm8k), _TEXT_ROWS + _TEXT_EVAL_ROWS))
                _write(train, rows[:_TEXT_ROWS])
                _write(held_out, rows[_TEXT_ROWS:])
            else:
                source = QUICKSTART.parent / "quickstart" / "data" / train.name
                train.write_text(source.read_text())
                _write(held_out, _fresh_rows(task, source, self.eval_rows))
        return {"train": str(train), "eval": str(held_out)}


def job_name(task: str, seed: int) -> str:
    """The name of a task's job with a seed."""
    return f"{task}_{seed}"


def _texts(source: Path) -> Iterator[dict[str, str]]:
    """Problem and solution as one text, all of which is learnt."""
    for line in source.read_text().splitlines():
        record = json.loads(line)
        yield {"text": f"{record['prompt']}\n{record['completion']}"}


def _fresh_rows(task: str, train: Path, count: int) -> list[dict[str, str]]:
    """Rows whose prompts are not among those that are trained on, and are all different."""
    seen = {json.loads(line)["prompt"] for line in train.read_text().splitlines()}
    rng = random.Random(f"fp8/{task}")
    rows = []
    while len(rows) < count:
        prompt, completion = JOBS[task](rng)
        if prompt not in seen:
            seen.add(prompt)
            rows.append({"prompt": prompt, "completion": completion})
    return rows


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
