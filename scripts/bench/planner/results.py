"""Rows of predicted and measured layouts: the CSV, the summary of errors and choices."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from scripts.bench.harness.rows import gpu_name, versions
from scripts.bench.planner.cases import Case
from tlora_megatron.planner.cost.memory import MemoryUse
from tlora_megatron.planner.cost.step_terms import StepCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case; the fields are the CSV's columns; errors are predicted over measured, less 1."""

    gpu: str
    versions: str
    commit: str
    gpus: int
    model: str
    layers: int
    tp: int
    pp: int
    vpp: int = 1
    cp: int = 1
    dp: int
    nodes: int = 1
    """Nodes that the GPUs are of, or pretend to be of."""
    batches: int = 0
    """Micro-batches of a replica in each round of Megatron-LM's trainer; 0 = `tlora train`."""
    recompute: str
    jobs: int
    tokens: int
    """Micro-batch budget."""
    predicted_s: float
    """Seconds of a round."""
    measured_s: float
    predicted_bytes: int
    """Most that one GPU's tensors take."""
    measured_bytes: int
    predicted_round_tokens: int
    """Rows of all jobs in a round."""
    measured_round_tokens: int

    @classmethod
    def of(
        cls,
        case: Case,
        prediction: tuple[StepCost, MemoryUse],
        measured: tuple[float, float, int],
        *,
        commit: str,
        nodes: int = 1,
    ) -> Row:
        """The row of a case, whose seconds, tokens and peak (0 without CUDA) were measured."""
        plan, (cost, memory), (seconds, tokens, peak) = case.plan, prediction, measured
        return cls(
            gpu=gpu_name(), versions=versions("megatron-core"), commit=commit, gpus=plan.num_gpus,
            model=case.model if case.model.startswith("tiny") else f"llama-3.1-{case.model}",
            layers=case.spec.num_layers, tp=plan.tp_size, pp=plan.pp_size, vpp=plan.vpp_size,
            cp=plan.cp_size, dp=plan.dp_size, nodes=nodes,
            batches=plan.num_micro_batches or 0, recompute=plan.recompute, jobs=len(case.jobs),
            tokens=plan.micro_batch_tokens, predicted_s=round(cost.step_time_s, 5),
            measured_s=round(seconds, 5), predicted_bytes=round(memory.allocated_bytes),
            measured_bytes=peak, predicted_round_tokens=round(cost.load.tokens),
            measured_round_tokens=round(tokens),
        )  # fmt: skip

    @property
    def case(self) -> str:
        """The case in the form in which it is asked for."""
        batches = f" m{self.batches}" if self.batches else ""
        layout = f"tp{self.tp} pp{self.pp}{self._vpp}{self._cp.lower()}"
        model = f"{self.model.removeprefix('llama-3.1-')}/{self.layers}"
        return f"{model} {layout} {self.recompute} {self.jobs}j {self.tokens}t{batches}"

    @property
    def layout(self) -> str:
        return f"TP{self.tp} PP{self.pp}{self._vpp}{self._cp} DP{self.dp}"

    @property
    def _vpp(self) -> str:
        return f"x{self.vpp}" if self.vpp > 1 else ""

    @property
    def _cp(self) -> str:
        return f" CP{self.cp}" if self.cp > 1 else ""

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def tokens_error(self) -> float:
        return self.predicted_round_tokens / self.measured_round_tokens - 1

    @property
    def rate_error(self) -> float:
        """Free of which rounds were measured."""
        predicted = self.predicted_round_tokens / self.predicted_s
        return predicted * self.measured_s / self.measured_round_tokens - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less 1; 0 where memory is not measured."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0


def show(row: Row) -> str:
    return (
        f"{row.predicted_s * 1e3:8.1f} ms predicted, {row.measured_s * 1e3:8.1f} measured "
        f"({row.time_error:+.1%}); {row.predicted_bytes / 2**30:6.1f} GiB, "
        f"{row.measured_bytes / 2**30:6.1f} ({row.memory_error:+.1%}); tokens "
        f"{row.predicted_round_tokens}, {row.measured_round_tokens}"
    )


def read_csv(path: Path) -> list[Row]:
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(Row)}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(**cast(Any, {k: kinds[k](v) for k, v in row.items()}))
            for row in csv.DictReader(file)
        ]


def report(rows: Sequence[Row]) -> list[str]:
    """Errors over all rows, and what was chosen for each mix that ran under several layouts."""
    lines = [f"{len(rows)} cases"]
    for what, errors in (
        ("step time", [row.time_error for row in rows]),
        ("tokens/s", [row.rate_error for row in rows]),
        ("tokens a round", [row.tokens_error for row in rows]),
    ):
        sizes = [abs(error) for error in errors]
        lines.append(
            f"{what}: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, "
            f"mean {statistics.fmean(errors):+.1%}"
        )
    memory = [row.memory_error for row in rows if row.measured_bytes]
    if memory:
        lines.append(f"peak memory: {min(memory):+.1%} to {max(memory):+.1%}")
    groups = defaultdict(list)
    for row in rows:
        mix = row.gpu, row.gpus, row.model, row.layers, row.recompute, row.jobs
        groups[*mix, row.nodes, row.batches > 0].append(row)
    for key, members in groups.items():
        if len({row.layout for row in members}) > 1:
            lines.append(_choice(key, members))
    return lines


def _choice(key: tuple[Any, ...], rows: Sequence[Row]) -> str:
    def measured(row: Row) -> float:
        return row.measured_round_tokens / row.measured_s

    chosen = max(rows, key=lambda row: row.predicted_round_tokens / row.predicted_s)
    best = max(rows, key=measured)
    where = f"{key[0]} x{key[1]} {key[2]}/{key[3]} {key[5]} jobs"
    where += (f" on {key[6]} nodes" if key[6] > 1 else "") + (
        " under Megatron-LM" if key[7] else ""
    )
    return (
        f"{where}: chosen {chosen.layout} {measured(chosen):,.0f} tokens/s, "
        f"{measured(chosen) / measured(best):.1%} of the best measured, {best.layout}"
    )
