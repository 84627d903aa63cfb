"""The parts of the smoke run: benchmarks of this folder with few repetitions, each a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.bench.around_training.base import shape_of
from scripts.bench.harness.arguments import REPO
from scripts.bench.harness.processes import TURN

_GRACE_S = 15.0
_STEP = "--precisions bf16 fp8 --modes floor together"
_MIX = ("--mixes", "batch 1-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A benchmark and the words of its command line."""

    name: str
    words: tuple[str, ...]
    starts_ahead: bool = False
    """It is started while the part before it measures, and waits with its imports done."""
    shares_turn: bool = False
    """It measures beside the part before it, for whose starting both wait most of the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The end of a part."""

    seconds: float
    """From its turn on."""
    failure: str = ""
    """Why it has no rows; empty = it has."""
    output: str = ""


class Running:
    """A part's process, whose output and rows go to files of a folder."""

    def __init__(self, part: Part, work: Path, commit: str) -> None:
        stem = part.name.replace(" ", "_")
        self.rows, self._log = work / f"{stem}.csv", work / f"{stem}.log"
        self._turn = work / f"{stem}.turn"
        command = [sys.executable, "-m", *part.words]
        command += ["--csv", str(self.rows), "--commit", commit]
        with self._log.open("w") as sink:
            streams = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": subprocess.STDOUT}
            env = os.environ | {TURN: str(self._turn)}
            # In a session of its own all its processes can be ended.
            own = {"cwd": REPO, "env": env, "start_new_session": True}
            self._process = subprocess.Popen(command, **streams, **own)

    def begin(self) -> None:
        """Gives it its turn."""
        self._turn.touch()

    def finish(self, timeout_s: float) -> Ended:
        """Waits for its end; behind the timeout it is ended."""
        begin_s = time.monotonic()
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            self.end()
        output = self._log.read_text(errors="replace")
        why = {0: "", None: f"took over {timeout_s:g} s"}.get(code, f"exit status {code}")
        if why:
            lines = [line.strip() for line in output.splitlines() if line.strip()]
            errors = [line for line in lines if "Error" in line or "error:" in line]
            why = f"{why}: {(errors or lines or ['no output'])[-1][:300]}"
        return Ended(seconds=time.monotonic() - begin_s, failure=why, output=output)

    def end(self) -> None:
        """Interrupts it, so that it ends what it has started; then kills what is left."""
        if self._process.poll() is not None:
            return
        for number in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)


def run_parts(
    parts: Sequence[Part], work: Path, commit: str, timeout_s: float
) -> Iterator[tuple[Part, Ended, Path]]:
    """Runs parts one after another; yields each with the file of its rows."""
    ahead: Running | None = None
    running: Running | None = None
    try:
        for index, part in enumerate(parts):
            running, ahead = ahead or Running(part, work, commit), None
            following = parts[index + 1] if index + 1 < len(parts) else None
            if following is not None and following.starts_ahead:
                ahead = Running(following, work, commit)
            running.begin()
            if ahead is not None and following is not None and following.shares_turn:
                ahead.begin()
            yield part, running.finish(timeout_s), running.rows
    finally:
        for left in (running, ahead):
            if left is not None:
                left.end()


def parts_on_gpu(checkout: Path, layers: int | None) -> list[Part]:
    """The parts on a GPU, with few repetitions.

    The gang's jobs run in front of the command: kernels of its shapes are built then. Under the
    flag, half of 8B's layers have the ratio of all. A GPU with less memory has fewer in the step.
    """
    cut = () if layers is None else ("--layers", str(layers))
    flag = ("--megatron-lm", str(checkout), "--layers", "16")
    bf16 = "--precision bf16 --modes own --turns 1 --rounds 4"
    fp8 = "--precision fp8 --modes own floor --turns 1 --rounds 4"
    engine = "flag_speed --impl transformer_engine"
    return [
        _part("step", f"step {_STEP} --turns 2 --rounds 2 --warmup 1", *_MIX, *cut),
        _part("flag local", f"flag_speed --impl local {bf16}", *flag, ahead=True),
        _part("flag te bf16", f"{engine} {bf16}", *flag, ahead=True),
        _part("flag te fp8", f"{engine} {fp8}", *flag, ahead=True),
        _part("submit", "live_gang --start-only --gpus 1 --size", "six layers", ahead=True),
        replace(
            _part("train", "around_training --users-caches --cases", "six layers", ahead=True),
            shares_turn=True,
        ),
    ]


def toy_parts(checkout: Path | None, work: Path) -> list[Part]:
    """The parts on a CPU, over models of two layers; under the flag the local spec alone."""
    model = work / "toy.json"
    model.write_text(json.dumps(shape_of("toy")))
    step = f"step {_STEP} --turns 1 --rounds 1 --warmup 1 --tokens 512"
    flag = "flag_speed --model toy --tokens 256 --turns 1 --rounds 1 --modes own"
    gang = "live_gang --start-only --gpus 0 --size toy --dtype float32 --tokens 2048"
    parts = [_part("step", step, "--model", str(model), *_MIX)]
    if checkout is not None:
        parts.append(_part("flag local", flag, "--megatron-lm", str(checkout), ahead=True))
    train = _part("train", "around_training --users-caches --cases toy")
    return [*parts, _part("submit", gang), train]


def _part(name: str, command: str, *more: str, ahead: bool = False) -> Part:
    words = (*f"scripts.bench.{command}".split(), *more)
    return Part(name=name, words=words, starts_ahead=ahead)


def skipped_on_cpu(checkout: Path | None) -> Mapping[str, str]:
    """Parts that a CPU leaves out, and why."""
    engine = dict.fromkeys(("flag te bf16", "flag te fp8"), "needs a GPU and Transformer Engine")
    missing = {"flag local": "needs MEGATRON_LM_PATH to name a Megatron-LM checkout"}
    return engine if checkout is not None else missing | engine
