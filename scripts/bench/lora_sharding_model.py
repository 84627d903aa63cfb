#!/usr/bin/env python3
"""The planner's model of LoRA shardings beside what `lora_sharding.py` measured, cell by cell.

    PYTHONPATH=. python scripts/bench/lora_sharding_model.py

A predicted step is the bench's own: a few layers, forward and backward, and the sum of replicated
gradients. `auto` looks at a round of the whole model instead, AdamW included; here one with the
bench's sequences, in which every job steps. What its choice costs is by the measured steps.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plan_cases import model_spec

from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.planner.candidate import SHARDINGS, Plan
from tlora_megatron.planner.cost.cost_model import step_cost
from tlora_megatron.planner.lora_choice import preferred, sharding_times
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.runtime.plan_inputs import profile_of_gpu

RESULTS = Path(__file__).parent / "results" / "lora_sharding.csv"
_DOCUMENT = 512
"""`lora_sharding_layers.DOCUMENT`, which imports torch."""
_WHOLE = {"8b": 32, "70b": 80}
"""Layers of the models."""
_TERMS = ("gemm_s", "attention_s", "elementwise_s", "lora_s", "tp_comm_s", "gradient_sync_s")
"""Of `StepCost`, that a step of the bench has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One case on one layout."""

    gpu: str
    tp_size: int
    sequence_parallel: bool
    model: str
    layers: int
    tokens: int
    adapters: int
    rank: int

    @property
    def label(self) -> str:
        """For a line."""
        parallel = f"TP{self.tp_size}{'+SP' * self.sequence_parallel}"
        return f"{parallel} {self.model} {self.adapters} x {self.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A cell's seconds by sharding."""

    cell: Cell
    measured_s: dict[str, float]
    """A step's, of all strategies."""
    step_s: dict[LoraSharding, float]
    """The same, predicted."""
    round_s: dict[LoraSharding, float]
    """What `auto` sees."""

    @property
    def ratio_error(self) -> float:
        """Predicted s_lora over fold, beside the measured one."""
        predicted = self.step_s["s_lora"] / self.step_s["fold"]
        return predicted / (self.measured_s["s_lora"] / self.measured_s["fold"]) - 1

    @property
    def choice(self) -> LoraSharding:
        """What `auto` takes."""
        return preferred(self.round_s)

    @property
    def lost(self) -> float:
        """Share by which that is slower than the fastest sharding of standard adapters."""
        fastest_s = min(self.measured_s[name] for name in SHARDINGS)
        return self.measured_s[self.choice] / fastest_s - 1

    @property
    def line(self) -> str:
        """Ratios are of s_lora to fold."""
        measured, step, whole = (
            t["s_lora"] / t["fold"] for t in (self.measured_s, self.step_s, self.round_s)
        )
        times = ", ".join(f"{self.round_s[name] * 1e3:,.1f}" for name in SHARDINGS)
        return (
            f"{self.cell.label}: measured {measured:.3f}, predicted {step:.3f} "
            f"({self.ratio_error:+.1%}), in a round {whole:.3f} ({times} ms): "
            f"auto takes {self.choice}, {self.lost:.1%} over the fastest"
        )


def read_cells(path: Path) -> dict[Cell, dict[str, float]]:
    """Measured seconds of a step by strategy.

    Raises:
        ValueError: if a cell was measured twice.
    """
    cells: dict[Cell, dict[str, float]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            cell = Cell(
                gpu=row["gpu"],
                tp_size=int(row["world"]),
                sequence_parallel=row["sequence_parallel"] == "True",
                model=row["model"].rpartition("-")[2],
                layers=int(row["layers"]),
                tokens=int(row["tokens"]),
                adapters=int(row["adapters"]),
                rank=int(row["rank"]),
            )
            if row["strategy"] in cells[cell]:
                raise ValueError(f"{cell.label} must have one row for {row['strategy']}, got two")
            cells[cell][row["strategy"]] = float(row["step_ms"]) / 1e3
    return dict(cells)


def compare(cell: Cell, measured_s: dict[str, float]) -> Comparison:
    """Predicts a cell's step and round under each sharding.

    Raises:
        ValueError: if no profile names the cell's GPU.
    """
    hardware = profile_of_gpu(cell.gpu)
    if hardware is None:
        raise ValueError(f"gpu must have a profile in configs/hardware, got {cell.gpu}")
    spec = model_spec(cell.model)
    few = replace(spec, num_layers=cell.layers)
    plan = Plan(
        tp_size=cell.tp_size,
        sequence_parallel=cell.sequence_parallel,
        micro_batch_tokens=cell.tokens,
    )
    jobs = _jobs(cell)
    costs = {
        name: step_cost(few, jobs, replace(plan, lora_sharding=name), hardware)
        for name in SHARDINGS
    }
    return Comparison(
        cell=cell,
        measured_s=measured_s,
        step_s={name: sum(getattr(c, term) for term in _TERMS) for name, c in costs.items()},
        round_s=sharding_times(replace(spec, num_layers=_WHOLE[cell.model]), jobs, plan, hardware),
    )


def _jobs(cell: Cell) -> list[JobLoad]:
    batch = cell.tokens // cell.adapters // _DOCUMENT
    lengths = LengthHistogram.single(_DOCUMENT)
    return [
        JobLoad(name=f"job{i}", rank=cell.rank, batch_size=batch, lengths=lengths)
        for i in range(cell.adapters)
    ]


def report(found: Sequence[Comparison]) -> list[str]:
    """One line a cell and what they come to."""
    errors = [abs(one.ratio_error) for one in found]
    worst = max(found, key=lambda one: one.lost)
    return [
        *(one.line for one in found),
        f"{len(found)} cells: s_lora over fold, median error {statistics.median(errors):.1%}, "
        f"worst {max(errors):.1%}; auto is at most {worst.lost:.1%} over the fastest",
    ]


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--csv", type=Path, default=RESULTS, help="rows of lora_sharding.py")
    args = parser.parse_args()
    print("\n".join(report([compare(*item) for item in read_cells(args.csv).items()])))


if __name__ == "__main__":
    main()
