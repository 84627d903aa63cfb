"""Runs `tlora train`'s loop on a world whose jobs change behind given rounds.

`live_run_worker.py CASES.json` with `[{"config": PATH, "output_dir": DIR, "set": [...],
"requests": [[ROUND, BODY], ...]}]`. What is answered goes to `answers.json` beside the run's files;
a request comes in once all before it are answered. Rounds wait while a job is prepared, so that a
fast machine has not trained the others to their ends before it joins.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.lean import draw_no_reports, keep_imports_from_collector
from tlora_megatron.config.load import load_config
from tlora_megatron.runtime import controller
from tlora_megatron.runtime.controller import train_run
from tlora_megatron.training.resident.staging import Order, Stager
from tlora_megatron.training.run.output_dir import LiveFolder, Request, with_live_changes
from tlora_megatron.training.signals import StopSignals


class Script(LiveFolder):
    requests: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    """Requests of the next run."""

    def __init__(self, output_dir: Path) -> None:
        super().__init__(output_dir)
        self._looks = 0
        self._left = list(self.requests)
        self._answers: list[Mapping[str, Any]] = []
        self._file = output_dir / "answers.json"

    @property
    def has_requests(self) -> bool:
        self._looks += 1
        is_answered = len(self._answers) == len(self.requests) - len(self._left)
        return bool(self._left) and is_answered and self._looks >= self._left[0][0]

    def take(self) -> list[Request]:
        return [Request("x", self._left.pop(0)[1])]

    def answer(self, number: str, body: Mapping[str, Any]) -> None:
        self._answers.append(body)
        self._file.write_text(json.dumps(self._answers))


class WaitedStager(Stager):
    """Returns from an order when the job is ready or refused."""

    def order(self, name: str, order: Order) -> None:
        super().order(name, order)
        while self.found(name) is None:
            time.sleep(0.001)


def main() -> None:
    draw_no_reports()
    controller.open_folder = Script
    controller.Stager = WaitedStager
    for case in json.loads(Path(sys.argv[1]).read_text()):
        config = load_config(case["config"], case["set"], case["output_dir"])
        config, _ = with_live_changes(config)
        Script.requests = tuple(case["requests"])
        train_run(config, signals=StopSignals(speaks=False))
        keep_imports_from_collector()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
