"""The studies of each part: traces, loads, seeds, variants and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.bench.harness.arguments import REPO
from scripts.bench.simulate.traces import ADVERSARIAL, synthetic
from tlora_megatron.scheduler.registry import POLICIES
from tlora_megatron.sim.cluster import load_cluster
from tlora_megatron.sim.study import Options, Study
from tlora_megatron.sim.trace import Trace, TraceShape, read_trace
from tlora_megatron.sim.workload import load_mix

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
        "no residual": {"use_residual": False},
        "no slowdown bound": {"keep_bounds": False},
        "zero migration cost": {"free_moves": True},
    }
    for seed in seeds:
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
            for name, options in (("base", {}), ("no residual", {"use_residual": False})):
                yield Cell(
                    source=source,
                    load=5.0,
                    seed=seed,
                    variant=name,
                    policies=("isolated", "tlora_elastic"),
                    options=options,
                )
            # Alone jobs gain too: over an isolated run with the same machine.
            yield Cell(
                source=source,
                load=2.0,
                seed=seed,
                variant="nano-batch gain",
                policies=("isolated", *FUSING),
                nano_overlap=NANO_OVERLAP,
            )


def mixes(seeds: Sequence[int]) -> Iterator[Cell]:
    """Other LoRA attributes, other GPUs, other bounds."""
    bounds = (1.1, 1.25, 1.5, 2.0, 4.0)
    for seed in seeds:
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


def adversarial(seeds: Sequence[int]) -> Iterator[Cell]:
    """Jobs that come at once, or are all alike, or hardly ever end."""
    for seed in seeds:
        for name, crowd in ADVERSARIAL.items():
            yield Cell(source=name, load=crowd.load, seed=seed)


PARTS: dict[str, Callable[[Sequence[int]], Iterator[Cell]]] = {
    "loads": loads,
    "ablations": ablations,
    "mixes": mixes,
    "adversarial": adversarial,
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
