"""A sweep of six tiny trials, and what its runs are compared by."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.helpers.scenario import make_scenario
from tlora_megatron.config.load import load_sweep
from tlora_megatron.config.sections import job_to_dict

STEPS, RUNGS = 8, (2, 4)
LORA: dict[str, Any] = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
TRIALS = [
    {"optimizer.lr": lr, "lora.rank": rank}
    for lr, rank in ((1e-3, 4), (4e-3, 4), (1e-5, 4), (1e-2, 4), (4e-3, 8), (1e-3, 8))
]
SURVIVORS, WORST = ("math-1", "math-3"), "math-2"
"""Of six trials three are kept, then two of three; the one with the least rate hardly moves."""


def make_sweep(root: Path, **stop: Any) -> Path:
    """Writes base, data and `sweep.json`; returns the sweep's path."""
    path = make_scenario(root, [{"name": "math", "lora": LORA, "batch_size": 2}], num_steps=STEPS)
    document = json.loads(path.read_text())
    (job,) = document.pop("jobs")
    document["run"] |= {"deterministic": True, "checkpoint_every_steps": 3}
    sweep = {"list": TRIALS, "stop": {"keep": 0.34, "at": [0.25, 0.5], **stop}}
    path = root / "sweep.yaml"
    path.write_text(json.dumps({**document, "job": job, "sweep": sweep}))
    return path


def alone(sweep: Path, name: str) -> Path:
    """Writes the configuration of `tlora train` with one trial alone; returns its path."""
    document = json.loads(sweep.read_text())
    (job,) = (job for job in load_sweep(sweep).jobs if job.name == name)
    rest = {key: document[key] for key in ("base_model", "run")}
    path = sweep.with_name(f"{name}.json")
    path.write_text(json.dumps({**rest, "jobs": [job_to_dict(job)]}))
    return path


def found(output_dir: Path) -> dict[str, Any]:
    """What a sweep has chosen, and the digest of every adapter and checkpoint that it has left."""
    results = json.loads((output_dir / "sweep.json").read_text())
    ranking = [(row["trial"], row["steps"], row["reason"]) for row in results["ranking"]]
    files = sorted(output_dir.glob("jobs/*/adapter/*.safetensors"))
    files += sorted(output_dir.glob("jobs/*/checkpoints/*/*.safetensors"))
    digests = {str(file.relative_to(output_dir)): digest(file) for file in files}
    return {"rungs": results["rungs"], "ranking": ranking, "files": digests}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
