"""Predictions beside what was measured on H200s: groups of jobs, LoRA shardings, routed experts."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scripts.bench.experts.mixes import CASES
from scripts.bench.experts.predicted import MODES, Predictor, case_of, main, measured_rows
from scripts.bench.planner import cases
from scripts.bench.planner.results import read_csv
from scripts.bench.step.jobs import make_mixes
from tests.helpers.planner_case import H200, step_cost
from tlora_megatron.planner.candidate import SHARDINGS, Plan
from tlora_megatron.planner.choices import preferred, sharding_times
from tlora_megatron.planner.cost.rates import ExpertTimes
from tlora_megatron.planner.search import GROUP_BUDGETS, GroupModel
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

_RATE_BOUND = 0.08
"""Error of the tokens per second of a group; the worst is 6 % (two GPUs, eight jobs)."""
_GAIN_BOUND = 0.15
"""Error of the gain of training together; the worst is 8 % (small batches)."""


def _measured_rates(repo: Path, mix: str) -> dict[str, float]:
    """Tokens per second by mode, from the end-to-end bench's results."""
    path = repo / "scripts/bench/results/end_to_end.csv"
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["jobs"] == f"8 ({mix})"]
    return {row["mode"]: float(row["tokens_per_s"]) for row in rows}


def _loads(mix: str) -> list[JobLoad]:
    """The jobs of the end-to-end bench, with the lengths of the data they were trained on."""
    made = make_mixes(None, vocab_size=32, target_share=1.0, dropout=0.0, longest=2048)
    [found] = [one for one in made if one.name == mix]
    return [
        JobLoad(
            name=spec.name,
            rank=spec.lora.rank,
            batch_size=spec.batch_size,
            lengths=LengthHistogram.from_lengths(len(s.tokens) - 1 for s in data),
        )
        for spec, data in zip(found.specs, found.data, strict=True)
    ]


@pytest.mark.parametrize("mix", ["batch 1-8", "batch 1-4"])
def test_eight_jobs_together_and_in_turn(repo: Path, mix: str) -> None:
    """One after another is as many steps of each job, as the bench runs them."""
    jobs = _loads(mix)
    model = GroupModel(cases.model_spec("8b"), H200)
    together = sum(model.estimate(jobs, 1).tokens_per_s)
    batches = [job.batch_size * job.lengths.mean for job in jobs]
    alone = [model.estimate([job], 1).tokens_per_s[0] for job in jobs]
    in_turn = sum(batches) / sum(b / rate for b, rate in zip(batches, alone, strict=True))
    measured = _measured_rates(repo, mix)
    assert together == pytest.approx(measured["super_model"], rel=_RATE_BOUND)
    assert in_turn == pytest.approx(measured["sequential"], rel=_GAIN_BOUND)
    gain = measured["super_model"] / measured["sequential"]
    assert together / in_turn == pytest.approx(gain, rel=_GAIN_BOUND)


def test_groups_on_one_to_four_gpus(repo: Path) -> None:
    """Where the plan chosen for a group was run, and that no plan run beats the one chosen.

    Groups are not planned with micro-batches under 8,192 tokens; runs with fewer are slower.
    """
    rows = read_csv(repo / "scripts/bench/results/plan_vs_measured.csv")
    rows = [row for row in rows if row.nodes == row.cp == 1 and not row.batches]
    errors = {}
    for row in rows:
        size = row.model.removeprefix("llama-3.1-")
        spec = replace(cases.model_spec(size), num_layers=row.layers)
        longest = min(cases.LENGTHS[-1], row.tokens // 4)
        jobs = cases.make_jobs(row.jobs, row.gpus, longest)
        estimate = GroupModel(spec, H200).estimate(jobs, row.gpus)
        plan = estimate.plan
        assert plan is not None
        error = sum(estimate.tokens_per_s) * row.measured_s / row.measured_round_tokens - 1
        assert error > -_RATE_BOUND, row
        layout = (plan.tp_size, plan.pp_size, plan.dp_size, plan.recompute)
        if layout == (row.tp, row.pp, row.dp, row.recompute) and row.tokens in GROUP_BUDGETS:
            errors[row.gpus, row.model, row.layers, row.jobs] = error
    assert len(errors) == 5
    assert max(map(abs, errors.values())) < _RATE_BOUND, errors


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
        sp = self.sequence_parallel
        return Plan(tp_size=self.tp_size, sequence_parallel=sp, micro_batch_tokens=self.tokens)


Cells = dict[_Cell, dict[str, float]]
"""Measured milliseconds of a step by strategy."""


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


def test_s_lora_over_fold_is_predicted_as_measured(cells: Cells) -> None:
    errors = []
    for cell, measured in cells.items():
        spec = replace(cases.model_spec(cell.model), num_layers=cell.layers)
        fold, s_lora = (
            sum(getattr(cost, term) for term in _TERMS)
            for cost in (
                step_cost(spec, cell.jobs, replace(cell.plan, lora_sharding=name), H200)
                for name in ("fold", "s_lora")
            )
        )
        errors.append(abs(s_lora / fold / (measured["s_lora"] / measured["fold"]) - 1))
    assert len(errors) >= 18
    assert statistics.median(errors) < 0.02
    assert max(errors) < 0.06


def test_what_auto_takes_is_nearly_the_fastest(cells: Cells) -> None:
    """At most the 2 % that another sharding must save over fold are lost."""
    chosen = {}
    for cell, measured in cells.items():
        spec = replace(cases.model_spec(cell.model), num_layers=_LAYERS[cell.model])
        choice = preferred(sharding_times(spec, cell.jobs, cell.plan, H200))
        chosen[cell] = measured[choice] / min(measured[name] for name in SHARDINGS) - 1, choice
    assert {choice for _, choice in chosen.values()} == {"fold", "s_lora"}
    assert max(lost for lost, _ in chosen.values()) <= 0.02


_TYPICAL, _WORST = 0.05, 0.15
"""Errors of times, of all rows."""
_MEMORY = 0.06


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(H200)


@pytest.fixture
def measured(repo: Path) -> list[dict[str, str]]:
    """Rows of `scripts.bench.experts` on one GPU, all of one commit."""
    with (repo / "scripts/bench/results/experts.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["commit"] == "7962786"]
    return [row for row in rows if row["mode"] in MODES and row["routing"] == "uniform"]


def test_measured_steps_are_predicted(predictor: Predictor, measured: list[dict[str, str]]) -> None:
    rows = [predictor.row(row) for row in measured]
    assert {(row.case, row.mode) for row in rows} >= {(c, m) for c in CASES for m in MODES}
    errors = [abs(row.time_error) for row in rows]
    assert statistics.median(errors) < _TYPICAL
    assert max(errors) < _WORST
    assert max(abs(row.memory_error) for row in rows) < _MEMORY


def test_a_fit_finds_the_times_that_rows_were_made_with(
    predictor: Predictor, measured: list[dict[str, str]]
) -> None:
    made = ExpertTimes(routing_s=400e-6, outer_linear_s=0.0, job_step_s=2e-3)
    few = [row for row in measured if case_of(row) in ("attention", "experts_outer")]
    rows = [row | {"step_ms": str(predictor.row(row, made).predicted_ms)} for row in few]
    found = predictor.fitted(rows)
    assert found.routing_s == pytest.approx(made.routing_s, rel=0.01)
    assert found.job_step_s == pytest.approx(made.job_step_s, rel=0.01)
    assert found.outer_linear_s == pytest.approx(0.0, abs=1e-6)
    # A time that would have to be negative is left out.
    slower = replace(made, job_step_s=0.0)
    fast = [
        row | {"step_ms": str(predictor.row(row, slower).predicted_ms * share)}
        for row in few
        for share in [0.97 if row["mode"] == "step" else 1.0]
    ]
    assert predictor.fitted(fast).job_step_s == 0.0


def test_rows_of_the_last_commit_on_one_gpu_are_compared(
    tmp_path: Path, measured: list[dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    row = measured[0]
    others = [
        row | {"commit": "old"},
        row | {"world": "2"},
        row | {"mode": "hf_peft (1 x 1 x 1024)"},
        row,
        row | {"commit": "later", "world": "2"},
    ]
    path, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows(others)
    assert measured_rows(path) == [row]
    assert main(["--rows", str(path), "--csv", str(out)]) == 0
    assert "all: 1 rows, median error" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    with pytest.raises(ValueError, match="a row must be of a case of scripts"):
        case_of(row | {"jobs": "3"})
