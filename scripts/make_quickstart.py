#!/usr/bin/env python
"""Makes the quickstart's base model, tokenizer and job data from a seed, without any download.

The base is a Llama of 0.8 million parameters, pre-trained here on the made-up skills of
quickstart_tasks.py, which also makes the rows of the four jobs. With `--experts` it is a Qwen3-MoE
whose rows meet two experts of half the size each.

    python scripts/make_quickstart.py --output configs/quickstart
    python scripts/make_quickstart.py --experts 4 --output build/quickstart_experts
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from quickstart_tasks import (
    EVAL_ROWS,
    JOBS,
    PAIRS,
    SKILLS,
    TRAIN_ROWS,
    Example,
    job_rows,
    pair_rows,
    skill_example,
)
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tqdm import trange
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

PAD, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
"""Token ids; byte `b` of the UTF-8 text is token `FIRST_BYTE + b`."""
VOCAB_SIZE = 264
"""256 bytes and 3 special tokens, padded so that TP = 2, 4 and 8 divide it."""
PEAK = "peak_lr"
"""Key of the largest learning rate of an optimizer's group."""
PROMPT_WEIGHT = 0.1
"""Weight of a prompt token in the loss: random words are noise that cannot be learned."""
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{ message['content'] + '\\n' }}{% endif %}
{%- endfor %}"""
"""A request and its answer get the tokens that a row of prompt and completion has."""


def write_jobs(folder: Path, seed: int) -> None:
    """Writes `NAME_train.jsonl` and `NAME_eval.jsonl` of every job, and of pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    all_rows = {name: (job_rows(name, seed), TRAIN_ROWS) for name in JOBS}
    all_rows["pairs"] = pair_rows(seed, PAIRS + EVAL_ROWS), PAIRS
    for name, (rows, count) in all_rows.items():
        for part, chosen in (("train", rows[:count]), ("eval", rows[count:])):
            lines = "".join(json.dumps(row) + "\n" for row in chosen)
            (folder / f"{name}_{part}.jsonl").write_text(lines, encoding="utf-8")


def byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so any text comes back exactly; `<s>` is put in front."""
    specials = ("<pad>", "<s>", "</s>")
    symbols = (*specials, *byte_symbols())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in specials]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(folder: Path) -> None:
    """Writes the tokenizer under the class name that transformers 4 and 5 both know."""
    make_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def new_model(num_experts: int) -> PreTrainedModel:
    """The untrained base.

    Args:
        num_experts: of a layer; 0 = a dense base.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.05,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    if not num_experts:
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    sizes = {"moe_intermediate_size": shape["intermediate_size"] // 2, "head_dim": 32}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape | experts | sizes))


def as_batch(examples: list[Example], prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their weights as targets, both `[examples, longest]`, padded on the right."""
    rows, weights = [], []
    for prompt, completion in examples:
        head, tail = prompt.encode(), completion.encode()
        rows.append([BOS, *(FIRST_BYTE + b for b in head + tail), EOS])
        weights.append([0.0] + [prompt_weight] * len(head) + [1.0] * (len(tail) + 1))
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([row + [0.0] * (longest - len(row)) for row in weights])


def batches(rng: random.Random, batch_size: int) -> Iterator[list[Example]]:
    """Endless pre-training batches of examples of like length, so that little is padding."""
    while True:
        pool = sorted(
            (skill_example(rng) for _ in range(8 * batch_size)), key=lambda e: len("".join(e))
        )
        groups = [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
        rng.shuffle(groups)
        yield from groups


def make_optimizers(model: PreTrainedModel, lr: float) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the layers, AdamW for experts, embeddings, head and norms."""
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    stacked = [p for p in model.parameters() if p.ndim == 3]
    chosen = set(map(id, matrices + stacked))
    groups = [{"params": [p for p in model.parameters() if id(p) not in chosen], PEAK: lr}]
    if stacked:
        groups.append({"params": stacked, PEAK: lr / 4})
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    muon.param_groups[0][PEAK] = lr
    return muon, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)


def weighted_loss(model: PreTrainedModel, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the next-token losses."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def pretrain(model: PreTrainedModel, seed: int, steps: int, batch_size: int, lr: float) -> None:
    """Warm-up and cosine decay on fresh examples; in place."""
    optimizers = make_optimizers(model, lr)
    warmup = max(1, steps // 50)
    source = batches(random.Random(f"{seed}/skills"), batch_size)
    progress = trange(steps, desc="pre-training", unit="step", mininterval=1.0)
    for step in progress:
        factor = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)
        ids, weights = as_batch(next(source), PROMPT_WEIGHT)
        weighted_loss(model, ids, weights).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group[PEAK] * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 250 == 0:
            progress.set_postfix({s.__name__: f"{skill_match(model, s, 64):.2f}" for s in SKILLS})


@torch.no_grad()
def exact_match(model: PreTrainedModel, examples: list[Example]) -> float:
    """Share of examples whose completion and end are what greedy decoding gives."""
    ids, weights = as_batch(examples, 0.0)
    right = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1) == ids[:, 1:]
    return (right | (weights[:, 1:] == 0)).all(-1).float().mean().item()


def skill_match(
    model: PreTrainedModel, skill: Callable[[random.Random], Example], count: int
) -> float:
    """Exact match on `count` fresh examples of a skill, the same ones at every call."""
    rng = random.Random(f"check/{skill.__name__}")
    return exact_match(model, [skill(rng) for _ in range(count)])


def report(model: PreTrainedModel, output: Path, seed: int, seconds: float) -> None:
    """Prints sizes and the base's exact match on fresh skill examples and on the jobs."""
    parameters = sum(p.numel() for p in model.parameters())
    table = Table(title=f"{output}: {parameters:,} parameters, {seconds:.0f} s")
    for column in ("task", "shown to the base", "exact match of the base"):
        table.add_column(column)
    for skill in SKILLS:
        table.add_row(skill.__name__, "yes", f"{skill_match(model, skill, 256):.3f}")
    for name in JOBS:
        rows = [(row["prompt"], row["completion"]) for row in job_rows(name, seed)[TRAIN_ROWS:]]
        table.add_row(name, "no", f"{exact_match(model, rows):.3f}")
    Console().print(table)
    for folder in ("base", "data"):
        print(f"{folder}: {sum(f.stat().st_size for f in (output / folder).iterdir()):,} bytes")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("configs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, default=0, help="routed experts of a layer")
    parser.add_argument("--steps", type=int, default=3000, help="pre-training steps")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument(
        "--threads", type=int, default=2, help="other values give other last digits"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    write_jobs(args.output / "data", args.seed)
    save_tokenizer(args.output / "base")
    model = new_model(args.experts)
    pretrain(model, args.seed, args.steps, args.batch_size, args.lr)
    model = model.to(torch.bfloat16)
    model.save_pretrained(args.output / "base")
    report(model.float(), args.output, args.seed, time.perf_counter() - start)


if __name__ == "__main__":
    main()
