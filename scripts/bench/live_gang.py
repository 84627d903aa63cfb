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
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from scripts.bench.around_training.base import base_in
from scripts.bench.around_training.cases import RANKS, TEXTS
from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.rows import append_rows, gpu_name
from scripts.bench.harness.turn import wait_for_turn
from tests.helpers.gang_driver import DrivenJob, GangDriver, quickstart_base
from tlora_megatron.ops.kernel_build import build, built_library
from tlora_megatron.service.engines.local import COMMAND as WORKER_COMMAND
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.messages import GangFolder

_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ENDLESS = 100_000
_CASES = {"8b": "8B", "six layers": "six layers", "toy": "toy", "quickstart": "quickstart"}


class Bench:
    """A gang on this host, jobs for it, and the rows that come of it."""

    def __init__(self, root: Path, base: Mapping[str, Any], world: int, args: Any) -> None:
        worker: Sequence[str] = WORKER_COMMAND
        if args.stacks is not None:
            worker = (sys.executable, "-m", "scripts.bench.harness.stacks", str(args.stacks))
        self.engine = LocalEngine(
            root, args.gpus, slots=None if args.gpus else world, worker_command=worker
        )
        self.world = world
        self.args = args
        self._gpu = gpu_name()
        self.missed: list[str] = []
        self._submitted = 0
        self.driver = GangDriver(
            self.engine,
            root,
            world,
            base_model=base,
            parallel=layout(world),
            run={"micro_batch_tokens": args.tokens},
            exact=False,
        )

    def close(self) -> None:
        """Ends all processes."""
        for info in self.engine.gangs():
            self.engine.kill(info.gang, info.epoch)
        self.engine.close()

    def row(self, case: str, value: float, unit: str = "s", must: float | None = None) -> None:
        """Notes one figure, and whether it is one that must hold."""
        limit = "" if must is None else f" (must {must:g})"
        print(f"{case}: {value:.4g} {unit}{limit}", flush=True)
        if must is not None and value > must:
            self.missed.append(case)
        found = {
            "gpu": self._gpu,
            "world": self.world,
            "commit": self.args.commit,
            "engine": "local",
            "case": f"{_CASES[self.args.size]}: {case}",
            "value": f"{value:.4g}",
            "unit": unit,
        }
        if self.args.csv is not None:
            append_rows(self.args.csv, [found])

    def submit(self, steps: int = _ENDLESS) -> DrivenJob:
        """Adds a job, whose batch is its share of a micro-batch."""
        number = self._submitted
        self._submitted += 1
        texts = sorted(path for path in TEXTS.glob("*.jsonl") if not path.stem.endswith("_eval"))
        text = next(islice(cycle(texts), number, None))
        rank, length = RANKS[number % len(RANKS)], self.args.tokens // self.args.jobs
        document = {
            "name": f"job{number}",
            "data": {"train": str(text.resolve())},
            "lora": {"rank": rank, "alpha": 2 * rank, "target_modules": _LINEARS},
            "batch_size": 2,
            "max_seq_len": length,
            "portion_tokens": length,
            "max_steps": steps,
            "optimizer": {"lr": 1e-4},
        }
        return self.driver.submit(f"j{number}", document, checkpoint_every_s=self.args.save_every)

    def timed(self, is_reached: Callable[[], bool]) -> float:
        """Seconds until something is true."""
        begin_s = time.perf_counter()
        self.driver.run_until(is_reached)
        return time.perf_counter() - begin_s

    def start(self, **more: Any) -> float:
        """Starts the gang's next epoch; returns the seconds until it has."""
        epoch = self.driver.start(**more).epoch
        return self.timed(
            lambda: any(e.kind == "started" and e.epoch == epoch for e in self.events)
        )

    @property
    def events(self) -> Sequence[Any]:
        """All events so far."""
        return self.driver.events

    def all_step(self, beyond: int = 0) -> Callable[[], bool]:
        """Tells whether every living job has stepped that often in the gang's present epoch."""
        jobs = [job for job, driven in self.driver.jobs.items() if driven.ended is None]

        def check() -> bool:
            counts = dict.fromkeys(jobs, 0)
            for event in self.events:
                if event.kind == "stepped" and event.epoch == self.driver.epoch:
                    counts[event.job] = counts.get(event.job, 0) + 1
            return all(counts[job] > beyond for job in jobs)

        return check

    def kill_rank(self, rank: int) -> None:
        """SIGKILLs one rank."""
        folder = GangFolder(self.driver.home.root, "g", self.driver.epoch)
        os.kill(int(folder.pid(rank).read_text().split()[0]), signal.SIGKILL)


def layout(tp_size: int) -> dict[str, Any]:
    """The section `parallel`."""
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
    """Start, first steps, joins, and a kill."""
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
    begin_s, begin_at = time.perf_counter(), time.time()
    while any(info.alive for info in bench.driver.engine.gangs()):
        time.sleep(0.005)
    bench.row("SIGKILL of a rank to its notice", 1e3 * (time.perf_counter() - begin_s), "ms")
    bench.driver.run_until(lambda: len(bench.driver.deaths) > deaths)
    bench.row("SIGKILL of a rank to the end of all", 1e3 * (time.perf_counter() - begin_s), "ms")
    bench.driver.run_until(lambda: bench.driver.epoch > epoch)
    bench.driver.run_until(bench.all_step())
    took_s = time.perf_counter() - begin_s
    show_timeline(bench, begin_at)
    base_s = note_start(bench)
    bench.row("SIGKILL of a rank to all jobs stepping again", took_s)
    bench.row("the same without loading the base", took_s - base_s, must=5.0)


def note_start(bench: Bench) -> float:
    """Notes the phases of the last start; returns that of the base."""
    body = next(event.body for event in reversed(bench.events) if event.kind == "started")
    print(json.dumps(body), flush=True)
    return float(body["base_s"])


def show_timeline(bench: Bench, since_s: float) -> None:
    """Prints who told what since a Unix time, each for the first time, in seconds behind it."""
    first: dict[tuple[int, str, str | None], float] = {}
    for event in bench.events:
        if event.at >= since_s:
            first.setdefault((event.epoch, event.kind, event.job), event.at - since_s)
    rows: dict[tuple[int, str], list[str]] = {}
    for (epoch, kind, job), at_s in sorted(first.items(), key=lambda item: item[1]):
        if kind not in ("applied", "round"):
            rows.setdefault((epoch, kind), []).append(f"{job or ''} {at_s:.2f}".strip())
    for (epoch, kind), times in rows.items():
        print(f"  epoch {epoch} {kind}: {', '.join(times)}", flush=True)


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
    return {job: driven.losses for job, driven in bench.driver.jobs.items()}


def change_layout(
    bench: Bench, case: str, tp_size: int, change: Callable[[Bench, int], None]
) -> float:
    """Times a change until all jobs have stepped again; returns the seconds that the base took."""
    wait_for_spares(bench)
    begin_s, begin_at = time.perf_counter(), time.time()
    print(f"{case}: order at {begin_at:.2f}", flush=True)
    change(bench, tp_size)
    bench.driver.run_until(bench.all_step())
    bench.row(case, time.perf_counter() - begin_s, must=15.0)
    show_timeline(bench, begin_at)
    base_s = note_start(bench)
    bench.timed(bench.all_step(beyond=bench.args.steps))
    return base_s


def wait_for_spares(bench: Bench) -> None:
    """Waits until a pre-forked worker is ready for every rank."""
    workers = bench.engine.workers
    bench.timed(lambda: bool(workers.by_slot) and all(w.is_ready for w in workers.by_slot.values()))


def hand_over(bench: Bench, tp_size: int) -> None:
    """Starts the gang with another layout beside itself; jobs move one by one."""
    bench.driver.hand_over(parallel=layout(tp_size))


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


_CHANGES = {"": resize, ", beside the old gang": hand_over}


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
    """Measures; returns the exit code."""
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
    parser.add_argument("--stacks", type=Path, help="folder for what ranks' threads are busy with")
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
        missed.extend(bench.missed)

    if world == 1:
        run("life", measure_start if args.start_only else measure_life)
    else:
        run("resize", lambda bench: losses.update(measure_resize(bench)))
    if world > 1 and args.compare:
        run("compare", lambda bench: compare(bench, losses))
    return missed


if __name__ == "__main__":
    sys.exit(main())
