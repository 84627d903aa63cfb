"""DeepSpeed configurations over the losslessness scenario, and the runs of a world at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.launch import python, torchrun

WORKER = Path(__file__).with_name("deepspeed_worker.py")


def zero(stage: int, **section: Any) -> dict[str, Any]:
    """A DeepSpeed JSON without jobs; at stage 3 every weight is cut, however small."""
    cut = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, **cut, **section}}


def write_config(path: Path, deepspeed: Mapping[str, Any], tlora: Mapping[str, Any]) -> Path:
    """Writes a DeepSpeed JSON with its section."""
    path.write_text(json.dumps({**deepspeed, "tlora": tlora}))
    return path


def run_cases(
    world_size: int, cases: Sequence[Mapping[str, Any]], path: Path, *, timeout: float = 600
) -> str:
    """Trains all cases in one set of processes; returns what they wrote.

    DeepSpeed's processes sometimes abort behind their last line (about one world in thirty), so a
    world that left every case's summary has not failed.
    """
    path.write_text(json.dumps(list(cases)))
    try:
        if world_size == 1:
            return python(WORKER, path, timeout=timeout)
        return torchrun(WORKER, world_size, path, timeout=timeout)
    except AssertionError:
        if all((Path(case["output_dir"]) / "summary.json").is_file() for case in cases):
            return ""
        raise
