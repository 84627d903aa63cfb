"""Times what the control tower does on a CPU: scheduling decisions, and the search for a plan.

    python -m scripts.bench.control_tower --csv scripts/bench/results/control_tower.csv

`decide POLICY`: each policy decides on 1,000 waiting jobs while 100 of 128 A100s run one job each,
with the planner's speeds. `first_ms` is a decision by a model that knows the running jobs alone;
`median_ms` is of decisions by one that has estimated all mixes before. `search MODEL JOBS
GPUS`: all plans for so many jobs, or with `at most` the best plans on any number of GPUs beside;
every search begins anew. `count` is the number of decisions or of plans. Times are CPU time of this
process, so that other programs on the machine count for little. Rows named `search` alone are those
of 16 jobs, 1,024 GPUs and 80 layers of the 70B shapes.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace

from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import append_rows
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.planner.candidate import Runner
from tlora_megatron.planner.hardware import load_profile
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.search import search
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.fleet import Parts, formed
from tlora_megatron.scheduler.policy import Changes, ClusterState, FreeGpus, Rules
from tlora_megatron.scheduler.queue import Waiting, WaitingQueue
from tlora_megatron.scheduler.registry import POLICIES, make_policy
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceRow
from tlora_megatron.sim.workload import load_mix


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCase:
    model: str
    jobs: int
    gpus: int = 1024
    is_unlike: bool = True
    """Jobs have lengths of their own."""
    runs_in: Runner | None = "train"
    may_idle: bool = False

    @property
    def name(self) -> str:
        program = "any program" if self.runs_in is None else self.runs_in
        most = "at most " if self.may_idle else ""
        return f"search {self.model} {self.jobs} jobs {most}{self.gpus} GPUs {program}"


SEARCHES = (
    SearchCase(model="70b", jobs=16, is_unlike=False, runs_in=None),
    *(
        SearchCase(model=model, jobs=jobs, may_idle=may_idle)
        for model in ("8b", "70b")
        for jobs in (8, 256)
        for may_idle in (False, True)
    ),
    SearchCase(model="405b", jobs=8, may_idle=True),
    SearchCase(model="70b", jobs=256, runs_in="megatron", may_idle=True),
)
HARDWARE = REPO / "configs" / "hardware"
RUNNING, WAITING = 100, 1000
LENGTHS = ((256, 3.0), (512, 3.0), (1024, 1.0), (2048, 0.3))
SHAPES: dict[str, dict[str, int]] = {
    "8b": {},
    "70b": {"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_size": 28672},
    "405b": {"num_layers": 126, "hidden_size": 16384, "num_heads": 128, "ffn_size": 53248},
}
NOW_S = 50.0
"""Before any job is due."""


def timed(run: Callable[[], Sized], repeats: int) -> tuple[int, float, float]:
    """Size of the last result, milliseconds of the first run, and the median of the others."""
    times_ms = []
    for _ in range(1 + repeats):
        begin = time.process_time()
        found = run()
        times_ms.append((time.process_time() - begin) * 1e3)
    return len(found), times_ms[0], statistics.median(times_ms[1:])


def make_study(mix: str = "paper", seed: int = 0) -> Study:
    """128 A100s and 1,100 jobs; the first hundred ask for one GPU each."""
    rows = [
        TraceRow(
            name=str(index),
            submit_s=0.1 * index,
            duration_s=100.0 + index % 37,
            num_gpus=1 if index < RUNNING else (1, 1, 1, 2, 8)[index % 5],
        )
        for index in range(RUNNING + WAITING)
    ]
    cluster, profile = load_cluster(HARDWARE / "cluster-128xA100.yaml")
    drawn, specs = load_mix(mix)
    return Study(
        trace=Trace(name="crowd", rows=tuple(rows), dropped={}), cluster=cluster, profile=profile,
        mix=drawn, specs=specs, options=Options(seed=seed),
    )  # fmt: skip


def crowd(study: Study, rules: Rules) -> tuple[WaitingQueue, ClusterState]:
    """The queue, and the cluster on which the first jobs run alone."""
    shape = study.cluster.shape
    state = ClusterState(shape=shape, free=FreeGpus.all_of(shape))
    jobs = [Waiting(job=job, tokens_left=job.tokens, queued_s=job.submit_s) for job in study.jobs]
    for kind in {job.kind for job in study.jobs}:
        study.speeds.prepare(kind, shape.num_gpus)  # as when they were submitted
    for number, entry in enumerate(jobs[:RUNNING]):
        rates = study.speeds.rates((entry.job.kind,), 1)
        assert rates is not None, "a job that asks for one GPU must fit one"
        group = formed(
            Parts(joining=(entry,)), gpus=(number,), rates=rates, now_s=0.0, cost=rules.cost,
            number=number,
        )  # fmt: skip
        state.groups[number] = group
        state.free.take(group.gpus)
    return WaitingQueue(jobs[RUNNING:]), state


def decisions(policy: str, repeats: int) -> tuple[int, float, float]:
    """Number of groups a policy forms, and the times of its decisions."""
    study, rules = make_study(), Rules()
    queue, state = crowd(study, rules)
    made = make_policy(policy, study.speeds, rules)
    changes = Changes(
        arrived=set(range(RUNNING, RUNNING + WAITING)),
        regrouped=set(range(RUNNING)),
        freed=True,
    )
    return timed(lambda: made.decide(NOW_S, queue, state, changes), repeats)


def plans(case: SearchCase, repeats: int) -> tuple[int, float, float]:
    """Number of plans the search finds, and its times."""
    base = read_model_spec(REPO / "configs" / "models" / "llama-3.1-8b.json")
    spec = replace(base, **SHAPES[case.model])
    hardware = load_profile(HARDWARE / "h100-infiniband.json")
    jobs = [
        JobLoad(
            name=f"job{i}",
            rank=(4, 8, 16, 64)[i % 4],
            batch_size=8,
            lengths=LengthHistogram.from_counts(
                [(length + i * case.is_unlike, share) for length, share in LENGTHS]
            ),
        )
        for i in range(case.jobs)
    ]
    space = SearchSpace(runs_in=case.runs_in)
    more = {"may_idle": True} if case.may_idle else {}
    return timed(lambda: search(spec, jobs, hardware, case.gpus, space, **more).plans, repeats)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="after the first")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument("--searches", default="", metavar="WORDS", help="only those so named")
    parser.add_argument("--search-repeats", type=int, default=2, help="after the first")
    parser.add_argument("--machine", default="", help="in words; asked of the system where empty")
    args = parser.parse_args(argv)
    print(f"{'':48} {'count':>7} {'first, ms':>10} {'median, ms':>11}")
    measures: list[tuple[str, Callable[[], tuple[int, float, float]]]] = [
        (f"decide {policy}", lambda policy=policy: decisions(policy, args.repeats))
        for policy in args.policies
    ]
    if not args.no_search:
        measures += [
            (case.name, lambda case=case: plans(case, args.search_repeats))
            for case in SEARCHES
            if args.searches in case.name
        ]
    for what, measure in measures:
        count, first_ms, median_ms = measure()
        row = {
            "machine": args.machine or f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": f"python {platform.python_version()}", "commit": args.commit, "what": what,
            "count": count, "first_ms": round(first_ms, 2), "median_ms": round(median_ms, 2),
        }  # fmt: skip
        print(f"{what:48} {count:7,} {first_ms:10.1f} {median_ms:11.1f}", flush=True)
        if args.csv is not None:
            append_rows(args.csv, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
