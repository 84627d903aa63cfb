"""Replays a trace through a service's controller, store and fake gangs, beside `tlora simulate`.

    python -m scripts.bench.live_replay --traces DIR --csv scripts/bench/results/live.csv
    python -m scripts.bench.live_replay --traces DIR --source kalos --jobs 500 --csv rows.csv
    python -m scripts.bench.live_replay --crowd --csv scripts/bench/results/live.csv

The first form submits the jobs of a trace at their times, on a clock that passes 600 times as fast
as it would: the controller looks every 40 ms, so it sees what happened in 24 s of the trace. Its
policy, its store (SQLite) and its actions are those of `tlora serve`; gangs train at the planner's
speeds times noise, and take the time to start that `--cluster` gives. The mean completion time
stands beside that of the simulator on the same jobs with the same policy.

The second form measures a controller with 10,000 queued jobs and 1,000 that run in fake gangs: how
long decisions and wake-ups take, its memory, and how long the next one needs to take over. The
load average stands beside them, for a wall time from a busy machine says little.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.replayed_service import EPOCH_S, SPEEDUP, Jobs, Replay
from scripts.bench.harness.rows import append_rows
from scripts.bench.simulate.cases import SOURCES, Source
from tests.helpers.fake_gang import FakeTimes
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import JobState
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceRow, read_trace
from tlora_megatron.sim.workload import load_mix


def replay_settings(policy: str) -> Settings:
    """The settings of `tlora serve`, with those times stretched that only bound how often it looks.

    A trace takes weeks: looked at every ten seconds of it, nothing would happen in most looks.
    """
    return Settings(
        policy=policy,
        tick_s=10.0 * SPEEDUP,
        look_s=10.0 * SPEEDUP,
        coalesce_s=0.0,
        lease_s=600.0 * SPEEDUP,
        hang_s=600.0 * SPEEDUP,
        decide_in_thread=False,
    )


def replay_times(study: Study, noise: float) -> FakeTimes:
    """Gives fake gangs' doings the pauses that the simulator charges."""
    cost = study.cluster.regroup
    weights = max(2.0 * 8e9, 1.0)
    return FakeTimes(
        start_s=cost.replan_s + weights / cost.weights_bytes_per_s,
        prepare_s=1.0,
        boundary_s=1.0,
        stall_s=cost.admit_s,
        report_s=3600.0,
        checkpoint_s=3600.0,
        noise=noise,
    )


def compared(study: Study, policy: str, root: Path, noise: float) -> dict[str, float]:
    """Mean completion times of the simulator and of the service, over the same jobs."""
    simulated = {r.job.index: r.jct_s for r in study.run(policy).ledger.records}
    replay = Replay(Jobs(study), root, replay_settings(policy), replay_times(study, noise))
    begin = time.perf_counter()
    replay.run()
    wall_s = time.perf_counter() - begin
    live = replay.completion_s()
    if set(live) != set(simulated):
        raise RuntimeError(f"all {len(simulated)} jobs must finish, got {len(live)}")
    if replay.engine.doubled:
        raise RuntimeError(f"no job must train twice at once, got {replay.engine.doubled}")
    span_s = replay.now_s - EPOCH_S
    return {
        "jobs": len(live),
        "simulated mean completion": statistics.fmean(simulated.values()),
        "live mean completion": statistics.fmean(live.values()),
        "live over simulated": statistics.fmean(live.values())
        / statistics.fmean(simulated.values()),
        "gangs": len(replay.engine.all_gangs),
        "speed of the clock": span_s / wall_s,
        "longest decision": max(replay.controller.decider.seconds),
    }


def trace_study(source: Source, traces: Path, num_jobs: int, load: float) -> Study:
    """The first jobs of a trace on 128 A100, arriving at an offered load."""
    cluster, profile = load_cluster(REPO / "configs/hardware/cluster-128xA100.yaml")
    mix, specs = load_mix("paper")
    assert source.file is not None, "a trace that is drawn has no folder"
    return Study(
        trace=read_trace(traces / source.file),
        cluster=cluster,
        profile=profile,
        mix=mix,
        specs=specs,
        options=Options(shape=replace(source.shape, most_jobs=num_jobs, load=load)),
    )


REPLAYED = tuple(name for name, source in SOURCES.items() if source.file is not None)
_RUNNING, _QUEUED = 1000, 10_000
_LONG_S = 1.0e6


def crowd_study(running: int, queued: int) -> Study:
    """Jobs of one GPU that fill a cluster, and ten times as many that come a minute later."""
    cluster, profile = load_cluster(REPO / "configs/hardware/cluster-128xA100.yaml")
    nodes = -(-running // cluster.gpus_per_node)
    mix, specs = load_mix("paper")
    rows = [
        TraceRow(name=str(i), submit_s=0.0, duration_s=_LONG_S + i, num_gpus=1)
        for i in range(nodes * cluster.gpus_per_node)
    ]
    rows += [
        TraceRow(
            name=str(len(rows) + i),
            submit_s=600.0 + 0.1 * (i // 100),
            duration_s=1000.0 + i % 370,
            num_gpus=(1, 1, 1, 2, 8)[i % 5],
        )
        for i in range(queued)
    ]
    trace = Trace(name="crowd", rows=tuple(rows), dropped={})
    return Study(
        trace=trace,
        cluster=replace(cluster, nodes=nodes),
        profile=profile,
        mix=mix,
        specs=specs,
        options=Options(max_slowdown=1.5),
    )


def crowded(study: Study, running: int, root: Path) -> dict[str, float]:
    """Measures a controller's decisions where a crowd waits."""
    times = FakeTimes(start_s=1.0, report_s=10.0, checkpoint_s=60.0, noise=0.02)
    jobs = Jobs(study)
    replay = Replay(jobs, root, Settings(decide_in_thread=False), times)
    first = [job for job in jobs.jobs if job.submit_s == 0.0]
    rest = [job for job in jobs.jobs if job.submit_s > 0.0]
    replay.store.jobs.submit([jobs.submission(job) for job in first])
    _steps(replay, 60.0)
    begin = time.perf_counter()
    for place in range(0, len(rest), 100):
        replay.store.jobs.submit([jobs.submission(job) for job in rest[place : place + 100]])
    submit_s = time.perf_counter() - begin
    intake = _steps(replay, 5.0)
    arriving = max(replay.controller.decider.seconds)
    replay.controller.decider.seconds.clear()
    steps = _steps(replay, 60.0)
    states = replay.store.jobs.counts()
    decisions = replay.controller.decider.seconds
    found = {
        "running": float(states.get(JobState.RUNNING, 0)),
        "queued": float(states.get(JobState.QUEUED, 0)),
        "submits by 100": len(rest) / submit_s,
        "longest wake-up while all arrive (CPU)": max(intake),
        "longest decision while all arrive": arriving,
        "decisions": float(len(decisions)),
        "median decision": statistics.median(decisions),
        "longest decision": max(decisions),
        "median wake-up (CPU)": statistics.median(steps),
        "longest wake-up (CPU)": max(steps),
    }
    begin, begin_cpu = time.perf_counter(), time.process_time()
    replay.take_over()
    found["restart"] = time.perf_counter() - begin
    found["restart (CPU)"] = time.process_time() - begin_cpu
    replay.controller.step()
    found["restart with its first wake-up"] = time.perf_counter() - begin
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


def _steps(replay: Replay, seconds: float) -> list[float]:
    """CPU seconds of the wake-ups in some time of the service, one every 40 ms or later."""
    until_s, found = replay.now_s + seconds, []
    while replay.now_s < until_s:
        begin = time.process_time()
        replay.controller.step()
        found.append(time.process_time() - begin)
        soonest = min(replay.engine.next_s(), replay.controller.next_s())
        replay.now_s = max(replay.now_s + 0.04, soonest)
    return found


_UNITS = {
    "jobs": "jobs",
    "running": "jobs",
    "queued": "jobs",
    "gangs": "gangs",
    "decisions": "",
    "memory": "GB",
    "submits by 100": "1/s",
    "live over simulated": "ratio",
    "speed of the clock": "ratio",
}
"""Units of the columns that are not seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures and appends them to a file."""
    parser = bench_parser(__doc__)
    parser.add_argument("--traces", type=Path, help="folder of the trace")
    parser.add_argument("--crowd", action="store_true", help="measure a crowd instead")
    parser.add_argument("--source", choices=REPLAYED, default="philly", help="the trace")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--load", type=float, default=1.0, help="offered load")
    parser.add_argument("--policy", default=Settings().policy)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--running", type=int, default=_RUNNING)
    parser.add_argument("--queued", type=int, default=_QUEUED)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the store lies")
    args = parser.parse_args(argv)
    if not args.crowd and args.traces is None:
        parser.error("--traces must name the folder of the trace, or --crowd be given")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = Path(folder) / "service"
        if args.crowd:
            study = crowd_study(args.running, args.queued)
            found, where = crowded(study, args.running, root), "crowd"
        else:
            study = trace_study(SOURCES[args.source], args.traces, args.jobs, args.load)
            found = compared(study, args.policy, root, args.noise)
            where = f"{args.source} load {args.load:g} {args.policy}"
    found["load average"] = os.getloadavg()[0]
    for case, value in found.items():
        row = {
            "gpu": "cpu",
            "world": 1,
            "commit": args.commit,
            "engine": "fake",
            "case": f"{where}: {case}",
            "value": round(value, 4),
            "unit": _UNITS.get(case, "" if case == "load average" else "s"),
        }
        print(f"{row['case']:60} {row['value']:14.4f} {row['unit']}", flush=True)
        if args.csv:
            append_rows(args.csv, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
