"""Replays traces under every policy: loads, seeds, ablations, job mixes and bounds.

    python -m scripts.bench.simulate loads --traces DIR
    python -m scripts.bench.simulate ablations --traces DIR --seeds 101,102,103

A load of 1 is a trace whose jobs, each alone, ask for all the GPU time the cluster has between the
first and the last submission. Policies were tuned on the seeds `tuning` (0 to 4); `held-out` (101
to 105) report. `adversarial` are drawn traces that are hard on a scheduler. `decisions` times
decisions with 1,000 waiting jobs of mixes that nobody has asked about yet.

Rows go to `results/simulation_PART.csv` (or `--csv`) as they come; cells that the file has already
are left out. A mean completion time below the bound on all policies ends the run.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.control_tower import NOW_S, RUNNING, WAITING, crowd, make_study
from scripts.bench.harness.arguments import RESULTS, bench_parser
from scripts.bench.harness.rows import append_rows
from scripts.bench.simulate.cases import PARTS, Cell, exceeded_by, study_of
from tlora_megatron.scheduler.policy import Changes, ClusterState, Rules
from tlora_megatron.scheduler.queue import WaitingQueue
from tlora_megatron.scheduler.registry import POLICIES, make_policy
from tlora_megatron.sim.bounds import limits_of
from tlora_megatron.sim.report import summary_rows
from tlora_megatron.sim.study import PolicyRun, Study
from tlora_megatron.sim.trace import Trace

SEEDS = {"tuning": (0, 1, 2, 3, 4), "held-out": (101, 102, 103, 104, 105)}


def seeds_of(text: str) -> tuple[int, ...]:
    """Seeds by the name of a set, or one by one."""
    return SEEDS.get(text) or tuple(int(seed) for seed in text.split(","))


def done_in(path: Path) -> set[tuple[str, ...]]:
    """Keys of the rows that a file holds."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {
            (r["source"], r["variant"], r["target_load"], r["seed"], r["policy"])
            for r in csv.DictReader(file)
        }


def check_bounds(study: Study, runs: list[PolicyRun]) -> None:
    """Ends the program if a policy beats the bound, or a group the speeds that it rests on."""
    assert study.least_jct_s is not None, "no faults are drawn here"
    for run in runs:
        assert study.least_jct_s <= run.summary.mean_jct_s * (1 + 1e-9), (
            f"mean completion time must be at least {study.least_jct_s:.1f} s, got "
            f"{run.summary.mean_jct_s:.1f} s with {run.policy}"
        )
    limits = limits_of(study.jobs, study.speeds, study.cluster.shape.num_gpus)
    faster = exceeded_by(limits, study.speeds)
    assert not faster, f"no group must be faster than the bound allows, got {faster[:5]}"


def run_cell(cell: Cell, policies: list[str], study: Study, commit: str) -> list[dict[str, Any]]:
    """A row for each policy, and a line on the terminal."""
    runs = [study.run(policy) for policy in policies]
    check_bounds(study, runs)
    about = {
        "source": cell.source,
        "variant": cell.variant,
        "target_load": cell.target_load,
        "commit": commit,
    }
    rows = []
    for run, row in zip(runs, summary_rows(study, runs), strict=True):
        times = {
            "wall_s": round(run.wall_s, 1),
            "longest_decision_ms": round(run.longest_decide_s * 1e3, 1),
        }
        rows.append(about | row | times)
        hours = run.summary.mean_jct_s / 3600
        print(*cell.key(run.policy), f"mean JCT {hours:.2f} h", f"{run.wall_s:.1f} s", flush=True)
    return rows


def main() -> int:
    """Runs the cells of one part that are still missing."""
    parser = bench_parser(__doc__)
    parser.add_argument("part", choices=(*PARTS, "decisions"))
    parser.add_argument("--traces", type=Path, default=Path(), help="folder of the traces")
    parser.add_argument("--seeds", default="held-out", help="tuning, held-out, or numbers")
    parser.add_argument("--sources", default="", help="only these traces")
    parser.add_argument("--policies", default=",".join(POLICIES), help="only these policies")
    args = parser.parse_args()
    path = args.csv or RESULTS / f"simulation_{args.part}.csv"
    wanted, seeds = args.policies.split(","), seeds_of(args.seeds)
    if args.part == "decisions":
        for row in decision_rows(wanted, seeds, args.commit):
            append_rows(path, [row])
        return 0
    done, cache = done_in(path), dict[str, Trace]()
    sources = args.sources.split(",") if args.sources else None
    for cell in PARTS[args.part](seeds):
        missing = [p for p in cell.policies if p in wanted and cell.key(p) not in done]
        if missing and (sources is None or cell.source in sources):
            study = study_of(cell, args.traces, cache)
            append_rows(path, run_cell(cell, missing, study, args.commit))
    return 0


MIXES = ("paper", "measured")


class Timed(NamedTuple):
    """One decision: its time, the groups it forms, the mixes it asked the model about."""

    took_ms: float
    formed: int
    asked: int


def first_decision(
    policy: str, study: Study, rules: Rules, queue: WaitingQueue, state: ClusterState
) -> Timed:
    """A decision by a model that knows jobs alone, as a service does after they are submitted."""
    made = make_policy(policy, study.speeds, rules)
    changes = Changes(
        arrived=set(range(RUNNING, RUNNING + WAITING)),
        regrouped=set(range(RUNNING)),
        freed=True,
    )
    known, begin = len(study.speeds.answers()), time.process_time()
    found = made.decide(NOW_S, queue, state, changes)
    took_ms = (time.process_time() - begin) * 1e3
    return Timed(took_ms, len(found), len(study.speeds.answers()) - known)


def in_a_fork(run: Callable[[], Timed]) -> Timed:
    """Runs it in a copy of this process, so that what the model learns there is forgotten."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps(run()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = Timed(*json.load(answer))
    os.waitpid(child, 0)
    return found


def decision_rows(
    policies: Sequence[str], seeds: Sequence[int], commit: str
) -> Iterator[dict[str, Any]]:
    """A row for each mix of attributes and policy: the longest decision of all seeds."""
    for mix in MIXES:
        took: dict[str, list[Timed]] = {policy: [] for policy in policies}
        for seed in seeds:
            study, rules = make_study(mix, seed), Rules()
            queue, state = crowd(study, rules)
            for policy, times in took.items():
                decide = partial(first_decision, policy, study, rules, queue, state)
                times.append(in_a_fork(decide))
        for policy, times in took.items():
            longest = max(times)
            print(f"{mix:9} {policy:14} {longest.took_ms:7.1f} ms, {longest.asked} new mixes")
            yield {
                "commit": commit,
                "mix": mix,
                "policy": policy,
                "waiting": WAITING,
                "running": RUNNING,
                "seeds": len(seeds),
                "longest_ms": round(longest.took_ms, 1),
                "groups_formed": longest.formed,
                "new_mixes": longest.asked,
            }


if __name__ == "__main__":
    sys.exit(main())
