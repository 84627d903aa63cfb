"""Counts collectives of a layer's forward and backward, and of a step, by what the jobs are.

`block_collectives_worker.py OUT.json` under torchrun; writes `{layout: {mix: {"layers": {...},
"step": {...}}}}`: how often each kind ran in the passes of a round, and in its optimizer steps.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.helpers.variants import end_world
from tlora_megatron.config.job import HF_TARGETS
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import SyntheticRun

SPEC = ModelSpec(
    model_type="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8,
    ffn_size=48, vocab_size=64, max_positions=64, norm_eps=1e-6, rope_theta=1e4,
)  # fmt: skip


def _load(name: str, rank: int, num_blocks: int) -> JobLoad:
    return JobLoad(
        name=name, rank=rank, num_blocks=num_blocks, targets=HF_TARGETS, batch_size=2,
        lengths=LengthHistogram.single(24),
    )  # fmt: skip


MIXES = {
    "frozen": [],
    "block_diagonal": [_load("a", 8, 2), _load("b", 4, 4)],
    "standard": [_load("a", 8, 1), _load("b", 4, 1)],
    "both": [_load("a", 8, 2), _load("b", 4, 1)],
}


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, dict[str, dict[str, Counter[str]]]] = {}
    size = dist.get_world_size()
    for label, sequence_parallel in (("TP", False), ("TP+SP", True)):
        layout = ParallelLayout(tp_size=size, sequence_parallel=sequence_parallel)
        run = SyntheticRun(SPEC, layout, dtype=torch.float32)
        found[label] = {}
        for mix, loads in MIXES.items():
            model = run.super_model(loads or MIXES["standard"], 128)
            if not loads:
                model.bank.install([])
            batches = model.begin_round()
            with profile(activities=[ProfilerActivity.CPU]) as layers:
                losses = model.engine.forward_backward(batches)
            with profile(activities=[ProfilerActivity.CPU]) as step:
                if loads:
                    model.end_round(losses)
            found[label][mix] = {"layers": _collectives(layers), "step": _collectives(step)}
        run.close()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    end_world()


def _collectives(profiler: profile) -> Counter[str]:
    return Counter(event.name for event in profiler.events() if event.name.startswith("c10d::"))


if __name__ == "__main__":
    main()
