"""Replays traces under every policy: loads, seeds, ablations, job mixes and bounds.

    python -m scripts.bench.simulate loads --traces DIR
    python -m scripts.bench.simulate ablations --traces DIR --seeds 3
    python -m scripts.bench.simulate mixes --traces DIR

A load of 1 is a trace whose jobs, each alone, ask for all the GPU time the cluster has between the
first and the last submission; arrivals are stretched or squeezed to get there. Rows go to
`results/simulation_PART.csv` (or `--csv`) as they come; cells that the file holds already are left
out.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from scripts.bench.harness.arguments import REPO, RESULTS, bench_parser
from scripts.bench.harness.rows import append_rows
from tlora_megatron.scheduler.registry import POLICIES
from tlora_megatron.sim.cluster_config import load_cluster
from tlora_megatron.sim.job_mix import load_mix
from tlora_megatron.sim.report.results import summary_rows
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceRow, offered_gpus, read_trace
from tlora_megatron.sim.trace_shape import TraceShape, shaped

LOADS = (0.5, 1.0, 2.0, 3.0, 5.0)
FUSING = ("tlora", "tlora_best")
NANO_OVERLAP = 0.6
"""Share of tensor-parallel communication that the ablation assumes hidden: no profile of
the simulated GPUs is measured, so that without it they hide nothing."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trace and how it is cut to 128 GPUs."""

    file: str | None
    """None: drawn here."""
    shape: TraceShape


SOURCES = {
    # 128 of the 2,400 GPUs or so that the traced cluster had.
    "philly": Source(file="philly_4w_20171002.csv.gz", shape=TraceShape(sample=1 / 19)),
    "lingjun": Source(file="alibaba_lingjun2023_16d.csv.gz", shape=TraceShape(sample=0.25)),
    # Jobs of up to 1,024 GPUs: cut so that the largest fits.
    "kalos": Source(
        file="acme_kalos_completed_nonEval_90d.csv.gz", shape=TraceShape(gpu_divisor=8)
    ),
    "synthetic": Source(file=None, shape=TraceShape()),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One study and the policies to run in it."""

    source: str
    load: float
    seed: int
    variant: str = "base"
    policies: tuple[str, ...] = tuple(POLICIES)
    cluster: str = "cluster-128xA100"
    mix: str = "paper"
    options: dict[str, Any] = field(default_factory=dict)
    nano_overlap: float | None = None
    """In the place of the profile's."""

    def key(self, policy: str) -> tuple[str, ...]:
        """Fields that tell its row from others in the file."""
        facts = (self.source, self.variant, f"{self.load:g}", self.seed, policy)
        return tuple(map(str, facts))


def loads(seeds: int) -> Iterator[Cell]:
    """Every trace, load and seed."""
    for seed in range(seeds):
        for source in SOURCES:
            for load in LOADS:
                yield Cell(source=source, load=load, seed=seed)


def ablations(seeds: int) -> Iterator[Cell]:
    """Fusing policies with one part left out each, at twice the load the GPUs can take alone."""
    variants: dict[str, dict[str, Any]] = {
        "base": {},
        "no residual": {"use_residual": False},
        "no slowdown bound": {"keep_bounds": False},
        "zero migration cost": {"free_moves": True},
    }
    for seed in range(seeds):
        for source in ("philly", "kalos", "lingjun"):
            for name, options in variants.items():
                yield Cell(
                    source=source,
                    load=2.0,
                    seed=seed,
                    variant=name,
                    policies=FUSING,
                    options=options,
                )
            yield Cell(source=source, load=2.0, seed=seed, policies=("isolated",))
            # Alone jobs gain too: over an isolated run with the same machine.
            yield Cell(
                source=source,
                load=2.0,
                seed=seed,
                variant="nano-batch gain",
                policies=("isolated", *FUSING),
                nano_overlap=NANO_OVERLAP,
            )


def mixes(seeds: int) -> Iterator[Cell]:
    """Other LoRA attributes, other GPUs, other bounds."""
    bounds = (1.1, 1.25, 1.5, 2.0, 4.0)
    for seed in range(seeds):
        for cluster in ("cluster-128xA100", "cluster-128xH100"):
            for mix in ("paper", "paper_per_gpu", "measured"):
                name = f"{mix}, {cluster.removeprefix('cluster-')}"
                yield Cell(
                    source="philly", load=2.0, seed=seed, variant=name, cluster=cluster, mix=mix
                )
        for bound in bounds:
            yield Cell(
                source="philly",
                load=2.0,
                seed=seed,
                variant=f"bound {bound:g}",
                policies=("isolated", *FUSING),
                options={"max_slowdown": bound},
            )


PARTS = {"loads": loads, "ablations": ablations, "mixes": mixes}


def synthetic(seed: int, num_jobs: int = 1500) -> Trace:
    """Poisson arrivals; log-normal durations, median 30 min; one GPU mostly, 16 at most."""
    rng = Random(f"synthetic {seed}")
    rows, now_s = [], 0.0
    for index in range(num_jobs):
        now_s += rng.expovariate(1 / 60)
        duration_s = min(math.exp(rng.gauss(math.log(1800), 1.5)), 7 * 86400.0)
        num_gpus = rng.choices((1, 2, 4, 8, 16), (60, 12, 12, 12, 4))[0]
        rows.append(
            TraceRow(name=str(index), submit_s=now_s, duration_s=duration_s, num_gpus=num_gpus)
        )
    return Trace(name="synthetic", rows=tuple(rows), dropped={})


def study_of(cell: Cell, traces: Path, cache: dict[str, Trace]) -> Study:
    """The cell's study, its arrivals at the load asked for."""
    source = SOURCES[cell.source]
    if source.file is None:
        trace = synthetic(cell.seed)
    else:
        trace = cache.setdefault(source.file, None) or read_trace(traces / source.file)
        cache[source.file] = trace
    cluster, profile = load_cluster(REPO / "configs" / "hardware" / f"{cell.cluster}.yaml")
    if cell.nano_overlap is not None:
        profile = replace(profile, nano_overlap=cell.nano_overlap)
    mix, specs = load_mix(cell.mix)
    num_gpus = cluster.shape.num_gpus
    as_recorded = offered_gpus(shaped(trace, source.shape, num_gpus, cell.seed).rows) / num_gpus
    shape = replace(source.shape, load=cell.load / as_recorded)
    options = Options(shape=shape, seed=cell.seed, **cell.options)
    return Study(
        trace=trace, cluster=cluster, profile=profile, mix=mix, specs=specs, options=options
    )


def done_in(path: Path) -> set[tuple[str, ...]]:
    """Keys of the rows that a file holds."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {
            (r["source"], r["variant"], r["target_load"], r["seed"], r["policy"])
            for r in csv.DictReader(file)
        }


def main() -> int:
    """Runs the cells of one part that are still missing."""
    parser = bench_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sources", default=",".join(SOURCES), help="only these traces")
    args = parser.parse_args()
    path = args.csv or RESULTS / f"simulation_{args.part}.csv"
    done, cache = done_in(path), {}
    for cell in PARTS[args.part](args.seeds):
        missing = [policy for policy in cell.policies if cell.key(policy) not in done]
        if not missing or cell.source not in args.sources.split(","):
            continue
        study = study_of(cell, args.traces, cache)
        for policy in missing:
            run = study.run(policy)
            about = {
                "source": cell.source,
                "variant": cell.variant,
                "target_load": f"{cell.load:g}",
                "commit": args.commit,
            }
            row = about | summary_rows(study, [run])[0] | {"wall_s": round(run.wall_s, 1)}
            append_rows(path, [row])
            hours = run.summary.mean_jct_s / 3600
            print(*cell.key(policy), f"mean JCT {hours:.2f} h", f"{run.wall_s:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
