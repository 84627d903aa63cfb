"""Tokens/s of eight jobs under DeepSpeed: together, one after another, and with stock PEFT.

    torchrun --standalone --nproc-per-node 2 scripts/bench/deepspeed_throughput.py \\
        --layout zero3 --providers together,alone,stock

`together` and `alone` are this project's jobs at once or each by itself; `stock` is each job by
itself under DeepSpeed and PEFT (AdamW, clip 1.0, its batch padded to its longest sequence), as
their documentation has it. PEFT takes no linear that AutoTP has cut, so `stock` is ZeRO-3 or data
parallel. Random weights; optimizer steps included; padding is not counted.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from end_to_end_jobs import Mix, make_mixes
from transformers import AutoConfig, AutoModelForCausalLM

from tlora_megatron.config import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig
from tlora_megatron.integrations.deepspeed.frozen_base import FrozenBase, build_base
from tlora_megatron.integrations.deepspeed.guard import check_deepspeed
from tlora_megatron.integrations.deepspeed.processes import join_processes
from tlora_megatron.job import HF_TARGETS, JobSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.attach import attach
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.training.data import BatchPlan, JobData, TokenSequence
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing import RoundShape
from tlora_megatron.training.super_model import SuperModel

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "llama-3.1-8b.json"
RESULTS = Path(__file__).parent / "results" / "deepspeed.csv"
_ZERO3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (3, _ZERO3),
    "dp": (1, {"stage": 0}),
    "autotp": (1, {"stage": 0}),
}
"""The ZeRO stage that places the adapters' state, and the engine's section."""


_COLUMNS = (
    "provider", "layout", "gpus", "mix", "layers", "dropout", "micro_batch_tokens",
    "portion_tokens", "tokens_per_s", "seconds", "tokens", "peak_gib", "gpu", "versions", "sha",
)  # fmt: skip


class Timing(NamedTuple):
    """What all steps of a provider took."""

    seconds: float
    tokens: int
    peak_bytes: int


def main() -> None:
    """Every process runs it; the first prints and appends rows to the CSV."""
    args = _arguments()
    check_deepspeed(args.world if args.layout == "autotp" else 1)
    join_processes()
    mix = _mix(args)
    model = _random_model(args.layers)
    providers = args.providers.split(",")
    if "stock" in providers:
        # First: the model is then as transformers made it.
        _report("stock", run_stock(model, mix, args), args)
        providers.remove("stock")
    if providers:
        base = build_base(_config(args), model)
        for provider in providers:
            run = {"together": run_together, "alone": run_alone}[provider]
            _report(provider, run(base, mix, args), args)
    dist.barrier()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=_LAYOUTS, default="zero3")
    parser.add_argument("--providers", default="together,alone,stock")
    parser.add_argument("--mix", default="batch 1-4", help="of end_to_end_jobs.MIXES")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--portion-tokens", type=int, default=2048, help="0 = fair packing")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="of each job alone, after two")
    parser.add_argument("--layers", type=int, help="fewer than the model's")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=_git_commit(), help="for the CSV")
    args = parser.parse_args()
    args.world = int(os.environ.get("WORLD_SIZE", "1"))
    return args


def _mix(args: argparse.Namespace) -> Mix:
    """The jobs, with batches that every data-parallel rank has a part in: stock needs that."""
    vocab = AutoConfig.for_model(**_model_values()).vocab_size
    longest = min(2048, args.micro_batch_tokens)
    mixes = make_mixes(
        None, vocab_size=vocab, target_share=0.5, dropout=args.dropout, longest=longest
    )
    mix = next(mix for mix in mixes if mix.name == args.mix)
    dp_size = 1 if args.layout == "autotp" else args.world
    specs = [replace(s, batch_size=-(-s.batch_size // dp_size) * dp_size) for s in mix.specs]
    return replace(mix, specs=tuple(specs))


def _model_values() -> dict[str, Any]:
    return json.loads(MODEL.read_text())


def _random_model(layers: int | None) -> Any:
    """The model's shapes in bf16 on this device, drawn where they lie."""
    values = _model_values() | ({} if layers is None else {"num_hidden_layers": layers})
    config = AutoConfig.for_model(**values)
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )


def _config(args: argparse.Namespace) -> DeepSpeedConfig:
    stage, zero = _LAYOUTS[args.layout]
    tp_size = args.world if args.layout == "autotp" else 1
    engine: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31,
        "zero_optimization": dict(zero),
    }
    if tp_size > 1:
        engine["tensor_parallel"] = {"autotp_size": tp_size}
    run = RunConfig(
        base_model=BaseModelSpec(config=str(MODEL), random_init=True),
        parallel=ParallelSpec(),
        run=RunSpec(output_dir="unused", micro_batch_tokens=args.micro_batch_tokens),
        jobs=(),
    )
    return DeepSpeedConfig(
        engine=engine, run=run, stage=stage, tp_size=tp_size, offload_optimizer=False, changes=()
    )


def run_together(base: FrozenBase, mix: Mix, args: argparse.Namespace) -> Timing:
    """All jobs at once."""
    super_model = _super_model(base, mix, range(len(mix.specs)), args)
    return _timed_rounds(super_model, warmup=3, rounds=args.rounds)


def run_alone(base: FrozenBase, mix: Mix, args: argparse.Namespace) -> Timing:
    """Each job by itself, as many steps each."""
    timings = []
    for index in range(len(mix.specs)):
        super_model = _super_model(base, mix, [index], args)
        timings.append(_timed_steps(super_model, warmup=2, steps=args.steps))
    return _sum(timings)


def _super_model(
    base: FrozenBase, mix: Mix, chosen: Sequence[int], args: argparse.Namespace
) -> SuperModel:
    specs = [mix.specs[index] for index in chosen]
    bank = AdapterBank(
        [site for site, _ in base.linears],
        [spec.lora for spec in specs],
        dtype=torch.bfloat16,
        device=base.groups.device,
        placement=base.placement,
    )
    attach(base.linears, bank)
    jobs = [_job(base, bank, spec, mix.data[i]) for i, spec in zip(chosen, specs, strict=True)]
    return SuperModel(
        base.engine,
        bank,
        base.groups,
        jobs,
        micro_batch_tokens=args.micro_batch_tokens,
        round_shape=RoundShape(portion_tokens=args.portion_tokens or None),
    )


def _job(
    base: FrozenBase, bank: AdapterBank, spec: JobSpec, train: tuple[TokenSequence, ...]
) -> JobState:
    slab = bank.new_slab(spec.lora)
    slab.load(lambda name: initial_factor(base.spec, name, spec.lora, spec.seed))
    return JobState(
        spec=spec,
        data=JobData(train=train, eval=(), num_truncated=0, num_dropped=0),
        plan=BatchPlan.for_job(spec, len(train)),
        adapter=Adapter(name=spec.name, lora=spec.lora, slab=slab),
    )


def _timed_rounds(super_model: SuperModel, *, warmup: int, rounds: int) -> Timing:
    for _ in range(warmup):
        super_model.train_round()
    begin = _start()
    tokens = _tokens_done(super_model)
    for _ in range(rounds):
        super_model.train_round()
    seconds = time.perf_counter() - _synchronized(begin)
    return Timing(seconds, _tokens_done(super_model) - tokens, _peak())


def _timed_steps(super_model: SuperModel, *, warmup: int, steps: int) -> Timing:
    def step() -> None:
        while not super_model.train_round():
            pass

    for _ in range(warmup):
        step()
    begin = _start()
    tokens = _tokens_done(super_model)
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - _synchronized(begin)
    return Timing(seconds, _tokens_done(super_model) - tokens, _peak())


def _tokens_done(super_model: SuperModel) -> int:
    """Rows run so far: whole batches, and what is done of those under way."""
    total = 0
    for job in super_model.jobs:
        total += job.tokens
        if job.loss is not None:
            left = sum(item.length + 1 for item in job.queue)
            total += sum(len(s.tokens) for s in job.batch()) - left
    return total


def run_stock(model: Any, mix: Mix, args: argparse.Namespace) -> Timing:
    """Each job by itself under DeepSpeed and PEFT."""
    return _sum(
        [
            _stock_job(model, spec, train, args)
            for spec, train in zip(mix.specs, mix.data, strict=True)
        ]
    )


def _stock_job(
    model: Any, spec: JobSpec, train: Sequence[TokenSequence], args: argparse.Namespace
) -> Timing:
    import deepspeed
    from peft import LoraConfig, get_peft_model

    model.train()
    model.config.use_cache = False
    peft = get_peft_model(
        model,
        LoraConfig(
            r=spec.lora.rank,
            lora_alpha=spec.lora.alpha,
            lora_dropout=spec.lora.dropout,
            target_modules=list(HF_TARGETS),
        ),
    )
    trainable = [p for p in peft.parameters() if p.requires_grad]
    _, zero = _LAYOUTS[args.layout]
    share = spec.batch_size // args.world
    config = {
        "train_micro_batch_size_per_gpu": share,
        "steps_per_print": 2**31,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": dict(zero) if zero["stage"] else {"stage": 1},
    }
    optimizer = torch.optim.AdamW(trainable, lr=2e-4, fused=torch.cuda.is_available())
    engine, *_ = deepspeed.initialize(
        model=peft, optimizer=optimizer, config=config, model_parameters=trainable
    )
    batches = _batches(train, spec.batch_size)
    for _ in range(2):
        _stock_step(engine, next(batches), share)
    begin = _start()
    tokens = 0
    for _ in range(args.steps):
        batch = next(batches)
        tokens += sum(len(s.tokens) for s in batch)
        _stock_step(engine, batch, share)
    seconds = time.perf_counter() - _synchronized(begin)
    timing = Timing(seconds, tokens, _peak())
    engine.destroy()
    peft.unload()
    del engine, peft, optimizer, trainable
    gc.collect()
    return timing


def _batches(train: Sequence[TokenSequence], size: int) -> Iterator[list[TokenSequence]]:
    endless = itertools.cycle(train)
    while True:
        yield list(itertools.islice(endless, size))


def _stock_step(engine: Any, batch: Sequence[TokenSequence], share: int) -> None:
    rank = dist.get_rank()
    mine = batch[rank * share : (rank + 1) * share]
    longest = max(len(s.tokens) for s in mine)
    ids = torch.zeros(share, longest, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sequence in enumerate(mine):
        tokens = torch.from_numpy(sequence.tokens).long()
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.where(torch.from_numpy(sequence.is_target), tokens, -100)
    device = engine.device
    out = engine(input_ids=ids.to(device), attention_mask=mask.to(device), labels=labels.to(device))
    engine.backward(out.loss)
    engine.step()


def _start() -> float:
    _synchronized(0.0)
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return time.perf_counter()


def _synchronized(begin: float) -> float:
    """The same number, once the device has done all."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return begin


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _sum(timings: Sequence[Timing]) -> Timing:
    seconds, tokens, peaks = zip(*timings, strict=True)
    return Timing(sum(seconds), sum(tokens), max(peaks))


def _report(provider: str, timing: Timing, args: argparse.Namespace) -> None:
    """Prints and appends a provider's row, on the first process, as soon as it is measured."""
    if dist.get_rank():
        return
    import deepspeed

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    speed, peak = timing.tokens / timing.seconds, timing.peak_bytes / 2**30
    new = not args.csv.exists()
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(_COLUMNS)
        writer.writerow(
            [provider, args.layout, args.world, args.mix, args.layers or "all", args.dropout,
             args.micro_batch_tokens, args.portion_tokens, f"{speed:.0f}",
             f"{timing.seconds:.2f}", timing.tokens, f"{peak:.1f}", gpu,
             f"torch {torch.__version__}, deepspeed {deepspeed.__version__}", args.commit]
        )  # fmt: skip
    print(
        f"{provider:9} {args.layout} x{args.world}  {speed:9,.0f} tokens/s  {peak:6.1f} GiB",
        flush=True,
    )


def _git_commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
