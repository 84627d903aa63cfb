"""Times whole training steps of eight jobs against the same steps without any adapter.

    python -m scripts.bench.step --modes floor together --layers 4
    python -m scripts.bench.step --precisions bf16 fp8 --modes together hf_peft hf_compile \\
        hf_liger --mixes "512 a step" "1024 a step" "2048 a step" "4096 a step" "8192 a step"

Mixes: `batch 1-8` and `batch 1-4` have sequences of real lengths and rounds of one micro-batch;
`full micro-batch` fills one micro-batch exactly; in `512 a step` all steps have so many tokens, in
sequences of at most `--longest`.

Modes: `gemms` is the products of forward and input gradients alone, `floor` all that the frozen
backbone does for them; `adapters` runs the same micro-batches with all jobs' branches and factor
gradients; `together` is whole rounds, packing and optimizer steps included; `sequential` trains the
jobs one after another. `hf_peft` is one job of rank 16 on all linears by transformers and PEFT
(bf16, sdpa, fused AdamW), with factors in bf16 and, as PEFT does by default, in fp32; `hf_compile`
is compiled by torch, `hf_liger` has Liger's kernels.

With `--precisions` a base of each is on the GPU, and their rounds and floors take turns, block by
block; rows have other columns then, and PEFT's fastest alone stands beside. Weights and tokens are
random. `mfu` counts the GEMMs of forward and input gradients for real tokens, over the rate of an
8192-cubed bf16 GEMM of the same run. Columns that a mode does not have are empty.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import Timing, is_main, release, say, wait_for_device
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from scripts.bench.step.jobs import (
    EQUAL_STEPS,
    FULL,
    LONGEST,
    MIXES,
    Mix,
    equal_steps,
    full_micro_batch,
    make_mixes,
    mean_length,
    step_shape,
)
from scripts.bench.step.peft import Stack, build_peft, run_peft
from scripts.bench.step.project import (
    Effort,
    Mode,
    Precision,
    Project,
    Side,
    measure_in_turns,
    run_sequential,
    run_together,
)
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.profiling.synthetic_run import SyntheticRun

TOGETHER: tuple[Mode, ...] = ("gemms", "floor", "adapters", "together")
MODES = (*TOGETHER, "sequential", "hf_peft")
STACKS: tuple[Stack, ...] = ("hf_peft", "hf_compile", "hf_liger")
"""Single jobs of others; Liger's last, since its kernels stay."""
PEFT_SHAPES = ((8, 1024), (1, 512))


class Bench:
    """Measures mode by mode; rows go to the CSV as they come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        spec = read_model_spec(args.model)
        self.spec = spec if args.layers is None else replace(spec, num_layers=args.layers)
        self.layout = ParallelLayout(tp_size=args.tp, sequence_parallel=args.sequence_parallel)
        self.peak_flops = gemm_flops_per_s()

    def run(self) -> None:
        """Runs all modes asked for; each leaves the GPU's memory empty behind it."""
        if self.args.precisions:
            self._run_precisions()
            return
        if set(self.args.modes) - {"hf_peft"}:
            self._run_project()
            release()
        if "hf_peft" in self.args.modes:
            for fp32_factors in (False, True):
                for jobs, timing in self._time_peft(PEFT_SHAPES, fp32_factors=fp32_factors):
                    self._add("hf_peft", jobs, timing, 1.0)
                release()

    def _run_precisions(self) -> None:
        """Takes turns between bases; of PEFT what was fastest: the largest batch, bf16 factors."""
        args = self.args
        self._measure_sides()
        release()
        steps = [EQUAL_STEPS[name] for name in args.mixes if name in EQUAL_STEPS]
        shapes = [step_shape(tokens) for tokens in steps] or PEFT_SHAPES[:1]
        for stack in STACKS:
            if stack in args.modes:
                for jobs, timing in self._time_peft(shapes, fp32_factors=False, stack=stack):
                    self._add_side(stack, "bf16", jobs, timing)
                release()

    def _measure_sides(self) -> None:
        args = self.args
        sizes = {"recompute": args.recompute, "tokens": args.tokens}
        sides = [Side(name, self.spec, self.layout, **sizes) for name in args.precisions]
        for mix in self._mixes():
            measure_in_turns(
                sides, mix, warmup=args.warmup, rounds=max(1, args.rounds // args.turns),
                turns=args.turns, adapters="adapters" in args.modes,
            )  # fmt: skip
            for side in sides:
                floor_s = side.timing("floor").step_s
                for mode in TOGETHER[1:]:
                    if mode in args.modes:
                        jobs, timing = f"{len(mix.specs)} ({mix.name})", side.timing(mode)
                        self._add_side(mode, side.precision, jobs, timing, floor_s)
            for side in sides if args.kernels else ():
                side.look("together", mix.name, args.kernels)
                side.look("floor", mix.name, args.kernels)
        for side in sides:
            side.end()

    def _run_project(self) -> None:
        args = self.args
        run = SyntheticRun(self.spec, self.layout, dtype=torch.bfloat16, recompute=args.recompute)
        project = Project(run=run, micro_batch_tokens=args.tokens)
        effort = Effort(args.warmup, args.rounds, args.steps, args.kernels)
        for mix in self._mixes():
            jobs = f"{len(mix.specs)} ({mix.name})"
            if set(args.modes) & set(TOGETHER):
                timings = run_together(project, mix, effort)
                for mode in TOGETHER:
                    if mode in args.modes:
                        ratio = timings[mode].step_s / timings["floor"].step_s
                        self._add(mode, jobs, timings[mode], mix.target_share, ratio)
                over = timings["together"].step_s / timings["gemms"].step_s
                say(f"{jobs}: together takes {over:.3f} of the GEMMs alone")
            if "sequential" in args.modes:
                timing = run_sequential(project, mix, effort)
                self._add("sequential", jobs, timing, mix.target_share)
        project.detach()

    def _mixes(self) -> list[Mix]:
        args, vocab_size = self.args, self.spec.vocab_size
        mixes = make_mixes(
            args.lengths, vocab_size=vocab_size, target_share=args.target_share,
            dropout=args.dropout, longest=min(LONGEST, args.tokens),
        )  # fmt: skip
        mixes.append(full_micro_batch(args.tokens, vocab_size=vocab_size, dropout=args.dropout))
        for name in EQUAL_STEPS:
            sizes = {"vocab_size": vocab_size, "dropout": args.dropout, "longest": args.longest}
            mixes.append(equal_steps(name, **sizes))
        chosen = [mix for mix in mixes if mix.name in args.mixes]
        for mix in chosen:
            say(f"{mix.name}: sequences of {mean_length(mix):.0f} tokens in the mean")
        return chosen

    def _time_peft(
        self, shapes: Sequence[tuple[int, int]], *, fp32_factors: bool, stack: Stack = "hf_peft"
    ) -> Iterator[tuple[str, Timing]]:
        """Yields the jobs' name and the timing of each shape that fits."""
        args = self.args
        if stack == "hf_liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()  # in this process for good
        changes = {} if args.layers is None else {"num_hidden_layers": args.layers}
        lora = {"target_modules": "all-linear", "lora_dropout": args.dropout}
        model = build_peft(args.model, changes, fp32_factors=fp32_factors, **lora)
        if stack == "hf_compile":
            model = torch.compile(model, dynamic=False)
        detail = ", fp32 factors" if fp32_factors else ""
        for batch, length in shapes:
            length = min(length, args.tokens)
            while True:
                repeats = max(args.rounds, 3 * args.rounds // batch)
                timing = run_peft(model, batch, length, self.spec.vocab_size, repeats)
                if timing is not None or batch == 1:
                    break
                print(f"{stack} {batch} x {length}: out of memory")
                batch //= 2
            if timing is not None:
                yield f"1 ({batch} x {length}{detail})", timing

    def _add(
        self, mode: str, jobs: str, timing: Timing, target_share: float, ratio: float | None = None
    ) -> None:
        args = self.args
        rate = useful_flops(self.spec, timing.tokens, target_share) / timing.seconds / args.tp
        percentiles: dict[str, float | str] = {"p20_ms": "", "p50_ms": "", "p80_ms": ""}
        if timing.step_times_s:
            found = {name: timing.percentile_s(int(name[1:3])) for name in percentiles}
            percentiles = {name: round(seconds * 1e3, 2) for name, seconds in found.items()}
        row = {
            "gpu": gpu_name(),
            "versions": versions("megatron-core", "peft" if mode == "hf_peft" else "flash-attn-4"),
            "commit": args.commit, "model": args.model.stem, "tp": args.tp,
            "sequence_parallel": args.sequence_parallel, "recompute": args.recompute,
            "dropout": args.dropout, "jobs": jobs, "mode": mode,
            "step_ms": round(timing.step_s * 1e3, 2), **percentiles,
            "tokens": round(timing.tokens / timing.steps),
            "tokens_per_s": round(timing.tokens / timing.seconds, 1),
            "ratio_to_floor": "" if ratio is None else round(ratio, 3),
            "peak_bytes": timing.peak_bytes, "mfu": round(rate / self.peak_flops, 4),
            "tflops_per_gpu": round(rate / 1e12, 1),
        }  # fmt: skip
        self._write(row, f"mfu {row['mfu']:.3f}", ratio)

    def _add_side(
        self, mode: str, precision: Precision, jobs: str, timing: Timing, floor_s: float = 0.0
    ) -> None:
        gpu, layout = gpu_name(), self.layout
        if layout.tp_size > 1:
            shared = " SP" if layout.sequence_parallel else ""
            gpu = f"{layout.tp_size} x {gpu}, TP{layout.tp_size}{shared}"
        row = {
            "gpu": gpu, "commit": self.args.commit, "model": self.args.model.stem, "jobs": jobs,
            "mode": mode, "precision": precision, "step_ms": round(timing.step_s * 1e3, 2),
            "floor_ms": round(floor_s * 1e3, 2) if floor_s else "",
            "tokens": round(timing.tokens / timing.steps),
            "tokens_per_s": round(timing.tokens / timing.seconds, 1),
            "peak_bytes": timing.peak_bytes,
        }  # fmt: skip
        self._write(row, precision, timing.step_s / floor_s if floor_s else None)

    def _write(self, row: dict[str, Any], what: str, over_floor: float | None) -> None:
        over = "" if over_floor is None else f"  {over_floor:.3f} of the floor"
        say(
            f"{row['mode']:10} {row['jobs']:22} step {row['step_ms']:8.1f} ms  {row['tokens']:6} "
            f"tokens  {row['tokens_per_s']:9.0f} tokens/s  peak {row['peak_bytes'] / 2**30:6.1f} "
            f"GiB  {what}{over}"
        )
        if self.args.csv and is_main():
            append_rows(self.args.csv, [row])


def useful_flops(spec: ModelSpec, tokens: int, target_share: float) -> float:
    """GEMM operations of forward and input gradients; logits of rows with a target only."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    layer = hidden * (2 * spec.q_size + 2 * spec.kv_size) + 3 * hidden * ffn
    return 4.0 * tokens * (spec.num_layers * layer + target_share * hidden * spec.vocab_size)


def gemm_flops_per_s(size: int = 8192, repeats: int = 30) -> float:
    """Rate of a large bf16 GEMM; of a small one where there is no GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = size if device == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    wait_for_device()
    begin = time.perf_counter()
    for _ in range(repeats):
        a @ b
    wait_for_device()
    return 2.0 * size**3 * repeats / (time.perf_counter() - begin)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; prints rows and appends them to a file."""
    args = arguments(argv)
    bench = Bench(args)
    say(f"{gpu_name()}, torch {torch.__version__}, GEMM {bench.peak_flops / 1e12:.0f} TFLOP/s")
    bench.run()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses and completes the command line; ends with a usage error where it cannot be run."""
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, default=Path("configs/models/llama-3.1-8b.json"))
    add("--layers", type=int, help="fewer layers than the model has, to try out")
    add(
        "--modes",
        nargs="+",
        choices=(*MODES, *STACKS[1:]),
        help="all; floor, adapters, together under TP",
    )
    add("--precisions", nargs="+", choices=get_args(Precision), help="bases that take turns")
    add("--turns", type=int, default=2, help="how often each precision has its turn")
    add("--mixes", nargs="+", default=list(MIXES), choices=(*MIXES, FULL, *EQUAL_STEPS))
    add("--tp", type=int, default=1, help="tensor-parallel size: the number of processes")
    add("--sequence-parallel", action="store_true")
    add("--recompute", default="none", choices=["none", "selective", "full"])
    add("--tokens", type=int, default=8192, help="rows of a micro-batch")
    add("--longest", type=int, default=1024, help="of a sequence in mixes of equal steps")
    add("--lengths", type=Path, help="CSV of real lengths; default: drawn from its quantiles")
    add("--target-share", type=float, default=1.0, help="of each sequence's tokens, batch mixes")
    add("--dropout", type=float, default=0.0)
    add("--warmup", type=int, default=3)
    add("--rounds", type=int, default=12, help="timed, of all jobs together and of the floor")
    add("--steps", type=int, default=3, help="timed, of each job alone")
    add("--kernels", type=Path, help="write the kernels of a round of each mode to this file")
    args = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.tp != world:
        parser.error(f"--tp must be the number of processes ({world}), got {args.tp}")
    if args.modes is None:
        modes = ("floor", "together", "hf_peft") if args.precisions else MODES
        args.modes = [mode for mode in modes if args.tp == 1 or mode in TOGETHER]
    alone = {"sequential", "gemms"} & set(args.modes)
    if args.precisions and ("together" not in args.modes or alone):
        parser.error("--modes must name together, not sequential or gemms, with --precisions")
    if args.tp > 1 and set(STACKS) & set(args.modes):
        parser.error("--modes must not name other stacks with --tp above 1")
    if set(STACKS[1:]) & set(args.modes) and not args.precisions:
        parser.error("--modes must name hf_compile and hf_liger with --precisions alone")
    return args


if __name__ == "__main__":
    sys.exit(main())
