"""The studies of each part: traces, loads, seeds, variants and policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from scripts.bench.harness.arguments import REPO
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policy import NO_COST
from tlora_megatron.scheduler.registry import POLICIES
from tlora_megatron.sim.bounds import Limits
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceRow, TraceShape, read_trace
from tlora_megatron.sim.workload import load_mix

_SIZES = (1, 2, 4, 8, 16)
_SHARES = (60, 12, 12, 12, 4)
_LONGEST_S = 7 * 86400.0
_ROUNDING = 1e-9


def _poisson(mean_s: float) -> Callable[[Random], float]:
    return lambda rng: rng.expovariate(1 / mean_s)


_one_a_minute = _poisson(60)


def _log_normal(rng: Random) -> float:
    return math.exp(rng.gauss(math.log(1800), 1.5))


def _mixed_sizes(rng: Random) -> int:
    return rng.choices(_SIZES, _SHARES)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """How the jobs of a trace are drawn."""

    num_jobs: int
    gap_s: Callable[[Random], float] = _one_a_minute
    """From one submission to the next."""
    duration_s: Callable[[Random], float] = _log_normal
    num_gpus: Callable[[Random], int] = _mixed_sizes
    load: float | None = None
    """Offered load; None: submissions as drawn."""
    name: str

    def draw(self, seed: int) -> Trace:
        rng = Random(f"{self.name} {seed}")
        rows, now_s = [], 0.0
        for index in range(self.num_jobs):
            now_s += self.gap_s(rng)
            duration_s, num_gpus = min(self.duration_s(rng), _LONGEST_S), self.num_gpus(rng)
            row = {"submit_s": now_s, "duration_s": duration_s, "num_gpus": num_gpus}
            rows.append(TraceRow(name=str(index), **row))
        return Trace(name=self.name, rows=tuple(rows), dropped={})


def synthetic(seed: int) -> Trace:
    """Poisson arrivals; log-normal durations, median 30 min; one GPU mostly, 16 at most."""
    return Crowd(name="synthetic", num_jobs=1500).draw(seed)


_CROWDS = (
    Crowd(name="5,000 in a minute", num_jobs=5000, gap_s=_poisson(60 / 5000)),
    Crowd(name="1,000 at once", num_jobs=1000, gap_s=lambda rng: 0.0),
    Crowd(name="all 1 GPU", num_jobs=1500, num_gpus=lambda rng: 1, load=2.0),
    Crowd(name="all 64 GPUs", num_jobs=500, num_gpus=lambda rng: 64, load=2.0),
    # Median 8 min, and a mean that the longest few make.
    Crowd(
        name="heavy tail",
        num_jobs=1500,
        duration_s=lambda rng: 250 * rng.paretovariate(1.05),
        load=2.0,
    ),
)
ADVERSARIAL = {crowd.name: crowd for crowd in _CROWDS}


LOADS = (0.5, 1.0, 2.0, 3.0, 5.0)
FUSING = ("tlora", "tlora_best", "tlora_elastic")
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
    load: float | None
    """Offered load; None: arrivals as they are drawn."""
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
        return self.source, self.variant, self.target_load, str(self.seed), policy

    @property
    def target_load(self) -> str:
        """The load as it stands in a file."""
        return "" if self.load is None else f"{self.load:g}"


def loads(seeds: Sequence[int]) -> Iterator[Cell]:
    """Every trace, load and seed."""
    for seed in seeds:
        for source in SOURCES:
            for load in LOADS:
                yield Cell(source=source, load=load, seed=seed)


def ablations(seeds: Sequence[int]) -> Iterator[Cell]:
    """Fusing policies with one part left out each, at twice the load the GPUs can take alone.

    And what fusing brings where queues are longest.
    """
    variants: dict[str, dict[str, Any]] = {
        "base": {},
        "no residual": {"rules": {"use_residual": False}},
        "no slowdown bound": {"rules": {"keep_bounds": False}},
        "zero migration cost": {"rules": {"cost": NO_COST}},
    }
    both = ("isolated", "tlora_elastic")
    for seed in seeds:
        for source in ("philly", "kalos", "lingjun"):
            at = partial(Cell, source=source, seed=seed)
            for name, options in variants.items():
                yield at(load=2.0, variant=name, policies=FUSING, options=options)
            yield at(load=2.0, policies=("isolated",))
            for name in ("base", "no residual"):
                yield at(load=5.0, variant=name, policies=both, options=variants[name])
            # Alone jobs gain too: over an isolated run with the same machine.
            gain = {"variant": "nano-batch gain", "nano_overlap": NANO_OVERLAP}
            yield at(load=2.0, policies=("isolated", *FUSING), **gain)


def mixes(seeds: Sequence[int]) -> Iterator[Cell]:
    """Other LoRA attributes, other GPUs, other bounds."""
    for seed in seeds:
        at = partial(Cell, source="philly", load=2.0, seed=seed)
        for cluster in ("cluster-128xA100", "cluster-128xH100"):
            for mix in ("paper", "paper_per_gpu", "measured"):
                name = f"{mix}, {cluster.removeprefix('cluster-')}"
                yield at(variant=name, cluster=cluster, mix=mix)
        for bound in (1.1, 1.25, 1.5, 2.0, 4.0):
            policies, options = ("isolated", *FUSING), {"max_slowdown": bound}
            yield at(variant=f"bound {bound:g}", policies=policies, options=options)


def adversarial(seeds: Sequence[int]) -> Iterator[Cell]:
    """Jobs that come at once, or are all alike, or hardly ever end."""
    for seed in seeds:
        for name, crowd in ADVERSARIAL.items():
            yield Cell(source=name, load=crowd.load, seed=seed)


PARTS: dict[str, Callable[[Sequence[int]], Iterator[Cell]]] = {
    part.__name__: part for part in (loads, ablations, mixes, adversarial)
}


def study_of(cell: Cell, traces: Path, cache: dict[str, Trace]) -> Study:
    """The cell's study, its arrivals at the load asked for."""
    trace, shape = _trace_of(cell, traces, cache)
    cluster, profile = load_cluster(REPO / "configs" / "hardware" / f"{cell.cluster}.yaml")
    if cell.nano_overlap is not None:
        profile = replace(profile, nano_overlap=cell.nano_overlap)
    mix, specs = load_mix(cell.mix)
    options = Options(shape=replace(shape, load=cell.load), seed=cell.seed, **cell.options)
    return Study(
        trace=trace, cluster=cluster, profile=profile, mix=mix, specs=specs, options=options
    )


def _trace_of(cell: Cell, traces: Path, cache: dict[str, Trace]) -> tuple[Trace, TraceShape]:
    if cell.source in ADVERSARIAL:
        return ADVERSARIAL[cell.source].draw(cell.seed), TraceShape()
    source = SOURCES[cell.source]
    if source.file is None:
        return synthetic(cell.seed), source.shape
    if source.file not in cache:
        cache[source.file] = read_trace(traces / source.file)
    return cache[source.file], source.shape


def exceeded_by(limits: Limits, speeds: Speeds) -> list[str]:
    """Groups that train faster than the limits allow, in words; the bounds hold if none."""
    found = []
    for (kinds, num_gpus), rates in speeds.answers().items():
        if rates is None or not limits.fastest.keys() >= set(kinds):
            continue
        alone = all(rates.by_kind[k] <= limits.fastest[k] * (1 + _ROUNDING) for k in kinds)
        full = limits.full[speeds.base_of(kinds[0])] * num_gpus
        if not alone or rates.total > full * (1 + _ROUNDING):
            found.append(f"kinds {kinds} on {num_gpus} GPUs: {rates.total:.0f} tokens/s")
    return found
