"""Worker: gradients of adapters around Transformer Engine's linears beside Megatron's own linears.

    python tests/helpers/te_gradients.py
    torchrun --nproc-per-node 2 tests/helpers/te_gradients.py

Under torchrun all processes are one tensor-parallel group with sequence parallelism. Every factor's
gradient is compared with an fp32 model of the local spec. bf16 modes must be as good as `local`, up
to `BF16_FACTOR`; FP8 modes within `FP8_FACTOR` a factor and `FP8_WHOLE` an adapter: FP8 has 3 bits
of mantissa forward and 2 backward, and a linear rounds three operands. A mode that fails is
reported, the others go on, and the exit status is 1. `--stand-in` takes `te_stand_in` in place of
Transformer Engine, and runs on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import te_models, te_stand_in
from tests.helpers.te_models import (
    LORAS,
    MODES,
    Subject,
    build,
    install_adapters,
    make_batch,
    run,
    small_spec,
    take_gradients,
)
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm
from tlora_megatron.integrations.megatron.process_groups import current_groups, initialize_parallel
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.parallel.groups import ParallelGroups

BF16_FACTOR = 1.5
"""Times the error of `local`."""
BF16_FLOOR = 0.03
FP8_FACTOR = 0.5
FP8_WHOLE = 0.2
REPEATS = 3
"""Passes over the same batches: FP8 scales settle, and weights are taken from the cache."""

Errors = dict[str, float]


def main() -> int:
    options = parse()
    if options.stand_in:
        use_stand_in()
    groups = start()
    gpu = torch.cuda.get_device_name() if groups.device.type == "cuda" else "CPU"
    say(groups, f"{gpu}, torch {torch.__version__}, TP {groups.layout.tp_size}")
    try:
        return check(options, groups)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    modes = [mode for mode in MODES if mode != "fp32"]
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=modes)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--qk-norm", action="store_true", help="queries and keys are normed")
    parser.add_argument("--stand-in", action="store_true", help="for Transformer Engine")
    return parser.parse_args()


def use_stand_in() -> None:
    """Replaces Transformer Engine's layer; its fused rotary embedding is a kernel of its own."""
    te_models.te_layer = stand_in_layer
    for name, mode in MODES.items():
        MODES[name] = mode._replace(fused_rope=False)


def stand_in_layer(qk_norm: bool) -> tuple[Any, Any]:
    """The stand-in's layer and final norm, as `te_models.te_layer` returns them."""
    layer = te_models.local_layer(qk_norm)
    te_stand_in.use_in(layer)
    return layer, RMSNorm


def start() -> ParallelGroups:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelLayout(tp_size=world, sequence_parallel=world > 1)
    initialize_parallel(layout)
    return current_groups(layout)


def say(groups: ParallelGroups, text: str) -> None:
    if groups.tp_rank == 0:
        print(text, flush=True)


def check(options: argparse.Namespace, groups: ParallelGroups) -> int:
    spec = replace(small_spec(options.layers, options.hidden), qk_norm=options.qk_norm)
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
    """The complaint about a mode's errors; empty if there is none. A NaN is one."""
    for name, error in errors.items():
        if MODES[mode].fp8_recipe is not None:
            limit = FP8_FACTOR if name.startswith("factor") else FP8_WHOLE
        else:
            limit = BF16_FLOOR if local is None else max(BF16_FLOOR, BF16_FACTOR * local[name])
            limit *= 2 if name.startswith("factor") else 1
        if not error <= limit:
            return f"{name} must be off by at most {limit:.4f}, got {error:.4f}"
    return ""


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
