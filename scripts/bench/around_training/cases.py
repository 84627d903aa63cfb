"""The runs that are timed, and their job files."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml

from scripts.bench.harness.arguments import REPO

RANKS = (4, 8, 16, 16, 32, 32, 64, 64)
TEXTS = REPO / "configs" / "quickstart" / "data"
"""Where no folder of texts is named."""
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run over one of the bases, with every job stepping in every round."""

    name: str
    shape: str
    rounds: int
    save_every: int
    """Steps between two checkpoints; 0 = at the end only."""
    jobs: int = 8
    tokens: int = 8192
    """Tokens of a micro-batch; a job's sequences are cut to its share."""
    cold: bool = False
    """With empty caches of kernels."""


CASES = (
    Case(name="8b, 60 rounds", shape="8b", rounds=60, save_every=50),
    Case(name="8b, saves every 50", shape="8b", rounds=110, save_every=50),
    Case(name="8b, saves at the end", shape="8b", rounds=110, save_every=0),
    Case(name="8b, 300 rounds", shape="8b", rounds=300, save_every=50),
    Case(name="six layers, first time", shape="six layers", rounds=25, save_every=0, cold=True),
    Case(name="six layers", shape="six layers", rounds=25, save_every=0),
    Case(name="toy", shape="toy", rounds=6, save_every=2, jobs=3, tokens=384),
)


def write_jobs(case: Case, base: Path, texts: Path, output_dir: Path, file: Path) -> None:
    """Writes the configuration of a case's run.

    Raises:
        ValueError: if the folder has no texts.
    """
    found = sorted(path for path in texts.glob("*.jsonl") if not path.stem.endswith("_eval"))
    if not found:
        raise ValueError(f"--texts must be a folder with JSONL files, got {texts}")
    data = islice(cycle(found), case.jobs)
    document = {
        "base_model": {"path": str(base), "dtype": "bfloat16"},
        "run": {
            "output_dir": str(output_dir),
            "micro_batch_tokens": case.tokens,
            "checkpoint_every_steps": case.save_every,
        },
        "jobs": [
            _job(case, number, path) for number, path in enumerate(data) if number < case.jobs
        ],
    }
    file.write_text(yaml.safe_dump(document, sort_keys=False))


def _job(case: Case, number: int, text: Path) -> dict[str, Any]:
    rank = RANKS[number % len(RANKS)]
    return {
        "name": f"job{number}",
        "data": {"train": str(text.resolve())},
        "lora": {"rank": rank, "alpha": 2 * rank, "target_modules": _LINEARS},
        "batch_size": 1,
        "max_seq_len": case.tokens // case.jobs,
        "max_steps": case.rounds,
        "optimizer": {"lr": 1e-4},
    }
