"""Trains configurations one after another, some of which are stopped or killed on their way.

`train_worker.py CASES.json` with `[{"config": PATH, "output_dir": DIR, "set": [...]}]`; a case may
have `"stop": [JOB, STEP]`, `"kill": [MOMENT, COUNT]`, `"signal": [NUMBER, RANK, COUNT]` or
`"report": true` (no run writes a report unless a case asks for one), and `"sweep": true` for the
file of a sweep. Stopped is an error raised in the loop, after which the next case runs; killed is
SIGKILL; signalled is one process at its COUNTth step of a job, by which all must stop. In one
process cases of which any is killed run in forks, and a kill ends that alone; under torchrun it
ends everything, so it stands last.

Each life of a run adds the steps its jobs started at to `DIR/starts.jsonl`, and at its end leaves
`DIR/events.json`: `[{"round": N, "name": JOB, "step": N} | {"round": N, "name": JOB,
"event": TEXT}]` in order of time.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.lean import draw_no_reports, keep_imports_from_collector
from tlora_megatron.config.load import load_config, load_sweep
from tlora_megatron.runtime.controller import train_run
from tlora_megatron.training.formats import atomic_directory, checkpoint
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.saving.saver import Saver, Target
from tlora_megatron.training.signals import StopSignals

MOMENTS = ("step", "write", "flush", "remove", "export")
"""A job's step; tensors of a checkpoint about to be written; a file or folder of a checkpoint or
adapter about to be flushed; an old folder half removed; or only a file of an adapter."""


class Stop(Exception):
    """Ends a run on its way, on every rank at the same point."""


class Recorder:
    """Notes where jobs start, and steps and events with the round they fell into; may stop the run.

    Args:
        on_step: called at every step, before the stop.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        stop: tuple[str, int] | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._output_dir, self._stop, self._on_step = output_dir, stop, on_step
        self.round = 1
        self.events: list[dict[str, Any]] = []

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        if kind == "begun" and int(os.environ.get("RANK", "0")) == 0:
            with (self._output_dir / "starts.jsonl").open("a") as file:
                file.write(json.dumps({name: at[0] for name, at in body["jobs"].items()}) + "\n")
        if kind == "progress":
            self.round = body["rounds"] + 1
        if kind == "note":
            self.events.append({"round": self.round, "name": job, "event": body["message"]})
        if kind == "stepped":
            self.events.append({"round": self.round, "name": job, "step": body["step"]})
            self._on_step()
            if (job, body["step"]) == self._stop:
                raise Stop(f"{job} has done {body['step']} steps")


def starts(output_dir: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (output_dir / "starts.jsonl").read_text().splitlines()]


def train_until(
    config: Path, output_dir: Path, *overrides: str, stop: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Trains in this process; returns the summary, empty if the run was stopped."""
    loaded = load_config(config, overrides, str(output_dir))
    try:
        return train_run(loaded, Recorder(output_dir, stop=stop))
    except Stop:
        return {}


def main() -> None:
    logging.basicConfig()
    logging.getLogger("tlora_megatron").setLevel(logging.INFO)
    cases = json.loads(Path(sys.argv[1]).read_text())
    if not any(case.get("report") for case in cases):
        draw_no_reports()
    forks = "RANK" not in os.environ and any(case.get("kill") for case in cases)
    for case in cases:
        if forks:
            code = in_fork(functools.partial(_run, case))
            assert code == (-signal.SIGKILL if case.get("kill") else 0), f"{case}: exit code {code}"
        else:
            _run(case)
            keep_imports_from_collector()
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def in_fork(act: Callable[[], None]) -> int:
    """Exit code of a fork that acts and ends."""
    # Once for all forks: it takes longer than a case.
    import tlora_megatron.integrations.megatron.engine  # noqa: F401

    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run(case: dict[str, Any]) -> None:
    output_dir = Path(case["output_dir"])
    stop = tuple(case["stop"]) if case.get("stop") else None
    on_step = _arm(*case["kill"]) if case.get("kill") else lambda: None
    number, rank, count = case.get("signal") or (0, 0, 0)
    if number and rank == int(os.environ.get("RANK", "0")):
        on_step = at(count, number)
    load = load_sweep if case.get("sweep") else load_config
    config = load(case["config"], case["set"], case["output_dir"])
    recorder = Recorder(output_dir, stop=stop, on_step=on_step)
    signals = StopSignals(speaks=False)
    with signals.install():
        try:
            train_run(config, recorder, signals)
        except Stop:
            return
    assert signals.stopped_by == number, f"stopped by {signals.stopped_by}"
    if int(os.environ.get("RANK", "0")) == 0:
        (output_dir / "events.json").write_text(json.dumps(recorder.events))


def at(count: int, number: int) -> Callable[..., None]:
    """Returns what signals this process when it is called the `count`th time."""
    calls = itertools.count(1)

    def tick(*_: Any) -> None:
        if next(calls) == count:
            os.kill(os.getpid(), number)

    return tick


def wait_for_saves() -> None:
    """Has every save wait until it is on the disk, so that moments repeat."""
    save = Saver.save

    def save_and_wait(saver: Saver, job: JobState, targets: Sequence[Target]) -> None:
        save(saver, job, targets)
        saver.drain()

    Saver.save = save_and_wait


def _arm(moment: str, count: int) -> Callable[[], None]:
    """Prepares the kill of the writer's process; returns what to call at every step."""
    assert moment in MOMENTS, f"moment must be one of {MOMENTS}, got {moment!r}"
    wait_for_saves()
    is_writer = int(os.environ.get("RANK", "0")) == 0
    tick = at(count, signal.SIGKILL) if is_writer else lambda *_: None
    if moment == "step":
        return tick
    if moment == "write":
        checkpoint.write_tensors = before(tick, checkpoint.write_tensors)
    elif moment == "flush":
        atomic_directory.flush = before(tick, atomic_directory.flush)
    elif moment == "export":
        flush = before(tick, atomic_directory.flush), atomic_directory.flush
        atomic_directory.flush = lambda path: flush["/.adapter." not in str(path)](path)
    else:
        remove = checkpoint.remove_directory
        checkpoint.remove_directory = before(lambda path: (_remove_half(path), tick()), remove)
    return lambda: None


def before(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args[:1])
        return then(*args, **kwargs)

    return both


def _remove_half(path: Path) -> None:
    files = sorted(Path(path).iterdir())
    for file in files[: len(files) // 2]:
        file.unlink()


if __name__ == "__main__":
    main()
