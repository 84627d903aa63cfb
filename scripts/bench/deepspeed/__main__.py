"""Tokens/s of eight jobs under DeepSpeed: together, one after another, and with stock PEFT.

    torchrun --standalone --nproc-per-node 2 -m scripts.bench.deepspeed \\
        --layout zero3 --providers together,alone,stock

`together` and `alone` are this project's jobs at once or each by itself; `stock` is each job by
itself under DeepSpeed and PEFT (AdamW, clip 1.0, its batch padded to its longest sequence), as
their documentation has it. PEFT takes no linear that AutoTP has cut, so `stock` is ZeRO-3 or data
parallel. Random weights; optimizer steps included; padding is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench.deepspeed.stock import run_stock
from scripts.bench.harness.arguments import REPO, RESULTS, bench_parser
from scripts.bench.harness.clock import Timing, timed, total
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from scripts.bench.harness.training_jobs import fresh_job
from scripts.bench.harness.world import is_main
from scripts.bench.step.jobs import Mix, make_mixes
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig
from tlora_megatron.integrations.deepspeed.engine import FrozenBase, build_base, join_processes
from tlora_megatron.integrations.deepspeed.known_keys import check_deepspeed
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.training.super_model import SuperModel

MODEL = REPO / "configs" / "models" / "llama-3.1-8b.json"
_ZERO3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (3, _ZERO3),
    "dp": (1, {"stage": 0}),
    "autotp": (1, {"stage": 0}),
}
"""The ZeRO stage that places the adapters' state, and the engine's section."""


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
        _, zero = _LAYOUTS[args.layout]
        _report("stock", run_stock(model, mix, zero, args.steps), args)
        providers.remove("stock")
    if providers:
        base = build_base(_config(args), model)
        for provider in providers:
            run = {"together": run_together, "alone": run_alone}[provider]
            _report(provider, run(base, mix, args), args)
    dist.barrier()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__, csv=RESULTS / "deepspeed.csv")
    parser.add_argument("--layout", choices=_LAYOUTS, default="zero3")
    parser.add_argument("--providers", default="together,alone,stock")
    parser.add_argument("--mix", default="batch 1-4", help="of step.jobs.MIXES")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--portion-tokens", type=int, default=2048, help="0 = fair packing")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="of each job alone, after two")
    parser.add_argument("--layers", type=int, help="fewer than the model's")
    parser.add_argument("--dropout", type=float, default=0.0)
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
    return _timed(super_model, super_model.train_round, warmup=3, repeats=args.rounds)


def run_alone(base: FrozenBase, mix: Mix, args: argparse.Namespace) -> Timing:
    """Each job by itself, as many steps each."""
    timings = []
    for index in range(len(mix.specs)):
        super_model = _super_model(base, mix, [index], args)

        def step(super_model: SuperModel = super_model) -> None:
            while not super_model.train_round():
                pass

        timings.append(_timed(super_model, step, warmup=2, repeats=args.steps))
    return total(timings)


def _super_model(
    base: FrozenBase, mix: Mix, chosen: Sequence[int], args: argparse.Namespace
) -> SuperModel:
    portion = args.portion_tokens or None
    specs = [replace(mix.specs[index], portion_tokens=portion) for index in chosen]
    bank = AdapterBank(
        [site for site, _ in base.linears],
        [spec.lora for spec in specs],
        dtype=torch.bfloat16,
        device=base.groups.device,
        placement=base.placement,
    )
    attach(base.linears, bank)
    jobs = [
        fresh_job(spec, mix.data[i], bank, base.spec) for spec, i in zip(specs, chosen, strict=True)
    ]
    return SuperModel(
        base.engine,
        bank,
        base.groups,
        jobs,
        micro_batch_tokens=args.micro_batch_tokens,
    )


def _timed(
    super_model: SuperModel, step: Callable[[], object], *, warmup: int, repeats: int
) -> Timing:
    """Time of so many steps, and the tokens that they trained."""
    for _ in range(warmup):
        step()
    before = _tokens_done(super_model)
    timing = timed(step, 0, repeats)
    return timing._replace(tokens=_tokens_done(super_model) - before)


def _tokens_done(super_model: SuperModel) -> int:
    """Rows run so far: whole batches, and what is done of those under way."""
    total = 0
    for job in super_model.jobs:
        total += job.tokens
        if job.loss is not None:
            left = sum(item.length + 1 for item in job.queue)
            total += sum(len(s.tokens) for s in job.batch()) - left
    return total


def _report(provider: str, timing: Timing, args: argparse.Namespace) -> None:
    """Prints and appends a provider's row, on the first process, as soon as it is measured."""
    if not is_main():
        return
    speed, peak = timing.tokens / timing.seconds, timing.peak_bytes / 2**30
    row = {
        "provider": provider,
        "layout": args.layout,
        "gpus": args.world,
        "mix": args.mix,
        "layers": args.layers or "all",
        "dropout": args.dropout,
        "micro_batch_tokens": args.micro_batch_tokens,
        "portion_tokens": args.portion_tokens,
        "tokens_per_s": f"{speed:.0f}",
        "seconds": f"{timing.seconds:.2f}",
        "tokens": timing.tokens,
        "peak_gib": f"{peak:.1f}",
        "gpu": gpu_name(),
        "versions": versions("deepspeed"),
        "commit": args.commit,
    }
    append_rows(args.csv, [row])
    print(
        f"{provider:9} {args.layout} x{args.world}  {speed:9,.0f} tokens/s  {peak:6.1f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
