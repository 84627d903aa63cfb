"""The planner's times and memory beside the measured rows of `scripts.bench.experts`; no GPU.

    python -m scripts.bench.experts.predicted           # experts.csv with what is predicted
    python -m scripts.bench.experts.predicted --fit     # and the times that fit the rows best
    python -m scripts.bench.experts.predicted --csv scripts/bench/results/experts_predicted.csv

The first two take seconds. `--fit` prints values of `ExpertTimes`, the seconds that no operation of
a hardware profile has: those with the least squares of relative errors over all rows, none below 0.
Write them to `tlora_megatron/planner/cost/rates.py`, and run the last line. Everything else
of a prediction comes from the profile and from counted bytes.

Rows are those of one GPU with random routers. `floor` is predicted as a layer's products, passes
and attention, and the head; `adapters` with what adapters add; `step` as that many whole rounds.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from scripts.bench.experts.mixes import CASES, make_mix
from scripts.bench.harness.arguments import REPO, RESULTS, bench_parser
from scripts.bench.harness.rows import write_rows
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import MemoryModel
from tlora_megatron.planner.cost.rates import EXPERT_TIMES, ExpertTimes, Rates
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.hardware import HardwareProfile, load_profile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

MODES = ("floor", "adapters", "step")
NAMES = tuple(field.name for field in fields(ExpertTimes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A measurement and its prediction, by the CSV's columns; errors are their ratio less 1."""

    gpu: str
    commit: str
    model: str
    layers: int
    case: str
    tokens: int
    """Rows of a micro-batch."""
    micro_batches: int
    """Micro-batches of an optimizer step; of what is measured where the mode is `step`."""
    mode: str
    predicted_ms: float
    measured_ms: float
    predicted_bytes: int
    """Of the adapters' and the steps' peak; 0 for the floor, which has no jobs."""
    measured_bytes: int

    @property
    def time_error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1 if self.predicted_bytes else 0.0


class Predictor:
    """Predicts rows on one kind of GPU; they do not tell the benchmark's vocabulary."""

    def __init__(self, hardware: HardwareProfile, vocab_size: int = 8192) -> None:
        self._hardware, self._vocab_size = hardware, vocab_size

    def row(self, measured: Mapping[str, str], times: ExpertTimes = EXPERT_TIMES) -> Row:
        """Returns a row of experts.csv with its prediction."""
        name, mode, tokens = case_of(measured), measured["mode"], int(measured["tokens_per_gpu"])
        spec, plan = self._spec(measured), Plan(micro_batch_tokens=tokens)
        steps = 8 if mode != "step" else int(measured["micro_batches_per_step"])
        jobs = loads(name, tokens=tokens, micro_batches=steps)
        rates = Rates(self._hardware, times)
        cost = CostModel(spec, jobs, self._hardware, rates=rates).step_cost(plan)
        use = MemoryModel(spec, jobs, self._hardware).use(plan)
        return Row(
            gpu=measured["gpu"], commit=measured["commit"], model=measured["model"],
            layers=spec.num_layers, case=name, tokens=tokens, micro_batches=steps, mode=mode,
            predicted_ms=round(_seconds(cost, mode, steps) * 1e3, 3),
            measured_ms=float(measured["step_ms"]),
            predicted_bytes=0 if mode == "floor" else round(use.allocated_bytes),
            measured_bytes=int(measured["peak_bytes"]),
        )  # fmt: skip

    def _spec(self, measured: Mapping[str, str]) -> ModelSpec:
        spec = read_model_spec(REPO / f"configs/models/{measured['model']}.json")
        return replace(spec, num_layers=int(measured["layers"]), vocab_size=self._vocab_size)

    def fitted(self, rows: Sequence[Mapping[str, str]]) -> ExpertTimes:
        """Returns the times with the least squares of relative errors: predictions are linear."""
        none = ExpertTimes()
        base = [self.row(row, none) for row in rows]
        measured = np.array([row.measured_ms for row in base])
        left = 1 - np.array([row.predicted_ms for row in base]) / measured
        unit = 1e-3
        ones = [replace(none, **{name: unit}) for name in NAMES]
        slopes = np.array([[self.row(row, one).predicted_ms for row in rows] for one in ones])
        slopes = (slopes - [row.predicted_ms for row in base]) / measured
        used = [index for index, slope in enumerate(slopes) if slope.any()]
        found = dict.fromkeys(NAMES, 0.0)
        while used:
            values = np.linalg.lstsq(slopes[used].T, left, rcond=None)[0]
            if values.min() >= 0:
                names = (NAMES[index] for index in used)
                found |= dict(zip(names, (values * unit).tolist(), strict=True))
                break
            used.remove(used[int(values.argmin())])
        return ExpertTimes(**{name: float(f"{value:.3g}") for name, value in found.items()})


def _seconds(cost: StepCost, mode: str, steps: int) -> float:
    if mode == "step":
        return steps * cost.step_time_s
    floor_s = cost.gemm_s + cost.attention_s + cost.elementwise_s + cost.head_s + cost.host_s
    return floor_s + cost.lora_s * (mode == "adapters")


def loads(name: str, *, tokens: int, micro_batches: int) -> list[JobLoad]:
    """Returns the jobs of a case as the planner sees them."""
    mix = make_mix(name, tokens=tokens, micro_batches=micro_batches, vocab_size=32)
    return [
        JobLoad.from_spec(
            spec,
            LengthHistogram.from_lengths(len(sequence.tokens) - 1 for sequence in data),
            target_share=mix.target_share,
        )
        for spec, data in zip(mix.specs, mix.data, strict=True)
    ]


def case_of(measured: Mapping[str, str]) -> str:
    """Returns the name of the case that a row is of."""
    keys = ("jobs", "targets", "expert_rank", "sharing")
    wanted = tuple(measured[key] for key in keys)
    for name, case in CASES.items():
        targets = "attention" if case.expert_ranks is None else "all"
        if wanted == (str(len(case.ranks)), targets, case.shown_expert_rank, case.sharing):
            return name
    raise ValueError(f"a row must be of a case of scripts.bench.experts, got {wanted}")


def measured_rows(path: Path) -> list[dict[str, str]]:
    """Returns the last commit's rows of one GPU, without PEFT's, routed at random."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["mode"] in MODES and row["world"] == "1" and row["routing"] == "uniform"
        ]
    return [row for row in rows if row["commit"] == rows[-1]["commit"]]


def report(rows: Sequence[Row]) -> list[str]:
    """Returns a line a row, then the errors of all and of each mode."""
    lines = [
        f"{row.case:>16} {row.mode:>8}: {row.predicted_ms:7.1f} ms predicted, "
        f"{row.measured_ms:7.1f} measured ({row.time_error:+.1%})"
        + (f"; memory {row.memory_error:+.1%}" if row.predicted_bytes else "")
        for row in rows
    ]
    for what in ("all", *MODES):
        errors = [row.time_error for row in rows if what in ("all", row.mode)]
        if errors:
            sizes = [abs(error) for error in errors]
            lines.append(
                f"{what}: {len(errors)} rows, median error {statistics.median(sizes):.1%}, worst "
                f"{max(sizes):.1%}, mean {statistics.fmean(errors):+.1%}"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison, fits, or replaces the CSV."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=Path, default=RESULTS / "experts.csv", help="measured")
    parser.add_argument("--hardware", type=Path, default=REPO / "configs/hardware/h200.json")
    parser.add_argument("--fit", action="store_true", help="predict with the times that fit best")
    args = parser.parse_args(argv)
    predictor = Predictor(load_profile(args.hardware))
    measured, times = measured_rows(args.rows), EXPERT_TIMES
    if args.fit:
        times = predictor.fitted(measured)
        print("\n".join(f"{name}: {value:g}" for name, value in asdict(times).items()))
    rows = [predictor.row(row, times) for row in measured]
    print("\n".join(report(rows)))
    if args.csv:
        write_rows(args.csv, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
