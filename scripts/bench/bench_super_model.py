"""Times the super-model's step against the same step with no adapters at all.

    torchrun --standalone --nproc-per-node 1 scripts/bench/bench_super_model.py \
        --model configs/models/llama-3.1-8b.json --tokens 8192 --recompute selective

Rows: `floor` is forward and input gradients of the frozen backbone; `adapters` adds all jobs'
branches and factor gradients; `round` is a whole training round with packing and the per-job
optimizer steps. Random weights and tokens; the arithmetic is that of training.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from result_rows import append_rows, checkout_commit

from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.integrations.megatron import model as backbone
from tlora_megatron.integrations.megatron import recompute
from tlora_megatron.integrations.megatron.engine import MegatronEngine, current_groups, pair_linears
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.attach import attach
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec, read_model_spec
from tlora_megatron.training.data.job_data import BatchPlan, JobData, TokenSequence
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.packing import Placed, batch_items, pack
from tlora_megatron.training.super_model import SuperModel

RANKS = (4, 8, 16, 16, 24, 32, 64, 64)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def job_specs(count: int, dropout: float) -> list[JobSpec]:
    """Heterogeneous jobs: every third adapts attention only, ranks 4 to 64."""
    specs = []
    for index in range(count):
        targets = {"target_modules": ATTENTION} if index % 3 == 2 else {}
        lora = LoraSpec(rank=RANKS[index % len(RANKS)], dropout=dropout, **targets)
        data = DataSpec(train="synthetic")
        specs.append(JobSpec(name=f"job{index}", data=data, lora=lora, max_steps=10**6))
    return specs


def synthetic_data(
    specs: Sequence[JobSpec], spec: ModelSpec, tokens: int
) -> list[list[TokenSequence]]:
    """One global batch a job, ragged lengths, together exactly `tokens` rows."""
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.full(len(specs), 4.0))
    rows = np.maximum((shares * tokens).astype(int), 16)
    rows[-1] += tokens - rows.sum()
    batches = []
    for total in rows:
        count = max(1, int(total) // 512)
        inner = draw.choice(np.arange(8, total - 8), count - 1, replace=False) if count > 1 else []
        lengths = np.diff([0, *np.sort(inner), total])
        batches.append([_sequence(draw, int(n) + 1, spec.vocab_size) for n in lengths])
    return batches


def _sequence(draw: np.random.Generator, length: int, vocab_size: int) -> TokenSequence:
    is_target = np.arange(length) >= length // 2
    return TokenSequence(draw.integers(0, vocab_size, length, dtype=np.int32), is_target)


def timed(run: Callable[[], Any], warmup: int, repeats: int) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile in seconds, waiting for the device around each run."""
    seconds = []
    for index in range(warmup + repeats):
        _synchronize()
        begin = time.perf_counter()
        run()
        _synchronize()
        if index >= warmup:
            seconds.append(time.perf_counter() - begin)
    deciles = statistics.quantiles(seconds, n=10)
    return statistics.median(seconds), deciles[1], deciles[7]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def profile(run: Callable[[], Any]) -> None:
    """Prints where the device's time goes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        _synchronize()
    print(
        trace.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=90
        )
    )


def step_flops(spec: ModelSpec, tokens: int) -> float:
    """GEMM operations of forward and input gradients, attention and recompute left out."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    layer = hidden * (2 * spec.q_size + 2 * spec.kv_size) + 3 * hidden * ffn
    return 4.0 * tokens * (spec.num_layers * layer + hidden * spec.vocab_size)


def main() -> None:
    """Builds once, times every variant, prints a table and appends CSV rows."""
    args = _arguments()
    spec = read_model_spec(Path(args.model))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelLayout.for_world(
        world, tp_size=args.tp, pp_size=1, cp_size=1, sequence_parallel=args.sequence_parallel
    )
    backbone.initialize_parallel(layout)
    groups = current_groups(layout)
    dtype = torch.bfloat16
    model = backbone.build_backbone(spec, layout, dtype=dtype, recompute=args.recompute)
    backbone.load_backbone(model, spec, None, layout)
    recompute.install()
    engine = MegatronEngine(model, groups, spec.vocab_size)
    sites = stage_sites(spec, layout, tp_rank=groups.tp_rank, pp_rank=0)
    linears = pair_linears(model, sites)
    rows = []

    specs = job_specs(args.jobs, args.dropout)
    batches = synthetic_data(specs, spec, args.tokens)
    items = [batch_items(batch) for batch in batches]

    def packed(slot_of: Callable[[int], int], num_slots: int) -> Any:
        placed = [Placed(slot_of(s), item) for s, batch in enumerate(items) for item in batch]
        keys = range(1, num_slots + 1) if args.dropout else []
        return pack(
            placed,
            num_tokens=args.tokens,
            num_slots=num_slots,
            dropout_keys=list(keys),
            cp_rank=0,
            cp_size=1,
            device=groups.device,
        )

    def measure(name: str, run: Callable[[], Any]) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        median, p20, p80 = timed(run, args.warmup, args.repeats)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        rows.append(_row(args, spec, layout, name, (median, p20, p80), peak))
        if args.profile:
            profile(run)

    attach(linears, AdapterBank(sites, [], dtype=dtype, device=groups.device))
    frozen = packed(lambda slot: 0, 0)
    measure("floor", lambda: engine.forward_backward([frozen]))

    loras = [s.lora for s in specs]
    bank = AdapterBank(sites, loras, dtype=dtype, device=groups.device)
    attach(linears, bank)
    jobs = []
    for job, batch in zip(specs, batches, strict=True):
        slab = bank.new_slab(job.lora)
        slab.load(lambda name, job=job: initial_factor(spec, name, job.lora, job.seed))
        data = JobData(train=tuple(batch), eval=(), num_truncated=0, num_dropped=0)
        plan = BatchPlan.for_job(dataclasses.replace(job, batch_size=len(batch)), len(batch))
        jobs.append(
            JobState(
                spec=job,
                data=data,
                plan=plan,
                adapter=Adapter(name=job.name, lora=job.lora, slab=slab),
            )
        )
    super_model = SuperModel(engine, bank, groups, jobs, micro_batch_tokens=args.tokens)
    together = packed(lambda slot: slot, len(specs))
    measure("adapters", lambda: engine.forward_backward([together]))
    measure("round", super_model.train_round)
    if dist.get_rank() == 0:
        _report(rows, Path(args.csv) if args.csv else None)
    dist.destroy_process_group()


def _row(
    args: argparse.Namespace,
    spec: ModelSpec,
    layout: ParallelLayout,
    name: str,
    times: tuple[float, float, float],
    peak: int,
) -> dict[str, Any]:
    median, p20, p80 = times
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "variant": name,
        "model": Path(args.model).stem,
        "tp": layout.tp_size,
        "sp": layout.sequence_parallel,
        "tokens": args.tokens,
        "jobs": args.jobs,
        "dropout": args.dropout,
        "recompute": args.recompute,
        "p50_s": round(median, 5),
        "p20_s": round(p20, 5),
        "p80_s": round(p80, 5),
        "tokens_per_s": round(args.tokens * layout.dp_size / median, 1),
        "tflops_per_gpu": round(step_flops(spec, args.tokens) / layout.tp_size / median / 1e12, 1),
        "peak_gib": round(peak / 2**30, 2),
        "gpu": gpu,
        "torch": torch.__version__,
        "commit": args.commit or checkout_commit(),
    }


def _report(rows: list[dict[str, Any]], path: Path | None) -> None:
    floor = rows[0]["p50_s"]
    for row in rows:
        row["ratio_to_floor"] = round(row["p50_s"] / floor, 3)
        shown = ("variant", "p50_s", "tokens_per_s", "peak_gib", "ratio_to_floor")
        print({key: row[key] for key in shown})
    if path is not None:
        append_rows(path, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="configs/models/llama-3.1-8b.json")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the micro-batch")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="print the kernels of every variant")
    parser.add_argument("--csv", help="append rows to this file")
    parser.add_argument("--commit", default="", help="where git is not at hand")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
