"""Times each LoRA sharding over the frozen step, on the project's own decoder layers.

A step is forward and backward of a few decoder layers over one packed micro-batch, and the sum over
TP of the gradients that a strategy replicates. All strategies and the frozen layers take turns;
times are medians over rounds of the slowest rank. `block_diagonal` has the case's rank,
`block_diagonal_equal_parameters` as much more as makes its parameters the same (`own_rank`).
Collectives are counted where torch dispatches them, less those of the frozen layers: calls, and
bytes of the whole tensor; the sums of gradients stand apart. Before any case is timed, all
strategies of a small one must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.harness.arguments import REPO, bench_parser
from scripts.bench.harness.clock import (
    Marks,
    is_main,
    largest,
    out_of_time,
    release,
    wait_for_all,
    wait_for_device,
)
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from scripts.bench.sharding.layers import (
    FROZEN,
    LAYERS,
    STRATEGIES,
    TINY,
    Batch,
    Case,
    Collectives,
    Layers,
    Strategy,
    make_batch,
    parameters,
    tensor_bytes,
)
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.profiling.sizes import LLAMA_70B

CONFIGS = REPO / "configs" / "models"


def check(layers: Layers, tokens: int) -> None:
    """Holds all strategies of a small case to the same layers in fp32.

    In bf16 they may be as far from it as `fold` and half of that again: rounding.
    """
    standard = [s for s in STRATEGIES if not s.blocks]
    exact = Layers(layers.spec, layers.layout, torch.float32)
    exact.adopt(layers)
    expected = _results(exact, standard[:1], tokens)["fold"]
    exact.run.close()
    found = _results(layers, standard, tokens)
    # A norm's own rounding: gradients come from bf16 products, 2^-9 each.
    least = [1e-4, 1e-4, 1e-4 if layers.dtype == torch.float32 else 2e-3]
    reference = _errors(found["fold"], expected)
    allowed = [max(1.5 * error, most) for error, most in zip(reference, least, strict=True)]
    for name, result in found.items():
        errors = _errors(result, expected)
        if any(error > most for error, most in zip(errors, allowed, strict=True)):
            raise SystemExit(f"{name} must be within {allowed} of fp32, got {errors}")


Result = tuple[torch.Tensor, torch.Tensor, float]
"""Output, the input's gradient, norm of the adapters' gradients."""


def _results(layers: Layers, strategies: Sequence[Strategy], tokens: int) -> dict[str, Result]:
    layers.prepare(Case(3, 24), strategies)
    batch = make_batch(layers, 3, tokens)
    found = {}
    for strategy in strategies:
        layers.take(strategy.name)
        out, dx = layers.step(strategy.name, batch)
        found[strategy.name] = (out.cpu(), dx.cpu(), layers.gradient_norm(strategy.name))
    layers.forget()
    return found


def _errors(found: Result, expected: Result) -> list[float]:
    """Relative, the largest of a rank."""
    pairs = [(found[i].float(), expected[i].float()) for i in (0, 1)]
    errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return largest([*errors, abs(found[2] / expected[2] - 1)])


def count(layers: Layers, name: str, batch: Batch) -> Collectives:
    """The collectives of one forward and backward."""
    layers.take(name)
    with Collectives() as found:
        layers.passes(batch)
    return found


def times(
    layers: Layers, names: Sequence[str], batch: Batch, rounds: int, steps: int
) -> dict[str, float]:
    """Seconds of a step by strategy: medians over rounds in which all take their turn."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 1):
        for name in names:
            layers.take(name)
            seconds = _timed(lambda name=name: layers.step(name, batch), steps)
            if index:  # the first round compiles and warms up
                found[name].append(seconds)
            for adapter in layers.banks[name].adapters:
                adapter.slab.zero_grad()
    medians = largest([statistics.median(found[name]) for name in names])
    return dict(zip(names, medians, strict=True))


def _timed(step: Callable[[], object], steps: int) -> float:
    """Mean seconds of so many steps, one behind the other."""
    step()
    wait_for_all()
    wait_for_device()  # NCCL's barrier is itself work on the device
    marks = Marks(on_gpu=torch.cuda.is_available())
    marks.set()
    for _ in range(steps):
        step()
    marks.set()
    (seconds,) = marks.seconds()
    return seconds / steps


def rows_of(layers: Layers, case: Case, args: argparse.Namespace, model: str) -> list[dict]:
    chosen = [s for s in STRATEGIES if s.name in args.strategies]
    loras = layers.prepare(case, chosen)
    batch = make_batch(layers, case.adapters, args.tokens)
    names = [FROZEN, *loras]
    counts = {name: count(layers, name, batch) for name in names}
    medians = times(layers, names, batch, args.rounds, args.steps)
    rows = []
    for name, lora in loras.items():
        extra = counts[name].calls - counts[FROZEN].calls
        extra_bytes = counts[name].bytes - counts[FROZEN].bytes
        summed = sum(map(tensor_bytes, layers.replicated(name)))
        rows.append(
            {
                "gpu": gpu_name(), "world": layers.layout.world_size,
                "versions": versions("megatron-core"), "commit": args.commit, "model": model,
                "tokens": args.tokens, "adapters": case.adapters, "rank": case.rank,
                "strategy": name, "step_ms": round(medians[name] * 1e3, 3),
                "frozen_ms": round(medians[FROZEN] * 1e3, 3),
                "lora_collectives_per_layer": round(extra / layers.spec.num_layers, 2),
                "lora_bytes_per_layer": extra_bytes // layers.spec.num_layers,
                "gradient_sum_bytes_per_layer": summed // layers.spec.num_layers,
                "own_rank": lora.rank, "parameters_per_layer": parameters(layers.spec, lora),
                "sequence_parallel": layers.layout.sequence_parallel,
                "layers": layers.spec.num_layers,
            }
        )  # fmt: skip
    layers.forget()
    return rows


def main() -> None:
    """Times the cases in order, as far as the budget reaches."""
    args, begin = _arguments(), time.monotonic()
    world = int(os.environ["WORLD_SIZE"])
    layout = ParallelLayout(tp_size=world, sequence_parallel=args.sequence_parallel)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    for model in args.models:
        # Ranks that wait for each other say where, instead of until somebody ends them.
        faulthandler.dump_traceback_later(args.patience_s, exit=True)
        layers = Layers(_spec(model, args.layers), layout, dtype)
        if not args.no_check:
            check(layers, min(args.tokens, 1024))
        longest = 0.0
        for case in args.cases:
            started = time.monotonic()
            faulthandler.dump_traceback_later(args.patience_s, exit=True)
            if out_of_time(begin, args.budget_s - longest):
                break
            rows = rows_of(layers, case, args, model)
            longest = max(longest, time.monotonic() - started)
            if is_main():
                _write(rows, args.csv)
        faulthandler.cancel_dump_traceback_later()
        layers.run.close()
        del layers
        release()
    dist.barrier()
    dist.destroy_process_group()


def _spec(model: str, num_layers: int | None) -> ModelSpec:
    known = {"tiny": TINY, "llama-3.1-70b": LLAMA_70B}
    spec = known[model] if model in known else read_model_spec(CONFIGS / f"{model}.json")
    # The embedding and the output layer are built, but never run.
    return dataclasses.replace(spec, num_layers=num_layers or LAYERS[model], vocab_size=128)


def _write(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    for row in rows:
        over, mib = row["step_ms"] / row["frozen_ms"], row["lora_bytes_per_layer"] / 2**20
        print(
            f"{row['model']} TP{row['world']} {row['adapters']} x {row['rank']}: {row['strategy']} "
            f"{row['step_ms']:.2f} ms, {over:.3f} of frozen, {row['lora_collectives_per_layer']} "
            f"collectives and {mib:.2f} MiB a layer",
            flush=True,
        )
    if path is not None:
        append_rows(path, rows)


def _case(text: str) -> Case:
    adapters, rank = text.split("x")
    return Case(int(adapters), int(rank))


def _arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=["llama-3.1-8b"])
    cases = [_case(text) for text in ("8x16", "8x64", "4x128", "16x128")]
    parser.add_argument("--cases", nargs="+", type=_case, default=cases, help="ADAPTERSxRANK")
    names = [strategy.name for strategy in STRATEGIES]
    parser.add_argument("--strategies", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the micro-batch")
    parser.add_argument("--layers", type=int, help="decoder layers; by default 8 or 4")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="against fp32, before timing")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--budget-s", type=float, default=480, help="start no case beyond it")
    patience = "end with every thread's stack if a check or a case takes longer"
    parser.add_argument("--patience-s", type=float, default=300, help=patience)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
