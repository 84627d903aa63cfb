"""Tokens a second of the small exact generator, for docs/sampling.md.

    python -m scripts.bench.sampling --csv scripts/bench/results/sampling.csv
    python -m scripts.bench.sampling --tiny --sequences 1 4 --tokens 16       # on a CPU, to try it

Sequences with prompts of 128 tokens grow by `--tokens` each over random weights at the shapes of an
8B model, dealt out over a number of adapters of rank 16 on all linears. A row has the time of a
step in which all of them grow (median), and the tokens a second that follow from it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scripts.bench.around_training.base import TOKENIZER, shape_of, write_config
from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import wait_for_device
from scripts.bench.harness.rows import append_rows, gpu_name
from tlora_megatron.config.job import HF_TARGETS, LoraSpec
from tlora_megatron.layers.slab import factor_names, initial_factor
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.sampling.batcher import Batcher, open_batcher
from tlora_megatron.runtime.sampling.values import Prompt, SamplerLimits, SamplingParams
from tlora_megatron.training.formats.peft import export_adapter

_PROMPT = 128


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="the quickstart's base")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--tokens", type=int, default=64, help="new ones of a sequence")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        base = _base(Path(root), is_tiny=args.tiny)
        folders = _adapters(Path(root), base, max(args.adapters))
        limits = SamplerLimits(adapters=max(1, len(folders)))
        batcher = open_batcher(base, limits)
        rows = [
            _measure(batcher, folders[:adapters], sequences, args)
            for adapters in args.adapters
            for sequences in args.sequences
            if sequences >= adapters
        ]
    for row in rows:
        print(row)
    if args.csv is not None:
        append_rows(args.csv, rows)
    return 0


def _base(root: Path, *, is_tiny: bool) -> Mapping[str, Any]:
    if is_tiny:
        return {"path": str(TOKENIZER)}
    folder = root / "base"
    write_config(shape_of("8b"), folder)
    return {"config": str(folder / "config.json"), "random_init": True, "dtype": "bfloat16"}


def _adapters(root: Path, base: Mapping[str, Any], count: int) -> list[str]:
    config = Path(base["config"]) if "config" in base else Path(base["path"]) / "config.json"
    spec = read_model_spec(config)
    lora = LoraSpec(rank=16, alpha=32.0, target_modules=HF_TARGETS)
    folders = [root / f"adapter{number}" for number in range(count)]
    for seed, folder in enumerate(folders):
        factors = {n: initial_factor(spec, n, lora, seed) for n in factor_names(spec, lora)}
        export_adapter(
            folder, lora=lora, factors=factors, model=spec, base_model="base", dtype=torch.bfloat16
        )
    return [str(folder) for folder in folders]


def _measure(batcher: Batcher, folders: list[str], sequences: int, args: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sequences)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0.0)
    for number in range(sequences):
        ids = torch.randint(8, 200, (_PROMPT,), generator=generator).tolist()
        adapter = folders[number % len(folders)] if folders else None
        prompt = Prompt(tokens=tuple(ids), adapter=adapter, params=params)
        batcher.add(batcher.request(prompt, number, 0, lambda _: None))
    times_s, begin_s = [], time.perf_counter()
    while batcher.has_work:
        step_s = time.perf_counter()
        batcher.step()
        wait_for_device()
        times_s.append(time.perf_counter() - step_s)
    step_ms = 1e3 * statistics.median(times_s[len(times_s) // 4 :])
    return {
        "gpu": gpu_name(), "commit": args.commit, "adapters": len(folders), "sequences": sequences,
        "step_ms": round(step_ms, 2), "tokens_per_s": round(1e3 * sequences / step_ms, 1),
        "whole_s": round(time.perf_counter() - begin_s, 2),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
