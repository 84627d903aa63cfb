"""DeepSpeed configurations over the losslessness scenario, and the runs of a world at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import scenario_worlds

WORKER = Path(__file__).with_name("deepspeed_worker.py")


def zero(stage: int, **section: Any) -> dict[str, Any]:
    """A DeepSpeed JSON without jobs; at stage 3 every weight is cut, however small."""
    cut = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, **cut, **section}}


def write_config(path: Path, deepspeed: Mapping[str, Any], tlora: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps({**deepspeed, "tlora": tlora}))
    return path


def run_cases(world_size: int, cases: Sequence[Mapping[str, Any]], path: Path) -> str:
    summaries = [Path(case["output_dir"]) / "summary.json" for case in cases]
    with may_abort_behind(*summaries):
        return scenario_worlds.run_cases(world_size, cases, path, worker=WORKER)
    return ""


@contextmanager
def may_abort_behind(*last: Path) -> Iterator[None]:
    """Takes a world as done that has left its last files and then aborted.

    About one of DeepSpeed's worlds in thirty does, behind the worker's last line ("terminate called
    without an active exception"). A world that hangs there or fails otherwise has failed.
    """
    for file in last:
        file.unlink(missing_ok=True)  # an earlier world's would prove nothing
    try:
        yield
    except AssertionError as error:
        aborted = re.search(r"SIGABRT|exit -6\b", str(error))
        if not aborted or not all(file.is_file() for file in last):
            raise
