"""Runs schedules of joining and leaving jobs on one standing world, and a run without disturbance.

`resident_worker.py CASES.json`, with cases as `tests.helpers.resident_case.Case` describes them.
Commands come in behind a given round, on the first rank's mailbox.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tlora_megatron.config.load import read_gang_config
from tlora_megatron.runtime.resident import open_resident


class Script:
    """A mailbox whose commands come at fixed rounds, and which ends the loop when all is done.

    Rounds are counted by calls of `take`; an idle loop goes on at once, to the next command.
    """

    def __init__(self, commands: Sequence[tuple[int, Mapping[str, Any]]], names: set[str]) -> None:
        self._commands = sorted(commands, key=lambda pair: pair[0])
        self._left = names
        self._prepared: set[str] = set()
        self._looks = 0
        self.events: list[tuple[str, str | None, Mapping[str, Any]]] = []

    def tell(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        self.events.append((kind, job, body))
        if kind in ("ended", "left", "refused") and job is not None:
            self._left.discard(job)

    def wait(self, seconds: float) -> None:
        """An idle loop does not wait for its next command, only for a job that is prepared."""

    def take(self) -> list[Mapping[str, Any]]:
        self._looks += 1
        due = [mail for look, mail in self._commands if look <= self._looks]
        self._commands = [pair for pair in self._commands if pair[0] > self._looks]
        if not self._commands and not self._left and not due:
            return [{"kind": "stop", "body": {"save": False}}]
        return due


def main() -> None:
    """Runs every case; all processes take part in all of them."""
    for case in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(case["folder"])
        config = read_gang_config(case["sections"], folder, output_dir=case["output_dir"])
        script = Script([tuple(pair) for pair in case["commands"]], set(case["jobs"]))
        with open_resident(config, tell=script.tell) as loop:
            loop.serve(script if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            Path(case["output_dir"], "events.json").write_text(json.dumps(script.events))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
