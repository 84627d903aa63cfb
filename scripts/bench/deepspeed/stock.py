"""One job at a time under DeepSpeed and PEFT, as their documentation has it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.harness.clock import Timing, Watch, total
from scripts.bench.step.jobs import Mix
from tlora_megatron.config.job import HF_TARGETS, JobSpec
from tlora_megatron.training.data.tokenize import TokenSequence


def run_stock(model: Any, mix: Mix, zero: Mapping[str, Any], steps: int) -> Timing:
    """Each job by itself for so many steps, after two.

    Args:
        zero: the engine's `zero_optimization`.
    """
    jobs = zip(mix.specs, mix.data, strict=True)
    return total([_job(model, spec, train, zero, steps) for spec, train in jobs])


def _job(
    model: Any, spec: JobSpec, train: Sequence[TokenSequence], zero: Mapping[str, Any], steps: int
) -> Timing:
    model.train()
    model.config.use_cache = False
    share = spec.batch_size // dist.get_world_size()
    peft = _with_adapter(model, spec)
    engine = _engine(peft, zero, share)
    batches = _batches(train, spec.batch_size)
    for _ in range(2):
        _step(engine, next(batches), share)
    watch, tokens = Watch(), 0
    for _ in range(steps):
        batch = next(batches)
        tokens += sum(len(s.tokens) for s in batch)
        _step(engine, batch, share)
    timing = watch.timing(steps=steps, tokens=tokens)
    engine.destroy()
    peft.unload()
    del engine, peft
    gc.collect()
    return timing


def _with_adapter(model: Any, spec: JobSpec) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=spec.lora.rank,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        target_modules=list(HF_TARGETS),
    )
    return get_peft_model(model, lora)


def _engine(peft: Any, zero: Mapping[str, Any], share: int) -> Any:
    """DeepSpeed's engine over the adapter, with `share` sequences a step on each process."""
    import deepspeed

    trainable = [p for p in peft.parameters() if p.requires_grad]
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
    return engine


def _batches(train: Sequence[TokenSequence], size: int) -> Iterator[list[TokenSequence]]:
    endless = itertools.cycle(train)
    while True:
        yield list(itertools.islice(endless, size))


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
