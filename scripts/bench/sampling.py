"""Tokens a second of the service's own sampler, beside transformers' generate with one adapter.

    python -m scripts.bench.sampling --csv scripts/bench/results/decoding.csv
    python -m scripts.bench.sampling --size toy --sequences 8 --tokens 16     # on a CPU, to try it

Prompts of 128 tokens grow over random weights, dealt out over adapters of rank 32 on all linears;
PEFT gives all of them the first one. `step_ms` is a step in which all grow, tokens a second count
prompts' time too. PEFT then scores the greedy tokens: `behind` is the mean gap of logits to the
likeliest, `behind_other` under a wrong adapter; it fails above a tenth, or if no graph was used.
"""

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench.around_training.base import shape_of, write_config
from scripts.bench.harness.arguments import bench_parser
from scripts.bench.harness.clock import wait_for_device
from scripts.bench.harness.rows import append_rows, gpu_name, versions
from tlora_megatron.config.job import HF_TARGETS, LoraSpec
from tlora_megatron.layers.slab import factor_names, factor_shape
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.sampling.batcher import Batcher, open_batcher
from tlora_megatron.runtime.sampling.values import Prompt, SamplerLimits, SamplingParams
from tlora_megatron.training.formats.hf_checkpoint import RandomWeights
from tlora_megatron.training.formats.hf_convert import hf_shapes
from tlora_megatron.training.formats.peft import export_adapter

_PROMPT, _DTYPE, _ON_GPU = 128, torch.bfloat16, torch.cuda.is_available()
_DEVICE = torch.device("cuda" if _ON_GPU else "cpu")
_LORA = LoraSpec(rank=32, alpha=32.0, target_modules=HF_TARGETS)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--size", default="8b", choices=("8b", "toy"))
    for name, default in (("--sequences", 64), ("--adapters", 8), ("--tokens", 128)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    write_config(shape_of(args.size), root)
    spec = read_model_spec(root / "config.json")
    folders = [str(root / f"lora{number}") for number in range(args.adapters)]
    shapes = {name: factor_shape(spec, name, _LORA) for name in factor_names(spec, _LORA)}
    for folder in folders:
        drawn = {n: (torch.randn(s, device=_DEVICE) * 0.02).cpu() for n, s in shapes.items()}
        export_adapter(
            Path(folder), lora=_LORA, factors=drawn, model=spec, base_model="", dtype=_DTYPE
        )
    base = {"config": str(root / "config.json"), "random_init": True, "dtype": "bfloat16"}
    batcher = open_batcher(base, SamplerLimits(adapters=args.adapters, sequences=args.sequences))
    ids, decoder = torch.randint(8, 500, (args.sequences, _PROMPT)), batcher._model.decoder
    times, chosen = {}, {}
    for mode, heat in (("graphs", 0.0), ("graphs, drawn", 1.0), ("no graphs", 0.0)):
        batcher._model.decoder = None if mode == "no graphs" else decoder
        for count in (4, args.tokens):  # the first compiles and records
            chosen[mode], *times[mode] = _sample(batcher, folders, ids, count, heat)
    with _DEVICE:
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(root), dtype=_DTYPE
        )
    weights = RandomWeights(hf_shapes(spec), seed=0, device=_DEVICE, dtype=_DTYPE)
    for name, weight in model.named_parameters():
        weight.data.copy_(weights.read(name))
    peft = PeftModel.from_pretrained(model, folders[0], autocast_adapter_dtype=False).eval()
    peft.load_adapter(folders[-1], "last", autocast_adapter_dtype=False)
    whole = torch.cat([ids, torch.tensor(chosen["graphs"])], dim=1)
    first, last = whole[:: args.adapters], whole[args.adapters - 1 :: args.adapters]
    behind = max(_behind(peft, "default", first), _behind(peft, "last", last))
    other = _behind(peft, "last", first)
    peft.set_adapter("default")
    for mode in ("peft", "peft, merged"):
        peft.merge_adapter(["default"]) if mode == "peft, merged" else None
        _, short_s, long_s = (_generate(peft, ids, count) for count in (4, 4, args.tokens))
        times[mode] = [(long_s - short_s) / (args.tokens - 4), long_s]
    head = {"gpu": gpu_name(), "commit": args.commit, "versions": versions("transformers", "peft")}
    head |= {"sequences": args.sequences, "adapters": args.adapters}
    head |= {"behind": round(behind, 4), "behind_other": round(other, 4)}
    rows = [
        head | {"mode": mode, "step_ms": round(1e3 * step_s, 2), "whole_s": round(whole_s, 2)}
        | {"tokens_per_s": round(args.sequences * args.tokens / whole_s)}
        | {"over_peft": round(times["peft"][1] / whole_s, 2)}
        for mode, (step_s, whole_s) in times.items()
    ]  # fmt: skip
    print(*rows, sep="\n")
    append_rows(args.csv, rows) if args.csv is not None else None
    return int(behind > 0.1 * other or (decoder is not None and bool(decoder.graphs)) != _ON_GPU)


def _sample(batcher: Batcher, folders: list[str], ids: Tensor, count: int, heat: float) -> Any:
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=heat, seed=1)
    told: list[Any] = []
    for n, tokens in enumerate(ids.tolist()):
        prompt = Prompt(tokens=tuple(tokens), adapter=folders[n % len(folders)], params=params)
        batcher.add(batcher.request(prompt, n, 0, told.append))
    times_s = [time.perf_counter()]
    while batcher.has_work:
        batcher.step()  # waits for its tokens
        times_s.append(time.perf_counter())
    steps_s = [end - begin for begin, end in itertools.pairwise(times_s)]
    own = [[piece.tokens[0] for piece in told if piece.prompt == n] for n in range(len(ids))]
    return own, statistics.median(steps_s[1:]), times_s[-1] - times_s[0]


def _generate(peft: Any, ids: Tensor, count: int) -> float:
    given = {"input_ids": ids.to(_DEVICE), "attention_mask": torch.ones_like(ids, device=_DEVICE)}
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    wait_for_device()
    begin_s = time.perf_counter()
    peft.generate(**given, **options, pad_token_id=0)
    wait_for_device()
    return time.perf_counter() - begin_s


@torch.no_grad()
def _behind(peft: Any, adapter: str, whole: Tensor) -> float:
    peft.set_adapter(adapter)
    logits = peft(input_ids=whole.to(_DEVICE)).logits[:, _PROMPT - 1 : -1].float()
    own = logits.gather(2, whole[:, _PROMPT:, None].to(_DEVICE))
    return float((logits.amax(-1) - own[..., 0]).mean())


if __name__ == "__main__":
    sys.exit(main())
