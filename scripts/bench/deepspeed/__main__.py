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
import gc
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench.harness.arguments import REPO, RESULTS, bench_parser
from scripts.bench.harness.clock import Timing, Watch, is_main, timed, total
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from scripts.bench.harness.training_jobs import fresh_job
from scripts.bench.step.jobs import Mix, make_mixes
from scripts.bench.step.project import whole_step
from tlora_megatron.config.job import HF_TARGETS, JobSpec
from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig
from tlora_megatron.integrations.deepspeed.engine import FrozenBase, build_base, join_processes
from tlora_megatron.integrations.deepspeed.known_keys import check_deepspeed
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.super_model import SuperModel


def run_stock(model: Any, mix: Mix, zero: Mapping[str, Any], steps: int) -> Timing:
    """Each job by itself under DeepSpeed and PEFT for so many steps, after two."""
    jobs = zip(mix.specs, mix.data, strict=True)
    return total([_job(model, spec, train, zero, steps) for spec, train in jobs])


def _job(
    model: Any, spec: JobSpec, train: Sequence[TokenSequence], zero: Mapping[str, Any], steps: int
) -> Timing:
    from peft import LoraConfig, get_peft_model

    model.train()
    model.config.use_cache = False
    share = spec.batch_size // dist.get_world_size()
    lora = {"r": spec.lora.rank, "lora_alpha": spec.lora.alpha, "lora_dropout": spec.lora.dropout}
    peft = get_peft_model(model, LoraConfig(**lora, target_modules=list(HF_TARGETS)))
    engine = _engine(peft, zero, share)
    endless = itertools.cycle(train)
    for _ in range(2):
        _step(engine, list(itertools.islice(endless, spec.batch_size)), share)
    watch, tokens = Watch(), 0
    for _ in range(steps):
        batch = list(itertools.islice(endless, spec.batch_size))
        tokens += sum(len(s.tokens) for s in batch)
        _step(engine, batch, share)
    timing = watch.timing(steps=steps, tokens=tokens)
    engine.destroy()
    peft.unload()
    del engine, peft
    gc.collect()
    return timing


def _engine(peft: Any, zero: Mapping[str, Any], share: int) -> Any:
    """DeepSpeed's engine over the adapter, with `share` sequences a step on each process."""
    import deepspeed

    trainable = [p for p in peft.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": share, "steps_per_print": 2**31,
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": dict(zero) if zero["stage"] else {"stage": 1},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(trainable, lr=2e-4, fused=torch.cuda.is_available())
    engine, *_ = deepspeed.initialize(
        model=peft, optimizer=optimizer, config=config, model_parameters=trainable
    )
    return engine


def _step(engine: Any, batch: Sequence[TokenSequence], share: int) -> None:
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
    vocab = AutoConfig.for_model(**json.loads(MODEL.read_text())).vocab_size
    longest = min(2048, args.micro_batch_tokens)
    mixes = make_mixes(
        None, vocab_size=vocab, target_share=0.5, dropout=args.dropout, longest=longest
    )
    mix = next(mix for mix in mixes if mix.name == args.mix)
    dp_size = 1 if args.layout == "autotp" else args.world
    specs = [replace(s, batch_size=-(-s.batch_size // dp_size) * dp_size) for s in mix.specs]
    return replace(mix, specs=tuple(specs))


def _random_model(layers: int | None) -> Any:
    """The model's shapes in bf16 on this device, drawn where they lie."""
    values = json.loads(MODEL.read_text()) | (
        {} if layers is None else {"num_hidden_layers": layers}
    )
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
    super_model = _super_model(base, mix, range(len(mix.specs)), args)
    return _timed(super_model, super_model.train_round, warmup=3, repeats=args.rounds)


def run_alone(base: FrozenBase, mix: Mix, args: argparse.Namespace) -> Timing:
    timings = []
    for index in range(len(mix.specs)):
        super_model = _super_model(base, mix, [index], args)
        step = whole_step(super_model)
        timings.append(_timed(super_model, step, warmup=2, repeats=args.steps))
    return total(timings)


def _super_model(
    base: FrozenBase, mix: Mix, chosen: Sequence[int], args: argparse.Namespace
) -> SuperModel:
    portion = args.portion_tokens or None
    specs = [replace(mix.specs[index], portion_tokens=portion) for index in chosen]
    bank = AdapterBank(
        [site for site, _ in base.linears], [spec.lora for spec in specs], dtype=torch.bfloat16,
        device=base.groups.device, placement=base.placement,
    )  # fmt: skip
    attach(base.linears, bank)
    jobs = [
        fresh_job(spec, mix.data[i], bank, base.spec) for spec, i in zip(specs, chosen, strict=True)
    ]
    return SuperModel(
        base.engine, bank, base.groups, jobs, micro_batch_tokens=args.micro_batch_tokens
    )


def _timed(
    super_model: SuperModel, step: Callable[[], object], *, warmup: int, repeats: int
) -> Timing:
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
        "provider": provider, "layout": args.layout, "gpus": args.world, "mix": args.mix,
        "layers": args.layers or "all", "dropout": args.dropout,
        "micro_batch_tokens": args.micro_batch_tokens, "portion_tokens": args.portion_tokens,
        "tokens_per_s": f"{speed:.0f}", "seconds": f"{timing.seconds:.2f}",
        "tokens": timing.tokens, "peak_gib": f"{peak:.1f}", "gpu": gpu_name(),
        "versions": versions("deepspeed"), "commit": args.commit,
    }  # fmt: skip
    append_rows(args.csv, [row])
    what = f"{provider:9} {args.layout} x{args.world}"
    print(f"{what}  {speed:9,.0f} tokens/s  {peak:6.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
