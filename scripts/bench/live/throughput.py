"""Tokens a second of a service's gang beside `tlora train`, for the same eight jobs.

    python -m scripts.bench.live.throughput --csv scripts/bench/results/live.csv
    python -m scripts.bench.live.throughput --before CHECKOUT             # and as it was there
    python -m scripts.bench.live.throughput --gpus 0 --size toy --seconds 10      # on a CPU

The jobs are those of `scripts.bench.step`, batches of 1 to 8, over a folder of random weights. Both
sides are what a user runs: the command, and a controller with its store and a gang of its own that
the policy `mlora` makes. Both write metrics and TensorBoard; nothing is evaluated. Tokens are read
from the jobs' `metrics.jsonl` while they train, so that both are measured by the same clock: the
slope of tokens over time. `harness.turn_parts` notes what the host of each does in a round.
Returns 1 if the service is more than 3 % slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench.around_training.base import base_in
from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.step.jobs import LONGEST, Mix, make_mixes
from tests.helpers.ruled_service import RuledService
from tlora_megatron.append_log import LineReader
from tlora_megatron.ops.kernel_build import build, built_library
from tlora_megatron.service.control.pricing import pricing_of
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.settings import Settings

MUST_OVER = 3.0
"""Percent that a service may be slower."""
_JOBS = 8
_ENDLESS = 1_000_000
_LIMIT_S = 300.0
_LOOK_S = 0.02
_SPECIAL = 2
"""Tokens that a text gets besides its characters: the tokenizer makes one of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of what is compared: how jobs are run, and by which checkout."""

    name: str
    tree: Path = REPO

    @property
    def is_live(self) -> bool:
        """True for a service."""
        return self.name.startswith("live")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One side's measurement."""

    tokens_per_s: float
    micro_batch_tokens: int
    parts_ms: Mapping[str, float]
    """Milliseconds of a round by part of `turn_parts`, `idle` among them; none without a round."""


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs all sides; returns their rows."""
    base = base_in(folder / "base", args.size, args.dtype)
    if args.gpus:
        build(built_library())  # once a machine, which is not what is timed here
    jobs = write_jobs(args, folder / "texts")
    sides = [Side(name="live"), Side(name="train")]
    if args.before is not None:
        sides.insert(1, Side(name="live before", tree=args.before.resolve()))
    found: dict[str, list[Found]] = {side.name: [] for side in sides}
    tokens = args.tokens
    for turn in range(args.turns):
        for side in sides if turn % 2 == 0 else sides[::-1]:
            own = folder / f"{side.name.replace(' ', '_')}{turn}"
            one = run_side(args, side, own, base, jobs, tokens)
            tokens = tokens or one.micro_batch_tokens
            print(side.name, one, flush=True)
            found[side.name].append(one)
    return list(rows(args, found))


def rows(
    args: argparse.Namespace, found: Mapping[str, Sequence[Found]]
) -> Iterator[dict[str, Any]]:
    """Rows of `live.csv`: speeds, ratios, and the parts of a round."""
    speeds = {
        name: float(np.mean([one.tokens_per_s for one in own])) for name, own in found.items()
    }
    shared = {"gpu": gpu_name(), "world": 1, "commit": args.commit, "engine": "local"}
    size = {"8b": "8B", "toy": "toy"}.get(args.size, args.size)

    def row(case: str, value: float, unit: str) -> dict[str, Any]:
        said = f"{size}, eight jobs of batch 1-8: {case}"
        return {**shared, "case": said, "value": f"{value:.5g}", "unit": unit}

    for name, own in found.items():
        yield row(f"{name}: speed", speeds[name], "tokens/s")
        yield row(f"{name}: micro-batch", own[-1].micro_batch_tokens, "tokens")
        for part in own[-1].parts_ms:
            mean = float(np.mean([one.parts_ms[part] for one in own if one.parts_ms]))
            yield row(f"{name}: a round: {part}", mean, "ms")
    for name in speeds:
        if name != "train":
            yield row(f"{name} over train", 100 * (speeds[name] / speeds["train"] - 1), "%")


def write_jobs(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Writes the jobs' texts; returns their entries of a configuration."""
    folder.mkdir()
    longest = LONGEST if args.size != "toy" else 64
    mixes = make_mixes(None, vocab_size=32, target_share=1.0, dropout=0.0, longest=longest)
    return [_job(mixes[0], index, folder) for index in range(len(mixes[0].specs))]


def _job(mix: Mix, index: int, folder: Path) -> dict[str, Any]:
    spec, file = mix.specs[index], folder / f"job{index}.jsonl"
    draw = np.random.default_rng(index)
    with file.open("w") as lines:
        for sequence in mix.data[index]:
            letters = draw.integers(ord("a"), ord("z") + 1, len(sequence.tokens) - _SPECIAL)
            lines.write(json.dumps({"text": "".join(map(chr, letters))}) + "\n")
    return {
        "name": spec.name,
        "data": {"train": str(file)},
        "lora": {"rank": spec.lora.rank, "alpha": 2 * spec.lora.rank},
        "batch_size": spec.batch_size,
        "max_seq_len": spec.max_seq_len,
        "max_steps": _ENDLESS,
        "seed": index,
    }


class Tokens:
    """Reads how many tokens the jobs below a folder have trained, as time goes by."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[Path, LineReader] = {}
        self._points: list[tuple[float, int]] = [(0.0, 0)]
        self.steps: dict[Path, int] = {}

    def look(self) -> None:
        """Takes note of what has been written since."""
        total = self._points[-1][1]
        for path in self._folder.glob("jobs/*/metrics.jsonl"):
            reader = self._readers.setdefault(path, LineReader(path))
            steps = [found for line in reader.read() if "loss" in (found := json.loads(line))]
            self.steps[path] = self.steps.get(path, 0) + len(steps)
            total += sum(int(step["tokens"]) for step in steps)
        if total > self._points[-1][1]:
            self._points.append((time.monotonic(), total))

    def has_steps_of_all(self) -> bool:
        """True once each of the eight jobs has stepped more than once."""
        self.look()
        return len(self.steps) == _JOBS and min(self.steps.values()) > 1

    def per_s(self, begin_s: float) -> float:
        """Tokens a second since a time: the slope of the line through all looks."""
        points = [point for point in self._points if point[0] >= begin_s]
        assert len(points) > 2, f"several rounds must fit into the time, got {len(points)}"
        times, totals = np.array(points).T
        return float(np.polyfit(times - times[0], totals, 1)[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """Jobs that a side trains."""

    folder: Path
    """Of the run: `jobs` lies in it."""
    wait: Callable[[Callable[[], bool]], None]
    """Returns as soon as something is so."""
    micro_batch_tokens: Callable[[], int]
    """Known once all jobs train."""


def run_side(
    args: argparse.Namespace,
    side: Side,
    own: Path,
    base: Mapping[str, Any],
    jobs: Sequence[Mapping[str, Any]],
    tokens: int,
) -> Found:
    """Has a side train the jobs, measures once all of them step, and ends it.

    Args:
        own: folder of all that it writes.
        tokens: rows of a micro-batch of `tlora train`.
    """
    own.mkdir()
    with package(side.tree):
        started = service(args, own, base, jobs) if side.is_live else train(own, base, jobs, tokens)
        with started as running:
            seen = Tokens(running.folder)
            running.wait(seen.has_steps_of_all)
            _look_for(args.warm, seen, running)
            begin_s, before = time.monotonic(), read_notes(own / "notes")
            _look_for(args.seconds, seen, running)
            after = read_notes(own / "notes")
            return Found(
                tokens_per_s=seen.per_s(begin_s),
                micro_batch_tokens=running.micro_batch_tokens(),
                parts_ms=parts_of_a_round(before, after),
            )


def _look_for(seconds: float, tokens: Tokens, running: Running) -> None:
    end_s = time.monotonic() + seconds

    def is_over() -> bool:
        tokens.look()
        return time.monotonic() > end_s

    running.wait(is_over)


def parts_of_a_round(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of a round by part, from notes before and behind some rounds."""
    count = after.get("rounds", 0) - before.get("rounds", 0)
    return {
        name: 1e3 * (after[name] - before.get(name, 0.0)) / count
        for name in after
        if count and name != "rounds"
    }


def read_notes(folder: Path) -> dict[str, float]:
    """What the process that trains has noted: the newest file."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    return {} if not files else dict(json.loads(files[-1].read_text()))


@contextmanager
def train(
    own: Path, base: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]], tokens: int
) -> Iterator[Running]:
    """The command `tlora train`, killed at the end."""
    run = {
        "output_dir": str(own / "run"),
        "micro_batch_tokens": tokens,
        "checkpoint_every_steps": 0,
    }
    document = {"base_model": dict(base), "run": run, "jobs": list(jobs)}
    (own / "jobs.json").write_text(json.dumps(document))
    command = [*noting(own), "train", str(own / "jobs.json")]
    with (own / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=own)

    def wait(is_reached: Callable[[], bool]) -> None:
        end_s = time.monotonic() + _LIMIT_S
        while not is_reached():
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"tlora train: {(own / 'log').read_text()[-2000:]}")
            time.sleep(_LOOK_S)

    try:
        yield Running(folder=own / "run", wait=wait, micro_batch_tokens=lambda: tokens)
    finally:
        process.kill()
        process.wait()


@contextmanager
def service(
    args: argparse.Namespace, own: Path, base: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]
) -> Iterator[Running]:
    """A controller in this process, which starts a gang for the jobs."""
    root = own / "service"
    settings = Settings(policy="mlora", checkpoint_every_s=args.save_every)
    engine = LocalEngine(
        root, args.gpus, slots=None if args.gpus else 1, worker_command=noting(own)
    )

    def micro_batch_tokens() -> int:
        (gang,) = engine.gangs()
        return int(GangFolder(root, gang.gang, gang.epoch).spec().run["micro_batch_tokens"])

    with RuledService(root, engine, pricing_of(engine.nodes(), settings), base, settings) as ruled:
        ruled.submit(*({**job, "service": {"max_slowdown": 1000.0}} for job in jobs))
        yield Running(
            folder=root,
            wait=lambda is_reached: ruled.until(is_reached, "the jobs train", _LIMIT_S),
            micro_batch_tokens=micro_batch_tokens,
        )


def noting(own: Path) -> tuple[str, ...]:
    """The command of a process that notes its parts."""
    script = REPO / "scripts" / "bench" / "harness" / "turn_parts.py"
    return (sys.executable, str(script), str(own / "notes"))


@contextmanager
def package(tree: Path) -> Iterator[None]:
    """Has processes that are started inside find the package in a checkout."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def missed(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says where a service is slower than it may be."""
    case = next(row for row in found if row["case"].endswith(": live over train"))
    if float(case["value"]) >= -MUST_OVER:
        return []
    return [f"{case['case']} must be at least -{MUST_OVER:g} %, got {case['value']}"]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--size", choices=("8b", "six layers", "toy"), default="8b", help="of the base")
    add("--dtype", default="bfloat16")
    add("--gpus", type=int, choices=(0, 1), default=1, help="0 = on the CPU")
    add("--before", type=Path, help="a checkout whose gang is measured, too")
    add("--tokens", type=int, help="rows of a micro-batch (default: those of the gang)")
    add("--turns", type=int, default=1, help="of each side")
    add("--seconds", type=float, default=25.0, help="that each side is measured")
    add("--warm", type=float, default=6.0, help="seconds of steps before that")
    add("--save-every", type=float, default=60.0, help="seconds, of the service")
    add("--scratch", type=Path, help="folder for base and service")
    args = parser.parse_args(argv)
    if args.gpus > torch.cuda.device_count():
        parser.error(f"--gpus must be 0 on a machine without a GPU, got {args.gpus}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all sides and appends their rows; returns the exit code."""
    args = arguments(argv)
    with tempfile.TemporaryDirectory(dir=args.scratch, ignore_cleanup_errors=True) as folder:
        found = measure(args, Path(folder))
    for row in found:
        print(f"{row['case']}: {row['value']} {row['unit']}", flush=True)
    if args.csv is not None:
        append_rows(args.csv, found)
    too_slow = missed(found)
    print(*too_slow, sep="\n", file=sys.stderr)
    return int(bool(too_slow))


if __name__ == "__main__":
    sys.exit(main())
