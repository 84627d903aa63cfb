"""The oracle itself: it learns, equals a loop by hand, and follows Hugging Face's schedules."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.oracle import learning_rate, train_alone
from tests.helpers.tiny_models import make_tiny_model, random_factors
from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec, OptimizerSpec, ScheduleSpec
from tlora_megatron.model.config_json import read_model_spec


class Sequence(NamedTuple):
    tokens: Tensor
    is_target: Tensor


def sequence(length: int, prompt: int, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 128, (length,), generator=generator, dtype=torch.int32)
    return Sequence(tokens, torch.arange(length) >= prompt)


def job(**changes: object) -> JobSpec:
    base = JobSpec(
        name="one",
        data=DataSpec(train="unused.jsonl"),
        lora=LoraSpec(rank=6, alpha=9.0, target_modules=("q_proj", "v_proj", "down_proj")),
        optimizer=OptimizerSpec(lr=1e-2, max_grad_norm=0.0),
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_equals_a_loop_by_hand(base_dir: Path, max_grad_norm: float, use_rslora: bool) -> None:
    """Merged weights, one flat loss, AdamW and clipping written out; lengths are skewed."""
    one = job(
        lora=LoraSpec(
            rank=3, alpha=5.0, target_modules=("k_proj", "up_proj"), use_rslora=use_rslora
        ),
        optimizer=OptimizerSpec(
            lr=3e-3, weight_decay=0.1, betas=(0.8, 0.95), max_grad_norm=max_grad_norm
        ),
        schedule=ScheduleSpec(name="cosine", warmup_steps=1, min_lr=1e-3),
    )
    factors = random_factors(read_model_spec(base_dir / "config.json"), one.lora, seed=3)
    batches = [
        [sequence(9, 3, 5 * k), sequence(21, 2, 5 * k + 1), sequence(4, 3, 5 * k + 2)]
        for k in range(4)
    ]
    result = train_alone(base_dir, one, factors, batches)
    losses, norms, final = _train_by_hand(base_dir, one, factors, batches)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert result.grad_norms == pytest.approx(norms, rel=1e-4)
    for name, value in final.items():
        assert torch.linalg.norm(result.factors[name] - value) < 1e-4 * torch.linalg.norm(value), (
            name
        )


def _train_by_hand(
    base_dir: Path, one: JobSpec, start: dict[str, Tensor], batches: list[list[Sequence]]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    base = dict(model.named_parameters())
    factors = {name: value.clone().requires_grad_() for name, value in start.items()}
    first = {name: torch.zeros_like(value) for name, value in start.items()}
    second = {name: torch.zeros_like(value) for name, value in start.items()}
    losses, norms = [], []
    (beta1, beta2), spec = one.optimizer.betas, one.optimizer
    for step, batch in enumerate(batches):
        merged = _merge(base, factors, one)
        total, count = torch.zeros(()), 0
        for tokens, is_target in batch:
            logits = torch.func.functional_call(model, merged, (tokens.long()[None],)).logits[0]
            log_probs = logits.log_softmax(-1)
            for position in range(1, len(tokens)):
                if is_target[position]:
                    total, count = total - log_probs[position - 1, int(tokens[position])], count + 1
        grads = dict(
            zip(factors, torch.autograd.grad(total / count, factors.values()), strict=True)
        )
        norm = math.sqrt(sum(float(grad.double().pow(2).sum()) for grad in grads.values()))
        clip = min(1.0, spec.max_grad_norm / (norm + 1e-6)) if spec.max_grad_norm else 1.0
        lr = learning_rate(one, step, len(batches))
        with torch.no_grad():
            for name, factor in factors.items():
                grad = grads[name] * clip
                first[name] = beta1 * first[name] + (1 - beta1) * grad
                second[name] = beta2 * second[name] + (1 - beta2) * grad**2
                root = (second[name] / (1 - beta2 ** (step + 1))).sqrt() + spec.eps
                factor -= lr * spec.weight_decay * factor
                factor -= lr * first[name] / (1 - beta1 ** (step + 1)) / root
        losses.append(float(total.detach() / count))
        norms.append(norm)
    return losses, norms, {name: factor.detach() for name, factor in factors.items()}


def _merge(base: dict[str, Tensor], factors: dict[str, Tensor], one: JobSpec) -> dict[str, Tensor]:
    rank, alpha = one.lora.rank, one.lora.alpha
    scaling = alpha / rank**0.5 if one.lora.use_rslora else alpha / rank
    merged = {name: weight.detach() for name, weight in base.items()}
    for layer in range(2):
        for target, block in (("k_proj", "self_attn"), ("up_proj", "mlp")):
            name = f"model.layers.{layer}.{block}.{target}.weight"
            lora_a = factors[f"layers.{layer}.{target}.lora_a"]
            lora_b = factors[f"layers.{layer}.{target}.lora_b"]
            merged[name] = merged[name] + scaling * lora_b @ lora_a
    return merged


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleSpec(name="linear", warmup_steps=2, min_lr=0.2), [0.0, 0.5, 1.0, 0.8, 0.6, 0.4]),
        (
            ScheduleSpec(name="cosine", min_lr=0.2),
            [0.2 + 0.4 * (1.0 + math.cos(math.pi * step / 6)) for step in range(6)],
        ),
    ],
)
def test_schedules_with_a_floor(schedule: ScheduleSpec, expected: list[float]) -> None:
    one = job(optimizer=OptimizerSpec(lr=1.0), schedule=schedule)
    found = [learning_rate(one, step, 6) for step in (*range(6), 6, 15)]
    assert found == pytest.approx([*expected, 0.2, 0.2], abs=1e-12)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_formula_is_hugging_face_scheduler(base_dir: Path, name: str, warmup_steps: int) -> None:
    """With min_lr 0 the oracle's lrs come from transformers; the formula must say the same."""
    one = job(schedule=ScheduleSpec(name=name, warmup_steps=warmup_steps), max_steps=8)
    factors = random_factors(read_model_spec(base_dir / "config.json"), one.lora)
    result = train_alone(base_dir, one, factors, [[sequence(4, 1, 0)]] * 6)
    assert result.lrs == pytest.approx(
        [learning_rate(one, step, 8) for step in range(6)], abs=1e-15
    )
