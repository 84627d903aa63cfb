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

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import Figures
from scripts.bench.simulate.cases import SOURCES, Source
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_gang import FakeTimes, FakeWork
from tlora_megatron.planner.search import GroupModel
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.scheduler.queue import Job
from tlora_megatron.service.control.controller import Controller
from tlora_megatron.service.control.pricing import PlannedBase, Pricing
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import Submission
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import JobState, NewJob, open_store
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceRow, read_trace
from tlora_megatron.sim.workload import load_mix

EPOCH_S = 1_000_000.0
"""Unix time at which a trace begins: small, so that its times are exact enough."""
SPEEDUP = 600.0
LOOK_S = 0.04 * SPEEDUP


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A job of a trace, as validation would give it."""

    job: str
    document: Mapping[str, Any]
    own: JobLoad
    train_tokens: float
    num_steps: int
    tokens: Mapping[str, str] = field(default_factory=dict)
    from_step: int = 0
    notes: tuple[str, ...] = ()

    def load(self) -> JobLoad:
        return self.own


class Jobs:
    """The jobs of a study: accepts what names them, and says what they are to fake gangs."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.jobs: Sequence[Job] = study.jobs
        self._done: list[Accepted] = []

    def load(self, job: Job) -> JobLoad:
        return self.study.speeds.load_of(job.kind)

    def num_steps(self, job: Job) -> int:
        return max(1, round(job.tokens / self.load(job).batch_tokens))

    def submission(self, job: Job) -> NewJob:
        name = f"trace-{job.index}"
        document = {"name": name, "index": job.index}
        made = Submission(name=name, base_model={"path": job.base}, document=document)
        asked = {"gpus": job.num_gpus, "max_slowdown": job.max_slowdown, "priority": job.priority}
        return NewJob(
            name=name, document=json.loads(made.to_json()), base=job.base, key=name, schedule=asked
        )

    def work(self, order: Mapping[str, Any]) -> FakeWork:
        job = self.jobs[int(order["document"]["index"])]
        return FakeWork(kind=job.kind, tokens=job.tokens, num_steps=self.num_steps(job))

    def submit(self, job_id: str, submission: Submission, priority: int = 0) -> None:
        job = self.jobs[int(submission.document["index"])]
        size = {"train_tokens": job.tokens, "num_steps": self.num_steps(job)}
        document, own = submission.document, self.load(job)
        self._done.append(Accepted(job=job_id, document=document, own=own, **size))

    def forget(self, job_id: str) -> None:
        """Nothing is under way."""

    def poll(self) -> list[Accepted]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Nothing runs."""


class Replay:
    def __init__(self, jobs: Jobs, root: Path, settings: Settings, times: FakeTimes) -> None:
        study = jobs.study
        self.now_s = EPOCH_S
        self.jobs = jobs
        self.home = Home.open(root)
        self._settings = settings
        specs = load_mix(study.mix.name)[1]
        self._models = {name: GroupModel(spec, study.profile) for name, spec in specs.items()}
        shape = study.cluster.shape
        nodes = [
            NodeInfo(node=i, address="", gpus=shape.gpus_per_node) for i in range(shape.num_nodes)
        ]
        self.engine = FakeEngine(
            nodes=nodes, speeds=study.speeds, work=jobs.work, clock=lambda: self.now_s,
            times=times, writes=False,
        )  # fmt: skip
        self.take_over()

    def take_over(self) -> None:
        """Starts a controller on the store, as after a SIGKILL of the one before."""
        self.store = open_store(self.home.store, clock=lambda: self.now_s)
        self.store.lock.take(stale_s=-1.0)
        self.controller = Controller(
            home=self.home, store=self.store, engine=self.engine,
            pricing=Pricing(lambda section: PlannedBase(model=self._models[section["path"]])),
            validator=self.jobs, settings=self._settings, clock=lambda: self.now_s,
            on_said=lambda sentence: None,
        )  # fmt: skip

    def run(self) -> None:
        """Submits each job at its time, and ends when all are over."""
        waiting = list(reversed(self.jobs.jobs))
        total = len(waiting)
        while True:
            due = []
            while waiting and EPOCH_S + waiting[-1].submit_s <= self.now_s:
                due.append(waiting.pop())
            if due:
                self.store.jobs.submit([self.jobs.submission(job) for job in due])
            self.controller.step()
            if not waiting and not self.controller.context.state.jobs:
                return
            arrival_s = EPOCH_S + waiting[-1].submit_s if waiting else float("inf")
            soonest = min(arrival_s, self.engine.next_s(), self.controller.next_s())
            looks = max(1.0, -(-(soonest - self.now_s) // LOOK_S))
            self.now_s += looks * LOOK_S
            if len(due) and len(waiting) % 100 < len(due):
                print(f"{total - len(waiting)} of {total} jobs submitted", file=sys.stderr)

    def completion_s(self) -> dict[int, float]:
        """Seconds from submission to the end of each finished job, by its index."""
        found, after = {}, 0
        while page := self.store.jobs.page(after=after, limit=1000):
            after = page[-1].number
            for row in page:
                index = int(row.name.removeprefix("trace-"))
                if row.state is JobState.FINISHED and row.ended_at is not None:
                    found[index] = row.ended_at - EPOCH_S - self.jobs.jobs[index].submit_s
        return found


def replay_settings(policy: str) -> Settings:
    """The settings of `tlora serve`, its looks stretched as a trace of weeks needs them."""
    return Settings(
        policy=policy, tick_s=10.0 * SPEEDUP, look_s=10.0 * SPEEDUP, coalesce_s=0.0,
        lease_s=600.0 * SPEEDUP, hang_s=600.0 * SPEEDUP, decide_in_thread=False,
    )  # fmt: skip


def replay_times(study: Study, noise: float) -> FakeTimes:
    """Gives fake gangs' doings the pauses that the simulator charges."""
    cost = study.cluster.regroup
    weights = max(2.0 * 8e9, 1.0)
    return FakeTimes(
        start_s=cost.replan_s + weights / cost.weights_bytes_per_s, prepare_s=1.0, boundary_s=1.0,
        stall_s=cost.admit_s, report_s=3600.0, checkpoint_s=3600.0, noise=noise,
    )  # fmt: skip


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
    assert source.file is not None, "a trace that is drawn has no folder"
    shape = replace(source.shape, most_jobs=num_jobs, load=load)
    return _study(read_trace(traces / source.file), Options(shape=shape))


def _study(trace: Trace, options: Options, nodes: int | None = None) -> Study:
    cluster, profile = load_cluster(REPO / "configs/hardware/cluster-128xA100.yaml")
    cluster = cluster if nodes is None else replace(cluster, nodes=nodes)
    mix, specs = load_mix("paper")
    parts = {"cluster": cluster, "profile": profile, "mix": mix, "specs": specs}
    return Study(trace=trace, options=options, **parts)


REPLAYED = tuple(name for name, source in SOURCES.items() if source.file is not None)
_LONG_S = 1.0e6
_GPUS_PER_NODE = 8


def crowd_study(running: int, queued: int) -> Study:
    """Jobs of one GPU that fill a cluster, and ten times as many that come a minute later."""
    nodes = -(-running // _GPUS_PER_NODE)
    rows = [
        TraceRow(name=str(i), submit_s=0.0, duration_s=_LONG_S + i, num_gpus=1)
        for i in range(nodes * _GPUS_PER_NODE)
    ]
    for i in range(queued):
        times = {"submit_s": 600.0 + 0.1 * (i // 100), "duration_s": 1000.0 + i % 370}
        rows.append(TraceRow(name=str(len(rows)), num_gpus=(1, 1, 1, 2, 8)[i % 5], **times))
    trace = Trace(name="crowd", rows=tuple(rows), dropped={})
    return _study(trace, Options(max_slowdown=1.5), nodes)


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
        "queued": float(states.get(JobState.QUEUED, 0)), "submits by 100": len(rest) / submit_s,
        "longest wake-up while all arrive (CPU)": max(intake),
        "longest decision while all arrive": arriving, "decisions": float(len(decisions)),
        "median decision": statistics.median(decisions), "longest decision": max(decisions),
        "median wake-up (CPU)": statistics.median(steps), "longest wake-up (CPU)": max(steps),
    }  # fmt: skip
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
    **dict.fromkeys(("jobs", "running", "queued"), "jobs"),
    **dict.fromkeys(("live over simulated", "speed of the clock"), "ratio"),
    **dict.fromkeys(("decisions", "load average"), ""),
    **{"gangs": "gangs", "memory": "GB", "submits by 100": "1/s"},
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
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--queued", type=int, default=10_000)
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
    figures = Figures(csv=args.csv, commit=args.commit, engine="fake", about=f"{where}: ")
    for case, value in found.items():
        figures.row(case, value, _UNITS.get(case, "s"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
