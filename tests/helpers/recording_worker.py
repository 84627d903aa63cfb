"""Trains several configurations in one set of processes and records what listeners were told.

`recording_worker.py CASES.json` with `[{"config": PATH, "output_dir": DIR}]`; the first process
writes `DIR/told.json`: `[{"round": N, "name": JOB, "step": N} | {"round": N, "name": JOB, "event":
TEXT}]` in order of time.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.lean import draw_no_reports, keep_imports_from_collector
from tlora_megatron.config.load import load_config
from tlora_megatron.runtime.controller import train_run
from tlora_megatron.training.listener import SilentListener


class Recorder(SilentListener):
    """Keeps steps and events, each with the number of the round it fell into."""

    def __init__(self) -> None:
        self.round = 1
        self.told: list[dict[str, Any]] = []

    def on_step(self, name: str, step: int, loss: float, lr: float) -> None:
        """Keeps the step."""
        self.told.append({"round": self.round, "name": name, "step": step})

    def on_round(self, tokens_per_s: float) -> None:
        """Counts."""
        self.round += 1

    def on_event(self, name: str, message: str) -> None:
        """Keeps the event."""
        self.told.append({"round": self.round, "name": name, "event": message})


def main() -> None:
    """Runs every case; all processes take part in all of them."""
    logging.basicConfig()
    logging.getLogger("tlora_megatron").setLevel(logging.INFO)
    draw_no_reports()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        recorder = Recorder()
        config = load_config(case["config"], case["set"], case["output_dir"])
        train_run(config, recorder)
        keep_imports_from_collector()
        if dist.get_rank() == 0:
            (Path(case["output_dir"]) / "told.json").write_text(json.dumps(recorder.told))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
