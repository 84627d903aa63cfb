"""Which LoRA sharding `auto` takes, beside the steps that were measured on H200s."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scripts.bench.planner.cases import model_spec
from tlora_megatron.planner.candidate import SHARDINGS, Plan
from tlora_megatron.planner.choices import preferred, sharding_times
from tlora_megatron.planner.cost.cost_model import step_cost
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

_DOCUMENT = 512
"""Rows of a document in `scripts/bench/sharding`."""
_LAYERS = {"8b": 32, "70b": 80}
_TERMS = ("gemm_s", "attention_s", "elementwise_s", "lora_s", "tp_comm_s", "gradient_sync_s")
"""The terms of a step of the bench, as fields of `StepCost`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cell:
    """One measured case on one layout."""

    tp_size: int
    sequence_parallel: bool
    model: str
    layers: int
    tokens: int
    adapters: int
    rank: int

    @property
    def jobs(self) -> list[JobLoad]:
        batch = self.tokens // self.adapters // _DOCUMENT
        lengths = LengthHistogram.single(_DOCUMENT)
        return [
            JobLoad(name=f"job{i}", rank=self.rank, batch_size=batch, lengths=lengths)
            for i in range(self.adapters)
        ]

    @property
    def plan(self) -> Plan:
        return Plan(
            tp_size=self.tp_size,
            sequence_parallel=self.sequence_parallel,
            micro_batch_tokens=self.tokens,
        )


Cells = dict[_Cell, dict[str, float]]
"""Measured milliseconds of a step by strategy."""


@pytest.fixture(scope="module")
def h200(repo: Path) -> HardwareProfile:
    return load_profile(repo / "configs/hardware/h200.json")


@pytest.fixture(scope="module")
def cells(repo: Path) -> Cells:
    found: Cells = defaultdict(dict)
    with (repo / "scripts/bench/results/lora_sharding.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert row["gpu"] == "NVIDIA H200"
            cell = _Cell(
                tp_size=int(row["world"]),
                sequence_parallel=row["sequence_parallel"] == "True",
                model=row["model"].rpartition("-")[2],
                layers=int(row["layers"]),
                tokens=int(row["tokens"]),
                adapters=int(row["adapters"]),
                rank=int(row["rank"]),
            )
            assert row["strategy"] not in found[cell], "a cell is measured once"
            found[cell][row["strategy"]] = float(row["step_ms"])
    return dict(found)


def test_s_lora_over_fold_is_predicted_as_measured(cells: Cells, h200: HardwareProfile) -> None:
    errors = []
    for cell, measured in cells.items():
        spec = replace(model_spec(cell.model), num_layers=cell.layers)
        fold, s_lora = (
            sum(getattr(cost, term) for term in _TERMS)
            for cost in (
                step_cost(spec, cell.jobs, replace(cell.plan, lora_sharding=name), h200)
                for name in ("fold", "s_lora")
            )
        )
        errors.append(abs(s_lora / fold / (measured["s_lora"] / measured["fold"]) - 1))
    assert len(errors) >= 18
    assert statistics.median(errors) < 0.02
    assert max(errors) < 0.06


def test_what_auto_takes_is_nearly_the_fastest(cells: Cells, h200: HardwareProfile) -> None:
    """At most the 2 % that another sharding must save over fold are lost."""
    chosen = {}
    for cell, measured in cells.items():
        spec = replace(model_spec(cell.model), num_layers=_LAYERS[cell.model])
        choice = preferred(sharding_times(spec, cell.jobs, cell.plan, h200))
        chosen[cell] = measured[choice] / min(measured[name] for name in SHARDINGS) - 1, choice
    assert {choice for _, choice in chosen.values()} == {"fold", "s_lora"}
    assert max(lost for lost, _ in chosen.values()) <= 0.02
