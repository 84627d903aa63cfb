"""Runs commands one after another in one process, the last of which may be killed on its way.

`entry_point_worker.py COMMANDS.json` with `[{"entry_point": "tlora" | "deepspeed", "words": [...],
"code": N, "kill_at": [JOB, STEP] | null, "environment": {...}}]`. The words are those of the
command line; `code` is its exit code. Killed is SIGKILL, when the job has done the step and every
save that was begun is on the disk. A command's environment is taken back behind it; what the
command itself has set stays.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.helpers.lean import draw_no_reports, keep_imports_from_collector
from tests.helpers.train_worker import wait_for_saves
from tlora_megatron.cli import main as tlora
from tlora_megatron.cli.train import RichProgress
from tlora_megatron.runtime.ranks import leave


def main() -> None:
    draw_no_reports()
    for command in json.loads(Path(sys.argv[1]).read_text()):
        if command["kill_at"]:
            _kill_at(*command["kill_at"])
        given: dict[str, str] = command["environment"]
        os.environ |= given
        code = _run(command["entry_point"], command["words"])
        assert code == command["code"], f"exit code {code}: {command}"
        assert command["kill_at"] is None, f"must be killed, has ended: {command}"
        for name in given:
            del os.environ[name]
        keep_imports_from_collector()


def _run(entry_point: str, words: list[str]) -> int:
    if entry_point == "tlora":
        return tlora.main(words)
    from tlora_megatron.deepspeed import __main__ as deepspeed

    # DeepSpeed keeps groups of the process group, which therefore has to last.
    deepspeed.leave_process_group = lambda: None
    return deepspeed.main(words)


def _kill_at(name: str, step: int) -> None:
    wait_for_saves()
    emit = RichProgress.emit

    def emit_and_die(self: RichProgress, kind: str, job: str | None, body: Any) -> None:
        emit(self, kind, job, body)
        if (kind, job) == ("stepped", name) and body["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    RichProgress.emit = emit_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
    leave(0)
