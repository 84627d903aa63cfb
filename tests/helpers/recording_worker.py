"""Trains several configurations in one set of processes and records the events of their loops.

`recording_worker.py CASES.json` with `[{"config": PATH, "output_dir": DIR}]`; the first process
writes `DIR/events.json`: `[{"round": N, "name": JOB, "step": N} | {"round": N, "name": JOB,
"event": TEXT}]` in order of time.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.lean import draw_no_reports, keep_imports_from_collector
from tlora_megatron.config.load import load_config
from tlora_megatron.runtime.controller import train_run


class Recorder:
    """Keeps steps and events, each with the number of the round it fell into."""

    def __init__(self) -> None:
        self.round = 1
        self.events: list[dict[str, Any]] = []

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        if kind == "progress":
            self.round = body["rounds"] + 1
        elif kind == "stepped":
            self.events.append({"round": self.round, "name": job, "step": body["step"]})
        elif kind == "note":
            self.events.append({"round": self.round, "name": job, "event": body["message"]})


def main() -> None:
    logging.basicConfig()
    logging.getLogger("tlora_megatron").setLevel(logging.INFO)
    draw_no_reports()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        recorder = Recorder()
        config = load_config(case["config"], case["set"], case["output_dir"])
        train_run(config, recorder)
        keep_imports_from_collector()
        if dist.get_rank() == 0:
            (Path(case["output_dir"]) / "events.json").write_text(json.dumps(recorder.events))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
