"""Times the life of a gang: its start, a job's way to its first step, a kill, a change of layout.

    python -m scripts.bench.live_gang --csv rows.csv                      # one GPU, 8B shapes
    python -m scripts.bench.live_gang --gpus 2 --csv rows.csv             # changes of layout on two
    python -m scripts.bench.live_gang --gpus 0 --size quickstart          # a laptop's CPU

Times are those of the controller's side: from a call of the engine to the event that it reads.
Returns 1 if a figure that must hold does not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.around_training.base import base_in
from scripts.bench.around_training.command import TEXTS, job_document
from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.processes import wait_for_turn
from scripts.bench.harness.rows import Figures, gpu_name
from tests.helpers.gang_driver import DrivenJob, GangDriver, quickstart_base
from tlora_megatron.ops.kernel_build import build, built_library
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.messages import GangFolder

_ENDLESS = 100_000
_CASES = {"8b": "8B", "six layers": "six layers", "toy": "toy", "quickstart": "quickstart"}


class Bench:
    """A gang on this host, jobs for it, and the rows that come of it."""

    def __init__(self, root: Path, base: Mapping[str, Any], world: int, args: Any) -> None:
        self.engine = LocalEngine(root, args.gpus, slots=None if args.gpus else world)
        self.world = world
        self.args = args
        self.figures = Figures(
            csv=args.csv, commit=args.commit, engine="local", gpu=gpu_name(), world=world,
            about=f"{_CASES[args.size]}: ",
        )  # fmt: skip
        self._submitted = 0
        self.driver = GangDriver(
            self.engine, root, world, base_model=base, parallel=layout(world),
            run={"micro_batch_tokens": args.tokens}, exact=False,
        )  # fmt: skip

    def close(self) -> None:
        for info in self.engine.gangs():
            self.engine.kill(info.gang, info.epoch)
        self.engine.close()

    def row(self, case: str, value: float, unit: str = "s", must: float | None = None) -> None:
        self.figures.row(case, value, unit, most=must)

    def submit(self, steps: int = _ENDLESS) -> DrivenJob:
        """Adds a job, whose batch is its share of a micro-batch."""
        number = self._submitted
        self._submitted += 1
        length = self.args.tokens // self.args.jobs
        more = {"batch_size": 2, "portion_tokens": length, "max_steps": steps}
        document = job_document(number, TEXTS, length=length, **more)
        return self.driver.submit(f"j{number}", document, checkpoint_every_s=self.args.save_every)

    def timed(self, is_reached: Callable[[], bool]) -> float:
        begin_s = time.perf_counter()
        self.driver.run_until(is_reached)
        return time.perf_counter() - begin_s

    def start(self, **more: Any) -> float:
        epoch = self.driver.start(**more).epoch
        return self.timed(
            lambda: any(e.kind == "started" and e.epoch == epoch for e in self.events)
        )

    @property
    def events(self) -> Sequence[Any]:
        return self.driver.events

    def all_step(self, beyond: int = 0) -> Callable[[], bool]:
        """Tells whether every living job has stepped that often in the gang's present epoch."""
        jobs = [job for job, driven in self.driver.jobs.items() if driven.ended is None]

        def check() -> bool:
            mine = (e for e in self.events if e.epoch == self.driver.epoch)
            counts = Counter(e.job for e in mine if e.kind == "stepped")
            return all(counts[job] > beyond for job in jobs)

        return check

    def kill_rank(self, rank: int) -> None:
        folder = GangFolder(self.driver.home.root, "g", self.driver.epoch)
        os.kill(int(folder.pid(rank).read_text().split()[0]), signal.SIGKILL)


def layout(tp_size: int) -> dict[str, Any]:
    return {"tp_size": tp_size, "sequence_parallel": tp_size > 1}


def measure_start(bench: Bench) -> None:
    """A gang's start, and the first steps of two jobs, one after the other."""
    is_large, is_small = bench.args.size == "8b", bench.args.size == "quickstart"
    must = 2.0 if is_large else 0.5 if is_small else None
    bench.row("start of a gang, nothing imported before", bench.start())
    note_start(bench)
    for words, limit in (("first job of a new gang", None), ("warm idle gang", must)):
        job = bench.submit(steps=3)
        taken_s = bench.timed(lambda j=job: bool(j.losses or j.ended))
        if not job.losses:
            raise RuntimeError(f"a job must step, got {job.ended}")
        bench.row(f"submit to first step, {words}", taken_s, must=limit)
        bench.driver.run_to_end()


def measure_life(bench: Bench) -> None:
    measure_start(bench)
    for _ in range(bench.args.jobs - 1):
        bench.submit()
    bench.timed(bench.all_step(beyond=2))
    last = bench.submit()
    bench.row("submit to first step, beside running jobs", bench.timed(lambda: bool(last.losses)))
    stalls = [event.body["stall_s"] for event in bench.events if event.kind == "joined"]
    bench.row("neighbours stand still for a join, longest", 1e3 * max(stalls[3:]), "ms")
    bench.timed(bench.all_step(beyond=3))
    measure_kill(bench)


def measure_kill(bench: Bench) -> None:
    """SIGKILL of a rank with pre-forked workers ready."""
    wait_for_spares(bench)
    epoch, deaths = bench.driver.epoch, len(bench.driver.deaths)
    bench.kill_rank(bench.world - 1)
    begin_s = time.perf_counter()
    while any(info.alive for info in bench.driver.engine.gangs()):
        time.sleep(0.005)
    bench.row("SIGKILL of a rank to its notice", 1e3 * (time.perf_counter() - begin_s), "ms")
    bench.driver.run_until(lambda: len(bench.driver.deaths) > deaths)
    bench.row("SIGKILL of a rank to the end of all", 1e3 * (time.perf_counter() - begin_s), "ms")
    bench.driver.run_until(lambda: bench.driver.epoch > epoch)
    bench.driver.run_until(bench.all_step())
    took_s = time.perf_counter() - begin_s
    base_s = note_start(bench)
    bench.row("SIGKILL of a rank to all jobs stepping again", took_s)
    bench.row("the same without loading the base", took_s - base_s, must=5.0)


def note_start(bench: Bench) -> float:
    """Notes the phases of the last start; returns that of the base."""
    body = next(event.body for event in reversed(bench.events) if event.kind == "started")
    print(json.dumps(body), flush=True)
    return float(body["base_s"])


def measure_resize(bench: Bench) -> dict[str, dict[int, float]]:
    """Changes between tensor and data parallel; returns all losses."""
    bench.start()
    note_start(bench)
    for _ in range(bench.args.jobs):
        bench.submit()
    bench.timed(bench.all_step(beyond=bench.args.steps))
    for how, change in _CHANGES.items():
        for words, tp_size in (("TP to DP", 1), ("DP to TP", bench.world)):
            case = f"resize {words}, {bench.args.jobs} jobs{how}"
            bench.row(f"{case}: of it the base", change_layout(bench, case, tp_size, change))
    measure_kill(bench)
    return {job: driven.losses for job, driven in bench.driver.jobs.items()}


def change_layout(
    bench: Bench, case: str, tp_size: int, change: Callable[[Bench, int], None]
) -> float:
    """Times a change until all jobs have stepped again; returns the seconds that the base took."""
    wait_for_spares(bench)
    begin_s = time.perf_counter()
    change(bench, tp_size)
    bench.driver.run_until(bench.all_step())
    bench.row(case, time.perf_counter() - begin_s, must=15.0)
    base_s = note_start(bench)
    bench.timed(bench.all_step(beyond=bench.args.steps))
    return base_s


def wait_for_spares(bench: Bench) -> None:
    """Waits until a pre-forked worker is ready for every rank."""
    workers = bench.engine.workers
    bench.timed(lambda: bool(workers.by_slot) and all(w.is_ready for w in workers.by_slot.values()))


def resize(bench: Bench, tp_size: int) -> None:
    """Saves all, ends the gang and starts it with another layout."""
    driver, epoch = bench.driver, bench.driver.epoch
    begin_s = time.perf_counter()
    driver.post("stop", body={"save": True})
    driver.run_until(
        lambda: any(event.kind == "stopped" and event.epoch == epoch for event in driver.events)
    )
    driver.run_until(lambda: driver.engine.kill("g", epoch))
    bench.row("resize: jobs saved, processes gone", time.perf_counter() - begin_s)
    driver.start(parallel=layout(tp_size))


_CHANGES: dict[str, Callable[[Bench, int], None]] = {
    "": resize,
    ", beside the old gang": lambda bench, tp_size: bench.driver.hand_over(
        parallel=layout(tp_size)
    ),
}
"""Jobs are saved and their gang starts anew, or move one by one to one that starts beside it."""


def compare(bench: Bench, losses: Mapping[str, Mapping[int, float]]) -> None:
    """Holds losses against those of a gang that keeps its layout."""
    steps = max(max(of_job) for of_job in losses.values())
    bench.start()
    for _ in losses:
        bench.submit()
    bench.timed(bench.all_step(beyond=steps))
    differences = [
        abs(loss - bench.driver.jobs[job].losses[step]) / abs(loss)
        for job, of_job in losses.items()
        for step, loss in of_job.items()
    ]
    bench.row("resize: largest relative difference of losses", max(differences), "", must=1e-5)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs; 0 = on the CPU")
    parser.add_argument("--world", type=int, help="processes on the CPU (default: 1)")
    parser.add_argument("--size", choices=list(_CASES), default="8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--start-only", action="store_true", help="of one process: end with the first steps"
    )
    parser.add_argument("--compare", action="store_true", help="hold losses of resized gangs")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="between two changes of layout")
    parser.add_argument("--save-every", type=float, default=5.0, help="seconds between checkpoints")
    parser.add_argument("--scratch", type=Path, help="folder for base and service")
    args = parser.parse_args(argv)
    wait_for_turn()
    with tempfile.TemporaryDirectory(dir=args.scratch, ignore_cleanup_errors=True) as folder:
        missed = measure(args, Path(folder))
    for case in missed:
        print(f"missed: {case}", file=sys.stderr)
    return int(bool(missed))


def measure(args: Any, folder: Path) -> list[str]:
    """Runs what the arguments ask for; returns the cases that are missed."""
    world = args.gpus or args.world or 1
    base = (
        quickstart_base()
        if args.size == "quickstart"
        else base_in(folder / "base", args.size, args.dtype)
    )
    if args.gpus and args.dtype == "bfloat16":
        build(built_library())  # once a machine, which is not what is timed here
    missed: list[str] = []
    losses: dict[str, dict[int, float]] = {}

    def run(name: str, work: Callable[[Bench], None]) -> None:
        bench = Bench(folder / name, base, world, args)
        try:
            work(bench)
        finally:
            bench.close()
        missed.extend(bench.figures.missed)

    if world == 1:
        run("life", measure_start if args.start_only else measure_life)
    else:
        run("resize", lambda bench: losses.update(measure_resize(bench)))
    if world > 1 and args.compare:
        run("compare", lambda bench: compare(bench, losses))
    return missed


if __name__ == "__main__":
    sys.exit(main())
