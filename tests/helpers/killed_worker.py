"""Trains a run that is killed at random moments of its saves until it reaches its end.

`killed_worker.py LIFE.json` is one life: `{"config": PATH, "set": [...], "output_dir": DIR,
"seed": N | null}`. The seed chooses the process, the kind of moment and the count; none = no kill.
The disk is slow, so that saves are under way while the jobs train.

`DIR/saved.txt` gets a line `JOB STEP` whenever a checkpoint is called saved.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.lean import draw_no_reports
from tests.helpers.train_worker import at, before
from tlora_megatron.config.load import load_config
from tlora_megatron.runtime.controller import train_run
from tlora_megatron.training.formats import atomic_directory
from tlora_megatron.training.formats.checkpoint import find_checkpoint
from tlora_megatron.training.saving import saver
from tlora_megatron.training.saving.snapshot import SnapshotTaker

MOMENTS = {
    "snapshot": 24,
    "write": 500,
    "flush": 60,
    "exchange": 12,
    "delete": 20,
    "any": 2000,
}
"""A buffer about to be copied, a tensor to be written, a file or folder to be flushed, a folder to
get its name, a file to be deleted, and any time, with the largest count; milliseconds for the
last."""


class Killed(Exception):
    """A life ended by its kill."""


def outlive(run_life: Callable[[dict[str, Any]], None], life: dict[str, Any], kills: int) -> None:
    """Starts lives until `kills` of them were killed and the last run has reached its end.

    A run that reaches its end earlier is followed by a new one in `output_dir` + 1, 2, ...

    Args:
        run_life: raises `Killed` if the life was killed.
    """
    done, number, seed = 0, 0, life["seed"]
    while True:
        seed += 1
        output_dir = f"{life['output_dir']}{number}"
        one = {**life, "output_dir": output_dir, "seed": seed if done < kills else None}
        try:
            run_life(one)
        except Killed:
            done += 1
            check_saved(Path(output_dir))
            print(f"kill {done}: seed {seed} in {output_dir}", flush=True)
            continue
        check_saved(Path(output_dir))
        if done >= kills:
            return
        number += 1


def check_saved(output_dir: Path) -> None:
    """Nothing that was called saved is lost, and every newest checkpoint can be read."""
    log = output_dir / "saved.txt"
    lines = log.read_text().splitlines() if log.exists() else []
    for name, step in (line.split() for line in lines):
        found = find_checkpoint(output_dir / "jobs" / name / "checkpoints")
        assert found is not None, f"{name} was saved at step {step}"
        assert found.step >= int(step), f"{name} was saved at step {step}, found {found.step}"


def main() -> None:
    draw_no_reports()
    live(json.loads(Path(sys.argv[1]).read_text()))
    dist.barrier()
    dist.destroy_process_group()


def live(life: dict[str, Any]) -> None:
    _slow_disk()
    _note_saves(Path(life["output_dir"]))
    if life["seed"] is not None:
        _arm(random.Random(life["seed"]))
    config = load_config(life["config"], life["set"], life["output_dir"])
    train_run(config)


def _slow_disk() -> None:
    pwrite = os.pwrite

    def slow(*args: Any) -> int:
        time.sleep(0.0003)
        return pwrite(*args)

    os.pwrite = slow


def _note_saves(output_dir: Path) -> None:
    write = saver.write_checkpoint

    def noted(directory: Path, step: int, *args: Any) -> int:
        size = write(directory, step, *args)
        with (output_dir / "saved.txt").open("a") as file:
            file.write(f"{directory.parent.name} {step}\n")
        return size

    saver.write_checkpoint = noted


def _arm(chance: random.Random) -> None:
    """Prepares the kill; only the writer's process has moments of writing."""
    victim = chance.randrange(int(os.environ.get("WORLD_SIZE", "1")))
    moment = chance.choice(list(MOMENTS))
    left = chance.randint(1, MOMENTS[moment])
    if int(os.environ.get("RANK", "0")) != (victim if moment in ("snapshot", "any") else 0):
        return
    if moment == "any":
        threading.Timer(left / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return
    places: dict[str, list[tuple[Any, str]]] = {
        "snapshot": [(SnapshotTaker, "_copy")],
        "write": [(os, "pwrite")],
        "flush": [(atomic_directory, "flush")],
        "exchange": [(atomic_directory, "_swap"), (os, "rename")],
        "delete": [(os, "unlink"), (os, "rmdir")],
    }
    tick = at(left, signal.SIGKILL)
    for owner, name in places[moment]:
        setattr(owner, name, before(tick, getattr(owner, name)))


if __name__ == "__main__":
    main()
