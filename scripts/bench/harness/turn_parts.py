"""A process that trains and notes what the host does in its rounds, whichever checkout it runs.

    python scripts/bench/harness/turn_parts.py FOLDER train jobs.yaml   # `tlora train`
    python scripts/bench/harness/turn_parts.py FOLDER [--forks]         # a pre-forked worker

Every second it writes `FOLDER/PID.json`: rounds, and the seconds of each part since the start. A
part inside another one takes its time away from it. `idle` is no part: for so long a GPU had
nothing to do between a round's last kernel and the next one's first.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PARTS = ("commands", "pack", "launch", "step and wait", "metrics", "save", "evaluate", "rest")
_EVERY_S = 1.0


class Parts:
    """Seconds of each part, and of the GPU's idling, in one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open = ["rest"]
        self._since_s = self._told_s = time.perf_counter()
        self._rounds = 0
        self._idle_s = 0.0
        self._end: Any = None
        self._gaps: list[tuple[Any, Any]] = []
        """Ends and next begins on the device that it has yet to reach."""

    def count(self, owner: Any, name: str, part: str) -> None:
        """Counts a function's time towards a part, where the checkout has it."""
        plain = vars(owner).get(name)
        if plain is None:
            return

        @functools.wraps(plain)
        def counted(*args: Any, **more: Any) -> Any:
            self._switch()
            self._open.append(part)
            try:
                return plain(*args, **more)
            finally:
                self._switch()
                self._open.pop()

        setattr(owner, name, counted)

    def after(self, owner: Any, name: str, call: Callable[[], None]) -> None:
        """Calls something behind every call of a function."""
        plain = vars(owner)[name]

        @functools.wraps(plain)
        def followed(*args: Any, **more: Any) -> Any:
            found = plain(*args, **more)
            call()
            return found

        setattr(owner, name, followed)

    def before_launch(self) -> None:
        """Notes on the device that a round's kernels begin."""
        self._rounds += 1
        if self._end is not None:
            self._gaps.append((self._end, _mark()))

    def behind_step(self) -> None:
        """Notes on the device that a round's kernels end here."""
        while self._gaps and self._gaps[0][1].query():
            end, begin = self._gaps.pop(0)
            self._idle_s += end.elapsed_time(begin) / 1e3
        self._end = _mark()
        if time.perf_counter() - self._told_s > _EVERY_S:
            self._tell()

    def _tell(self) -> None:
        self._switch()
        self._told_s = self._since_s
        found = {"rounds": self._rounds, "idle": self._idle_s, **self._seconds}
        path = self._folder / f"{os.getpid()}.json"
        path.with_suffix(".tmp").write_text(json.dumps(found))
        os.replace(path.with_suffix(".tmp"), path)

    def _switch(self) -> None:
        now_s = time.perf_counter()
        self._seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


def _mark() -> Any:
    """An event on the device's stream; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def note(folder: Path) -> None:
    """Has this process note its parts from now on."""
    from tlora_megatron.training import super_model

    folder.mkdir(parents=True, exist_ok=True)
    parts, model = Parts(folder), super_model.SuperModel
    for place, name, part in (
        ("commands:JobCommands", "_word", "commands"),
        ("commands:JobCommands", "_at_boundary", "commands"),
        ("resident.staging:Agreement", "begin", "commands"),
        ("resident.staging:Agreement", "read", "commands"),
        ("resident.client_steps:RequestExecutor", "advance", "commands"),
        ("super_model:SuperModel", "begin_round", "pack"),
        ("super_model:SuperModel", "train_round", "launch"),
        ("super_model:SuperModel", "end_round", "rest"),
        ("super_model", "step_adapters", "step and wait"),
        ("loop:Loop", "note_step", "metrics"),
        ("job_saves:JobSaves", "save", "save"),
        ("loop:Loop", "evaluate_part", "evaluate"),
    ):
        with suppress(ImportError, AttributeError):  # an older checkout
            parts.count(pkgutil.resolve_name(f"tlora_megatron.training.{place}"), name, part)
    parts.after(model, "begin_round", parts.before_launch)
    parts.after(super_model, "step_adapters", parts.behind_step)


def main(argv: list[str]) -> int:
    """Notes, and does what the arguments say."""
    sys.path.pop(0)  # this folder, whose modules have common names
    folder = Path(argv[0])
    note(folder)
    if argv[1:2] == ["train"]:
        from tlora_megatron.cli.main import main as command

        return int(command(argv[1:]) or 0)
    from tlora_megatron.service.worker import preforked

    return preforked.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
