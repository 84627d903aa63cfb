#!/usr/bin/env python3
"""Adapters around Transformer Engine's linears beside Megatron's own: gradients and loss curves.

    python scripts/bench/te_adapters.py check
    python scripts/bench/te_adapters.py train --csv te.csv --png te.png
    torchrun --nproc-per-node 2 scripts/bench/te_adapters.py check
    python scripts/bench/te_adapters.py plot --csv te.csv --png te.png

Under torchrun all processes are one tensor-parallel group with sequence parallelism. Modes:
`local`, `local-black-box` (Megatron's linears, adapters around them), `te`, `te-fused-rope`,
`te-fp8` (current scaling), `te-fp8-delayed`. A mode that fails is reported, the others go on, and
the exit status is 1.

`check` compares every factor's gradient with an fp32 model of the local spec. bf16 modes must be as
good as `local`, up to `BF16_FACTOR`; FP8 modes within `FP8_FACTOR` a factor and `FP8_WHOLE` an
adapter: FP8 has 3 bits of mantissa forward and 2 backward, and a linear rounds three operands.
`train` trains each mode from the same start; curves must stay together within `--tolerance`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from te_curves import plot, write
from te_models import LORAS, MODES, Subject, build, install_adapters, small_spec
from te_steps import make_batch, run, take_gradients
from torch import Tensor

from tlora_megatron.config.job import OptimizerSpec
from tlora_megatron.integrations.megatron.engine import current_groups
from tlora_megatron.integrations.megatron.model import initialize_parallel
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.optimizer import StepRequest, step_adapters

BF16_FACTOR = 1.5
"""Times the error of `local`."""
BF16_FLOOR = 0.03
FP8_FACTOR = 0.5
FP8_WHOLE = 0.2
REPEATS = 3
"""Passes over the same batches: FP8 scales settle, and weights are taken from the cache."""

Errors = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    if options.command == "plot":
        plot(options.csv, options.png)
        return 0
    groups = start()
    gpu = torch.cuda.get_device_name() if groups.device.type == "cuda" else "CPU"
    say(groups, f"{gpu}, torch {torch.__version__}, TP {groups.layout.tp_size}")
    try:
        return (check if options.command == "check" else train)(options, groups)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    defaults = {
        "check": "local local-black-box te te-fused-rope te-fp8 te-fp8-delayed",
        "train": "local te-fused-rope te-fp8",
    }
    for name, modes in defaults.items():
        command = commands.add_parser(name)
        command.add_argument("--modes", nargs="+", choices=list(MODES), default=modes.split())
        command.add_argument("--layers", type=int, default=2)
        command.add_argument("--hidden", type=int, default=1024)
        command.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
        command.add_argument("--micro-batches", type=int, default=2)
    training = commands.choices["train"]
    training.add_argument("--steps", type=int, default=50)
    training.add_argument("--lr", type=float, default=2e-3)
    training.add_argument("--tolerance", type=float, default=0.05, help="mean relative difference")
    training.add_argument("--csv", type=Path, default=Path("transformer_engine.csv"))
    training.add_argument("--png", type=Path, default=Path("transformer_engine.png"))
    drawing = commands.add_parser("plot")
    drawing.add_argument("--csv", type=Path, required=True)
    drawing.add_argument("--png", type=Path, required=True)
    return parser.parse_args(arguments)


def start() -> ParallelGroups:
    """Joins the world, all of it tensor-parallel."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelLayout(tp_size=world, sequence_parallel=world > 1)
    initialize_parallel(layout)
    return current_groups(layout)


def say(groups: ParallelGroups, text: str) -> None:
    """Prints on one process, at once."""
    if groups.tp_rank == 0:
        print(text, flush=True)


def check(options: argparse.Namespace, groups: ParallelGroups) -> int:
    """Compares gradients, a mode after the other."""
    spec = small_spec(options.layers, options.hidden)
    batches = [
        make_batch(i, options.tokens, spec, groups.device) for i in range(options.micro_batches)
    ]

    def gradients_of(mode: str, source: Any = None) -> tuple[Subject, list[Tensor], list[Any]]:
        subject = build(MODES[mode], spec, groups, source)
        install_adapters(subject, b_std=0.02)
        losses, gradients = [], []
        for _ in range(REPEATS):
            losses = run(subject, batches)
            gradients = take_gradients(subject)
        return subject, losses, gradients

    truth, true_losses, expected = gradients_of("fp32")
    found: dict[str, Errors] = {}

    def one(mode: str) -> None:
        _, losses, gradients = gradients_of(mode, truth.model)
        found[mode] = errors = compare(losses, true_losses, gradients, expected)
        name = max((n for n in errors if n.startswith("factor")), key=errors.__getitem__)
        wholes = " ".join(f"{errors[f'whole {slot}']:.4f}" for slot in range(len(LORAS)))
        worst = f"{name} {errors[name]:.4f}"
        say(groups, f"{mode}: loss {errors['loss']:.1e}, adapters {wholes}, worst {worst}")
        reason = verdict(mode, errors, found.get("local"))
        if reason:
            raise AssertionError(reason)

    return each(groups, options.modes, one)


def compare(
    losses: Sequence[Tensor],
    true_losses: Sequence[Tensor],
    gradients: Sequence[dict[str, Tensor]],
    expected: Sequence[dict[str, Tensor]],
) -> Errors:
    """Relative errors in the Frobenius norm: `loss`, `whole SLOT`, `factor SLOT NAME`."""
    pairs = zip(losses, true_losses, strict=True)
    errors = {"loss": max(float((got - true).abs() / true.abs()) for got, true in pairs)}
    for slot, (got, want) in enumerate(zip(gradients, expected, strict=True)):
        assert got.keys() == want.keys(), f"factors of job {slot} differ"
        wrong = square = 0.0
        for name, tensor in want.items():
            difference = float((got[name] - tensor).norm())
            errors[f"factor {slot} {name}"] = difference / max(float(tensor.norm()), 1e-30)
            wrong, square = wrong + difference**2, square + float(tensor.norm()) ** 2
        errors[f"whole {slot}"] = (wrong / square) ** 0.5
    return errors


def verdict(mode: str, errors: Errors, local: Errors | None) -> str:
    """What is wrong with a mode's errors; empty if nothing is. A NaN is."""
    for name, error in errors.items():
        if MODES[mode].fp8_recipe is not None:
            limit = FP8_FACTOR if name.startswith("factor") else FP8_WHOLE
        else:
            limit = BF16_FLOOR if local is None else max(BF16_FLOOR, BF16_FACTOR * local[name])
            limit *= 2 if name.startswith("factor") else 1
        if not error <= limit:
            return f"{name} must be off by at most {limit:.4f}, got {error:.4f}"
    return ""


def train(options: argparse.Namespace, groups: ParallelGroups) -> int:
    """Trains every mode from the same start, then writes and draws the curves."""
    spec = small_spec(options.layers, options.hidden)
    source = build(MODES["fp32"], spec, groups).model
    curves: dict[str, list[list[float]]] = {}

    def one(mode: str) -> None:
        subject = build(MODES[mode], spec, groups, source)
        install_adapters(subject, b_std=0.0)
        begin = time.perf_counter()
        curves[mode] = train_mode(subject, options)
        seconds = time.perf_counter() - begin
        first, last = curves[mode][0], curves[mode][-1]
        ends = ", ".join(f"{a:.3f} to {b:.3f}" for a, b in zip(first, last, strict=True))
        say(groups, f"{mode}: losses {ends} in {seconds:.1f} s")
        if "local" in curves and mode != "local":
            apart = difference(curves["local"], curves[mode])
            say(groups, f"{mode}: {apart:.4f} from local on average")
            if not apart <= options.tolerance:
                raise AssertionError(f"curves must be within {options.tolerance}, got {apart:.4f}")

    status = each(groups, options.modes, one)
    if groups.tp_rank == 0:
        write(options.csv, curves, groups.layout.tp_size)
        plot(options.csv, options.png)
    return status


def train_mode(subject: Subject, options: argparse.Namespace) -> list[list[float]]:
    """Losses by step and job."""
    optimizer = OptimizerSpec(lr=options.lr)
    counts = subject.groups.counts_losses
    curve = []
    for step in range(options.steps):
        first = step * options.micro_batches
        numbers = range(first, first + options.micro_batches)
        device = subject.groups.device
        batches = [make_batch(i, options.tokens, subject.spec, device) for i in numbers]
        losses = run(subject, batches)
        requests = [
            StepRequest(
                slot=slot,
                spec=optimizer,
                lr=options.lr,
                updates=step,
                loss=loss if counts else torch.zeros_like(loss),
            )
            for slot, loss in enumerate(losses)
        ]
        outcomes = step_adapters(subject.bank, subject.groups, requests)
        assert all(outcome.applied for outcome in outcomes), f"step {step} is not finite"
        curve.append([outcome.loss / options.micro_batches for outcome in outcomes])
    return curve


def difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Mean relative difference over steps and jobs."""
    pairs = [pair for x, y in zip(one, other, strict=True) for pair in zip(x, y, strict=True)]
    return sum(abs(a - b) / abs(a) for a, b in pairs) / len(pairs)


def each(groups: ParallelGroups, modes: Sequence[str], one: Callable[[str], None]) -> int:
    """Runs a mode after the other; 1 if any failed. A failure on one rank alone ends the run."""
    failed = []
    for mode in modes:
        try:
            one(mode)
        except Exception:
            failed.append(mode)
            say(groups, f"{mode}: FAILED\n{traceback.format_exc()}")
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    say(groups, f"failed: {' '.join(failed)}" if failed else "all modes passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
