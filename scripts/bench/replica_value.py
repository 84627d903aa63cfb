"""The predicted worth of unlike replicas, beside alike ones and beside LobRA's planner.

    python -m scripts.bench.replica_value --csv scripts/bench/results/replica_value.csv

Every row is one way to run twelve jobs (batch 64, rank 16) on one cluster:
- `tp8`, all jobs on TP8 as the joint baseline of LobRA's paper has them, packed;
- `alike`, the best alike replicas, with packing, context parallelism and one recompute for all;
- `lobra`, its planner by its formulas (`scripts.bench.lobra`; scipy, of the extra `bench`);
- `ours`, `tlora plan --replicas any`, with recompute by rows where replicas are alike.

`gpu_s` is GPU-seconds for a batch of every job, without gradient sums and optimizer steps, which
are alike in all; ours are of drawn rounds through the dispatcher, LobRA's of drawn steps through
its program. `bound_gpu_s` is what no division of the work goes below.

Lengths: `lobra-like`, lognormals with means and spreads of LobRA's twelve data sets as far as they
are known, cut at 16,384; `tail`, the same where 0.2 % are 65,536. Machines are profiles of
`configs/hardware`: those of A100 and L40S are scaled data sheets.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.rows import write_rows
from tlora_megatron.model.deployment import Deployment
from tlora_megatron.model.layout import RECOMPUTES
from tlora_megatron.model.spec import ModelSpec, read_model_spec
from tlora_megatron.planner.deploy.deploy import DeploymentResult, deploy
from tlora_megatron.planner.deploy.kinds import all_kinds, longest_of, most_rows
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.layouts import SearchSpace
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

PLANNERS = ("tp8", "alike", "lobra", "ours")
CASES = (
    "7b,16xa100-40g,lobra-like",
    "32b,64xa100-80g,lobra-like",
    "70b,64xa100-80g,lobra-like",
    "8b,8xh100,lobra-like",
    "8b,8xh200,lobra-like",
    "8b,8xl40s,lobra-like",
    "8b,2xh200-48g,lobra-like",
    "8b,8xh100,tail",
)
_SETS = {
    "dolly": (207, 0.95), "python_code": (269, 0.5), "evol": (702, 0.45), "commitpack": (663, 1.0),
    "mathinstruct": (252, 0.6), "metamath": (236, 0.4), "numina": (543, 0.6),
    "pubmedqa": (371, 0.3), "xsum": (526, 0.7), "billsum": (3903, 0.9), "cnn": (947, 0.5),
    "meetingbank": (3622, 1.0),
}  # fmt: skip
"""Mean, and standard deviation of the logarithm, of rows of a sequence."""
_LONGEST, _TAIL, _TAIL_SHARE = 16384, 65536, 0.002
_TP8 = SearchSpace(tp_size=8, cp_size=1, pp_size=1, recompute="none")
_BATCH, _DRAWN, _STEPS = 64, 2000, 3
_SHAPES = {  # layers, hidden, FFN, heads, key and value heads, vocabulary
    "7b": (32, 4096, 11008, 32, 32, 32000),
    "32b": (60, 6656, 17920, 64, 64, 32000),
    "70b": (80, 8192, 28672, 64, 8, 32000),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One prediction; the fields are the CSV's columns."""

    cluster: str
    model: str
    lengths: str
    planner: str
    plan: str
    gpu_s: float
    bound_gpu_s: float


def model_of(name: str) -> ModelSpec:
    """The shape of a model; 7B, 32B and 70B are LLaMA's, as LobRA has them."""
    spec = read_model_spec(REPO / "configs" / "models" / "llama-3.1-8b.json")
    if name == "8b":
        return spec
    layers, hidden, ffn, heads, kv_heads, vocabulary = _SHAPES[name]
    return replace(
        spec, num_layers=layers, hidden_size=hidden, ffn_size=ffn, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden // heads, vocab_size=vocabulary,
    )  # fmt: skip


def machine_of(name: str) -> HardwareProfile:
    """A profile, or one with less memory: `a100-40g`, `h200-48g`."""
    folder = REPO / "configs" / "hardware"
    if (folder / f"{name}.json").is_file():
        return load_profile(folder / f"{name}.json")
    base, _, size = name.rpartition("-")
    profile = load_profile(folder / ("a100-80g.json" if base == "a100" else f"{base}.json"))
    memory = 42.4e9 if base == "a100" else float(size.removesuffix("g")) * 1e9
    return replace(profile, memory_bytes=memory, reserved_bytes=4e9)


def jobs_of(lengths: str) -> list[JobLoad]:
    """Twelve jobs with drawn lengths, one for each data set."""
    draw = random.Random(0)
    jobs = []
    for name, (mean, spread) in _SETS.items():
        centre = math.log(mean) - spread**2 / 2
        drawn = (int(draw.lognormvariate(centre, spread)) for _ in range(_DRAWN))
        rows = [min(_LONGEST, max(16, n)) for n in drawn]
        if lengths == "tail":
            rows = [_TAIL if draw.random() < _TAIL_SHARE else n for n in rows]
        histogram = LengthHistogram.from_lengths(rows)
        jobs.append(JobLoad(name=name, rank=16, batch_size=_BATCH, lengths=histogram))
    return jobs


def rows_of(case: str, planners: Sequence[str]) -> list[Row]:
    """Predicts a case, given as `MODEL,NxMACHINE,LENGTHS`, by each planner."""
    model, cluster, lengths = case.split(",")
    number, _, machine = cluster.partition("x")
    num_gpus, spec, hardware = int(number), model_of(model), machine_of(machine)
    jobs = jobs_of(lengths)
    result = deploy(spec, jobs, hardware, num_gpus)
    found: list[tuple[str, str, float]] = []
    for planner in planners:
        if planner == "lobra":
            plan, time_s = _lobra(spec, jobs, hardware, num_gpus)
        elif planner == "ours":
            plan, time_s = _best(result, alike=False)
        else:
            spaces = [_TP8] if planner == "tp8" else [SearchSpace(recompute=r) for r in RECOMPUTES]
            tried = (deploy(spec, jobs, hardware, num_gpus, space) for space in spaces)
            time_s, plan = min(_best(result, alike=True)[::-1] for result in tried)
        found.append((planner, plan, time_s))
    return [
        Row(
            cluster=cluster,
            model=model,
            lengths=lengths,
            planner=planner,
            plan=plan,
            gpu_s=round(time_s * num_gpus, 2),
            bound_gpu_s=round(result.bound_s * num_gpus, 2),
        )
        for planner, plan, time_s in found
    ]


def _best(result: DeploymentResult, *, alike: bool) -> tuple[str, float]:
    """The best deployment, or the best alike one; ours as it is chosen, with its margin."""
    kept = [entry for entry in result.ranked if entry.is_alike or not alike]
    if not kept:
        return "none fits", math.inf
    best = kept[0]
    return best.label, best.time_s


def _lobra(
    spec: ModelSpec, jobs: Sequence[JobLoad], hardware: HardwareProfile, num_gpus: int
) -> tuple[str, float]:
    """LobRA's deployment for an expected step, and the mean time of drawn steps on it."""
    from scripts.bench import lobra

    most = most_rows(longest_of(jobs))
    kinds = all_kinds(spec, jobs, hardware, num_gpus, SearchSpace(cp_size=1, recompute="none"))
    kinds = [kind for kind in kinds if kind.curve.budget <= most]
    streams = [job.lengths.shuffled(slot, job.batch_size) for slot, job in enumerate(jobs)]
    expected = [
        n for job in jobs for n in itertools.islice(job.lengths.spread(), job.batch_size - 1)
    ]
    expected += [job.lengths.longest for job in jobs]
    chosen = lobra.plan(kinds, lobra.buckets(expected), num_gpus)
    if chosen is None:
        return "none fits", math.inf
    pairs = zip(chosen.types, chosen.counts, strict=True)
    each = [kind for kind, count in pairs for _ in range(count)]
    times = []
    for _ in range(_STEPS):
        drawn = [n for stream in streams for n in itertools.islice(stream, _BATCH)]
        step = lobra.buckets(drawn)
        dealt = (
            lobra.deal(chosen.types, chosen.counts, step),
            lobra.deal(each, [1] * len(each), step),
        )
        times.append(min((d.time_s for d in dealt if d is not None), default=math.inf))
    deployment = Deployment.of(kind.layout for kind in each)
    return str(deployment), sum(times) / len(times)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--planner", nargs="+", choices=PLANNERS, default=PLANNERS)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL,NxMACHINE,LENGTHS")
    args = parser.parse_args(argv)
    found = []
    for case in args.cases:
        rows = rows_of(case, args.planner)
        for row in rows:
            print(f"{case:28} {row.planner:6} {row.gpu_s:9.2f} GPU-s  {row.plan}", flush=True)
        found += [asdict(row) for row in rows]
    if args.csv is not None:
        write_rows(args.csv, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
