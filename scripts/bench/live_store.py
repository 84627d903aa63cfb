"""Times a service's store: submits, changes, lists, and a controller's start (CPU).

    python -m scripts.bench.live_store --csv scripts/bench/results/live.csv
    python -m scripts.bench.live_store --place postgresql+psycopg://user@/database?host=/socket/folder

Every submit, change and command is a transaction on the disk when it returns. `submits`: one after
another from one process; `submits of 8 at once`: from eight processes, each its own; `submits by
100`: a hundred in each call. Then 10,000 jobs are queued and 1,000 run in 50 gangs: `start` is
opening and loading such a store in a new process, and `memory` that process's; `page` is a list of
100 jobs, read alone and beside submits; `poll` asks whether anything changed. Without --place it
makes a SQLite file in the working directory, for /tmp may be memory. Load averages are rows, too.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.rows import Figures
from tlora_megatron.service.messages import GangSpec
from tlora_megatron.service.store import JobState, NewJob, Store, open_store

GANGS = 50


def new_job() -> NewJob:
    """A job with about the settings that a user writes."""
    key = uuid.uuid4().hex
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    document = {
        "data": {"train": f"/data/{key}/train.jsonl", "validation": f"/data/{key}/val.jsonl"},
        "lora": {"rank": 16, "alpha": 32, "target_modules": targets},
        "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.01, "betas": [0.9, 0.95]},
        "schedule": {"name": "cosine", "warmup_ratio": 0.03},
        **{"batch_size": 8, "max_seq_len": 1024, "max_steps": 200, "portion_tokens": 1024},
    }
    schedule = {"gpus": 1, "priority": 0, "max_slowdown": 2.0}
    return NewJob(name=key, document=document, base="llama-8b", key=key, schedule=schedule)


def timed(calls: int, call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)


def submits(figures: Figures, store: Store, args: Any) -> None:
    times = timed(args.submits, lambda: store.jobs.submit([new_job()]))
    figures.row("submits", len(times) / sum(times), "1/s")
    figures.spread("submit", times)
    calls = max(1, args.submits // 100)
    times = timed(calls, lambda: store.jobs.submit([new_job() for _ in range(100)]))
    figures.row("submits by 100", 100 * calls / sum(times), "1/s")


def submits_at_once(figures: Figures, place: str, args: Any) -> None:
    """Several processes submit to one store."""
    each = args.submits // args.writers
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.writers) as pool:
        pool.map(_write, [(place, 1)] * args.writers, chunksize=1)  # they start and import
        begin = time.perf_counter()
        lists = pool.map(_write, [(place, each)] * args.writers, chunksize=1)
        took_s = time.perf_counter() - begin
    figures.row(f"submits of {args.writers} at once", each * args.writers / took_s, "1/s")
    figures.spread(f"submit of {args.writers} at once", sorted(itertools.chain(*lists)))


def _write(task: tuple[str, int]) -> list[float]:
    place, count = task
    with open_store(place) as store:
        return timed(count, lambda: store.jobs.submit([new_job()]))


def fill(figures: Figures, store: Store, args: Any) -> None:
    """Makes the jobs that wait and run; notes what a change of one costs."""
    for number in range(GANGS):
        spec = {"base_model": {}, "parallel": {}, "run": {}, "gpus": ((0, number),), "root": "/"}
        store.gangs.add(GangSpec(gang=f"g{number}", epoch=1, **spec))
    jobs = store.jobs.submit([new_job() for _ in range(args.queued + args.running)])
    with store.transaction():
        for job in jobs:
            store.jobs.change(job.id, JobState.QUEUED, stats={"lengths": list(range(64))})
    for number, job in enumerate(jobs[: args.running]):
        with store.transaction():
            store.leases.grant(job.id, f"g{number % GANGS}", 1)
            store.jobs.change(job.id, JobState.STARTING)
            store.commands.write(f"g{number % GANGS}", 1, "join", job=job.id)
    left = iter(jobs[: args.running])
    times = timed(args.running, lambda: store.jobs.change(next(left).id, JobState.RUNNING))
    figures.row("changes of state", len(times) / sum(times), "1/s")
    figures.spread("change of state", times)


def reads(figures: Figures, store: Store, place: str, args: Any) -> None:
    """Lists, alone and beside submits, and the question whether anything changed."""
    times = timed(2000, store.events.last)
    figures.row("poll", 1e6 * statistics.median(times), "us")
    figures.spread("page of 100", timed(200, lambda: store.jobs.page(limit=100)))
    figures.spread("counts", timed(50, store.jobs.counts))
    running = {JobState.RUNNING}
    figures.spread("1,000 running", timed(20, lambda: store.jobs.page(states=running, limit=1000)))
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        pool.apply(_write, [(place, 1)])
        writer = pool.apply_async(_write, [(place, args.submits // 2)])
        times = timed(200, lambda: store.jobs.page(limit=100))
        writer.get()
    figures.spread("page of 100 beside submits", times)


def start(figures: Figures, place: str) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        took_s, jobs, memory = pool.apply(_load, [place])
    figures.row(f"start with {jobs:,} jobs", took_s, "s")
    figures.row("memory of that process", memory / 2**20, "MiB")


def _load(place: str) -> tuple[float, int, int]:
    begin = time.perf_counter()
    with open_store(place) as store:
        found = store.load()
    took_s = time.perf_counter() - begin
    return took_s, len(found.jobs), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(figures: Figures, place: str, args: Any) -> None:
    """Everything, in the order of the module's description."""
    with figures.load(""), open_store(place) as store:
        submits(figures, store, args)
        submits_at_once(figures, place, args)
        for page in iter(lambda: store.jobs.page(states={JobState.VALIDATING}, limit=5000), []):
            with store.transaction():
                for job in page:
                    store.jobs.change(job.id, JobState.CANCELLED)
        fill(figures, store, args)
        start(figures, place)
        reads(figures, store, place, args)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--place", help="a file, or the URL of an empty PostgreSQL database")
    parser.add_argument("--submits", type=int, default=2000)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--running", type=int, default=1000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        place = args.place or f"{folder}/store.sqlite"
        engine = "store, PostgreSQL" if "://" in place else "store, SQLite"
        measure(Figures(csv=args.csv, commit=args.commit, engine=engine), place, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
