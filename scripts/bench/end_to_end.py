#!/usr/bin/env python3
"""Tokens per second of eight jobs: together, one after another, through HF PEFT; and the floor.

    python scripts/bench/end_to_end.py --csv scripts/bench/results/end_to_end.csv
    python scripts/bench/end_to_end.py --modes super_model frozen_floor --layers 4

Modes: `super_model` trains a mix of jobs in rounds of one micro-batch; `frozen_floor` runs forward
and input gradients of the same micro-batches without adapters; `sequential` trains the same jobs
one after another through this project; `hf_peft` is one job of rank 16 on all linears through HF
transformers and PEFT (bf16, sdpa, no recompute, fused AdamW) at 8 x 1024 and 1 x 512 tokens, with
factors in bf16 and, as PEFT does by default, in fp32. Random
weights and tokens; every token is a target unless `--target-share` says less. `mfu` counts GEMMs of
forward and input gradients for real tokens, adapters and attention left out, over the rate of an
8192-cubed bf16 GEMM of the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from end_to_end_jobs import LONGEST, Mix, make_mixes, mean_length
from end_to_end_peft import build_peft, run_peft
from end_to_end_project import (
    Effort,
    Project,
    Timing,
    read_spec,
    run_floor,
    run_sequential,
    run_super_model,
)
from result_rows import append_rows, checkout_commit

from tlora_megatron.model.spec import ModelSpec

MODES = ("super_model", "frozen_floor", "sequential", "hf_peft")
PEFT_RANK = 16
PEFT_SHAPES = ((8, 1024), (1, 512))
STEP_OVER_FLOOR, OVER_SEQUENTIAL, OVER_PEFT, OVER_PEFT_SMALL = 1.12, 1.5, 1.55, 4.0
TOKENS_PER_S = {"H200": 15_000}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement; the fields are the CSV's columns."""

    gpu: str
    commit: str
    model: str
    jobs: str
    """How many and which: `8 (batch 1-8)`, `1 (8 x 1024)`."""
    mode: str
    step_ms: float
    """Mean; of a round, or of a job's optimizer step."""
    tokens: int
    """A step, without padding; mean."""
    tokens_per_s: float
    peak_bytes: int
    mfu: float


class Bench:
    """Measures mode by mode; rows go to the CSV as they come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.spec = read_spec(Path(args.model), args.layers)
        self.gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.commit = args.commit or checkout_commit()
        self.peak_flops = gemm_flops_per_s()
        self.rows: list[Row] = []

    def run(self) -> None:
        """Runs all modes asked for; each leaves the GPU's memory empty behind it."""
        if set(self.args.modes) - {"hf_peft"}:
            self._run_project()
            _release()
        if "hf_peft" in self.args.modes:
            for fp32_factors in (False, True):
                self._run_peft(fp32_factors=fp32_factors)
                _release()

    def _run_project(self) -> None:
        args, modes = self.args, self.args.modes
        dtype = torch.bfloat16
        project = Project.build(self.spec, dtype, args.tokens)
        effort = Effort(args.warmup, args.rounds, args.steps, args.profile)
        for mix in self._mixes():
            jobs = f"{len(mix.specs)} ({mix.name})"
            if "super_model" in modes or "frozen_floor" in modes:
                timing, batches = run_super_model(project, mix, effort)
                if "super_model" in modes:
                    self._add("super_model", jobs, timing)
                if "frozen_floor" in modes:
                    self._add("frozen_floor", jobs, run_floor(project, batches, effort))
                del batches
            if "sequential" in modes:
                self._add("sequential", jobs, run_sequential(project, mix, effort))
        project.detach()

    def _mixes(self) -> list[Mix]:
        args = self.args
        mixes = make_mixes(
            Path(args.lengths) if args.lengths else None,
            vocab_size=self.spec.vocab_size,
            target_share=args.target_share,
            dropout=args.dropout,
            longest=min(LONGEST, args.tokens),
        )
        for mix in mixes:
            print(f"{mix.name}: sequences of {mean_length(mix):.0f} tokens in the mean")
        return mixes

    def _run_peft(self, *, fp32_factors: bool) -> None:
        args = self.args
        model = build_peft(
            Path(args.model), args.layers, PEFT_RANK, args.dropout, fp32_factors=fp32_factors
        )
        detail = ", fp32 factors" if fp32_factors else ""
        for batch, length in PEFT_SHAPES:
            length = min(length, args.tokens)
            while True:
                repeats = max(args.rounds, 3 * args.rounds // batch)
                timing = run_peft(model, batch, length, self.spec.vocab_size, repeats)
                if timing is not None or batch == 1:
                    break
                print(f"hf_peft {batch} x {length}: out of memory")
                batch //= 2
            if timing is not None:
                self._add("hf_peft", f"1 ({batch} x {length}{detail})", timing)

    def _add(self, mode: str, jobs: str, timing: Timing) -> None:
        share = 1.0 if mode == "hf_peft" else self.args.target_share
        flops = useful_flops(self.spec, timing.tokens, share)
        row = Row(
            gpu=self.gpu,
            commit=self.commit,
            model=Path(self.args.model).stem,
            jobs=jobs,
            mode=mode,
            step_ms=round(timing.seconds / timing.steps * 1e3, 2),
            tokens=round(timing.tokens / timing.steps),
            tokens_per_s=round(timing.tokens / timing.seconds, 1),
            peak_bytes=timing.peak_bytes,
            mfu=round(flops / timing.seconds / self.peak_flops, 4),
        )
        self.rows.append(row)
        print(show(row), flush=True)
        if self.args.csv:
            append_rows(Path(self.args.csv), [asdict(row)])


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
    begin = time.perf_counter()
    if device == "cuda":
        torch.cuda.synchronize()
        begin = time.perf_counter()
    for _ in range(repeats):
        a @ b
    if device == "cuda":
        torch.cuda.synchronize()
    return 2.0 * size**3 * repeats / (time.perf_counter() - begin)


def show(row: Row) -> str:
    """A row for reading."""
    return (
        f"{row.mode:13} {row.jobs:16} step {row.step_ms:8.1f} ms  {row.tokens:6} tokens  "
        f"{row.tokens_per_s:9.0f} tokens/s  peak {row.peak_bytes / 2**30:6.1f} GiB  "
        f"mfu {row.mfu:.3f}"
    )


def verdicts(rows: Sequence[Row]) -> list[tuple[str, float, bool]]:
    """What was measured against what it must reach: sentence, value, whether it does."""
    found = {(row.mode, row.jobs): row for row in rows}
    mixed, small = (
        {mode: row for (mode, jobs), row in found.items() if jobs.endswith(f"({name})")}
        for name in ("batch 1-8", "batch 1-4")
    )
    peft = [row for row in rows if row.mode == "hf_peft"]
    result: list[tuple[str, float, bool]] = []
    if "super_model" not in mixed:
        return result
    ours = mixed["super_model"]
    for name, mix in (("batch 1-8", mixed), ("batch 1-4", small)):
        if "super_model" in mix and "frozen_floor" in mix:
            value = mix["super_model"].step_ms / mix["frozen_floor"].step_ms
            result.append(
                (f"{name}: step over floor <= {STEP_OVER_FLOOR}", value, value <= STEP_OVER_FLOOR)
            )
    for gpu, least in TOKENS_PER_S.items():
        if gpu in ours.gpu:
            value = ours.tokens_per_s
            result.append((f"aggregate >= {least} tokens/s", value, value >= least))
    if "sequential" in small:
        value = small["super_model"].tokens_per_s / small["sequential"].tokens_per_s
        result.append(
            (f"batch 1-4: over sequential >= {OVER_SEQUENTIAL}", value, value >= OVER_SEQUENTIAL)
        )
    if "sequential" in mixed:
        value = ours.tokens_per_s / mixed["sequential"].tokens_per_s
        result.append(("batch 1-8: over sequential > 1", value, value > 1))
    for row in peft:
        small_batch = row.jobs.startswith(f"1 ({PEFT_SHAPES[-1][0]} x ")
        least = OVER_PEFT_SMALL if small_batch else OVER_PEFT
        value = ours.tokens_per_s / row.tokens_per_s
        result.append((f"over HF PEFT, {row.jobs}, >= {least}", value, value >= least))
    if peft and peft[0].peak_bytes:
        value = ours.peak_bytes / peft[0].peak_bytes * peft[0].tokens / ours.tokens
        result.append((f"peak bytes a token over HF PEFT's, {peft[0].jobs}, < 1", value, value < 1))
    return result


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        if held > 2**30:
            print(f"memory still held: {held / 2**30:.1f} GiB")


def main() -> int:
    """Measures, prints rows and verdicts; with `--check`, 1 if a verdict is missed."""
    args = _arguments()
    bench = Bench(args)
    print(f"{bench.gpu}, torch {torch.__version__}, GEMM {bench.peak_flops / 1e12:.0f} TFLOP/s")
    bench.run()
    results = verdicts(bench.rows)
    for sentence, value, reached in results:
        print(f"{'reached' if reached else 'MISSED':8} {sentence}: {value:.3f}")
    if args.json:
        Path(args.json).write_text(
            json.dumps({"rows": [asdict(r) for r in bench.rows], "verdicts": results}, indent=1)
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(args.check and not all(reached for *_, reached in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="configs/models/llama-3.1-8b.json")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try out")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--lengths", help="CSV of real lengths; default: drawn from its quantiles")
    parser.add_argument("--target-share", type=float, default=1.0, help="of each sequence's tokens")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12, help="timed, of the super-model")
    parser.add_argument("--steps", type=int, default=3, help="timed, of each job alone")
    parser.add_argument("--profile", action="store_true", help="print kernels of a round and floor")
    parser.add_argument("--csv", help="append rows to this file")
    parser.add_argument("--json", help="write rows and verdicts to this file")
    parser.add_argument("--commit", default="", help="where git is not at hand")
    parser.add_argument("--check", action="store_true", help="return 1 if a target is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
