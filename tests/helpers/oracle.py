"""The oracle of losslessness: transformers + PEFT train one job alone, CPU, fp32, one process.
It shares no arithmetic with the package: model, adapter, loss, clipping, AdamW and schedule are
those of transformers, PEFT and torch. Sequences run one by one, without padding or packing. Its
results lie on the disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from peft import BdLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoModelForCausalLM, get_scheduler

from tests.helpers import fake_quant_peft, oracle_experts
from tests.helpers.fake_quant_peft import FakeQuant
from tests.helpers.oracle_experts import (
    as_exported,
    expert_factor,
    mask_gradients,
    peft_fields,
    share_outer,
)
from tests.helpers.session import ORACLE_CACHE
from tlora_megatron.config.job import MEGATRON_TARGETS, JobSpec

_HF_SCHEDULE = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}

CLEAR_CHOICE = 1e-5
"""No other order of fp32 sums turns a router's choice between logits that differ by more."""


class Sequenced(Protocol):
    """One sequence: `tokens` int `[n]`, `is_target` bool `[n]` (this token is predicted)."""

    tokens: Tensor | np.ndarray
    is_target: Tensor | np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleResult:
    """The results of the job alone; one entry a step."""

    losses: list[float]
    """Before that step's update: mean over all target tokens of its batch."""
    grad_norms: list[float]
    """2-norm over the whole adapter before clipping."""
    lrs: list[float]
    factors: dict[str, Tensor]
    """Canonical whole fp32 factors after the last update, as an exported adapter has them."""
    router_gap: float = math.inf
    """Smallest difference that any router's choice hung on, over all rows of all steps: the last
    logit chosen less the first one that was not. Infinite without routed experts."""


def train_alone(
    base_dir: Path,
    job: JobSpec,
    factors: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequenced]],
    quantised: FakeQuant | None = None,
) -> OracleResult:
    """Trains `job` on the base model in `base_dir`, one optimizer step for each batch.

    Args:
        base_dir: Hugging Face directory.
        job: lora, optimizer and schedule are used; dropout 0 and Hugging Face targets only.
        factors: initial adapter, canonical whole fp32.
        batches: the sequences of each step, in order.
        quantised: how the base is rounded; None = not at all.
    """
    assert job.lora.dropout == 0.0, f"the oracle has no dropout, got {job.lora.dropout}"
    assert not set(job.lora.target_modules) & set(MEGATRON_TARGETS), (
        "the oracle knows Hugging Face targets only"
    )
    model = _peft_model(base_dir, job, quantised)
    mask_gradients(model, job.lora)
    share_outer(model, job.lora)
    _write_factors(model, factors)
    params = [param for param in model.parameters() if param.requires_grad]
    spec = job.optimizer
    optimizer = torch.optim.AdamW(
        params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )
    scheduler = _scheduler(optimizer, job, job.max_steps or len(batches))
    router_gap = _watch_routers(model)
    losses, grad_norms, lrs = [], [], []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(_backward(model, batch))
        norm = torch.nn.utils.clip_grad_norm_(params, spec.max_grad_norm or math.inf)
        grad_norms.append(float(norm))
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return OracleResult(
        losses=losses, grad_norms=grad_norms, lrs=lrs,
        factors=as_exported(_read_factors(model, factors)), router_gap=float(router_gap),
    )  # fmt: skip


def _watch_routers(model: nn.Module) -> Tensor:
    """Returns a number that each forward lowers to the smallest gap of its routers' choices."""
    smallest = torch.tensor(math.inf)

    def see(router: nn.Module, _: object, outputs: tuple[Tensor, ...]) -> None:
        logits, top_k = outputs[0].detach(), int(router.top_k)
        if logits.shape[-1] > top_k:
            best = logits.topk(top_k + 1, dim=-1).values
            torch.minimum(smallest, (best[:, -2] - best[:, -1]).min(), out=smallest)

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(see)
    return smallest


def assert_equals_alone(
    losses: Sequence[float], factors: Mapping[str, Tensor], expected: OracleResult, what: str
) -> None:
    """Losses of every step and final canonical factors, up to the order of fp32 sums."""
    # Else a token may meet another expert for no fault, and the comparison proves nothing.
    assert expected.router_gap > CLEAR_CHOICE, f"{what}: another seed must be taken for the base"
    got, wanted = (torch.tensor(x, dtype=torch.float64) for x in (losses, expected.losses))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0, msg=lambda m: f"{what}: {m}")
    assert factors.keys() == expected.factors.keys(), what
    for key, value in expected.factors.items():
        assert float((factors[key] - value).norm() / value.norm()) < 1e-4, f"{what} {key}"


def learning_rate(job: JobSpec, step: int, num_steps: int) -> float:
    """Learning rate of update `step` (from 0) of `num_steps`: Hugging Face's curves with a floor.

    Like there, the first warm-up step has learning rate 0; `min_lr` is where the decay ends.
    """
    peak, floor, warmup = job.optimizer.lr, job.schedule.min_lr, job.schedule.warmup_steps
    if step < warmup:
        return peak * step / warmup
    if job.schedule.name == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    if job.schedule.name == "linear":
        return floor + (peak - floor) * (1.0 - progress)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _scheduler(optimizer: torch.optim.Optimizer, job: JobSpec, num_steps: int) -> LRScheduler:
    """Hugging Face's own scheduler where there is no floor (it has none), else the formula."""
    if job.schedule.min_lr == 0.0:
        return get_scheduler(
            _HF_SCHEDULE[job.schedule.name],
            optimizer,
            num_warmup_steps=job.schedule.warmup_steps,
            num_training_steps=num_steps,
        )
    peak = job.optimizer.lr
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(job, step, num_steps) / peak
    )


def _peft_model(base_dir: Path, job: JobSpec, quantised: FakeQuant | None) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(
        base_dir, dtype=torch.float32, attn_implementation="eager"
    )
    if quantised is not None:
        quantised.apply(base)
    fields: dict[str, Any] = {
        "r": job.lora.rank,
        "lora_alpha": job.lora.alpha,
        "target_modules": list(job.lora.target_modules),
        "use_rslora": job.lora.use_rslora,
    }
    if job.lora.expert_targets:
        fields = peft_fields(job.lora)
    config = LoraConfig(
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        use_bdlora=_blocks(job) if job.lora.is_block_diagonal else None,
        **fields,
    )
    return get_peft_model(base, config).train()


def _blocks(job: JobSpec) -> BdLoraConfig:
    """Block-diagonal factors by PEFT's documentation: A of output and down projections, else B."""
    outputs = {"o_proj", "down_proj"}
    return BdLoraConfig(
        target_modules_bd_a=sorted(outputs & set(job.lora.target_modules)),
        target_modules_bd_b=sorted(set(job.lora.target_modules) - outputs),
        nblocks=job.lora.num_blocks,
    )


def _parameter(model: PeftModel, name: str) -> Tensor:
    """PEFT's parameter of a canonical name such as `layers.3.q_proj.lora_a`, or its part of one."""
    if ".experts." in name:
        return expert_factor(model, name)
    _, layer, module = name.split(".", 2)
    target, _, side = module.rpartition(".")
    letter = "A" if side == "lora_a" else "B"
    pattern = rf"[^\d]*\.{layer}\.([^\d]+\.)?{target}\.lora_{letter}\.default\.weight"
    found = [p for n, p in model.named_parameters() if re.fullmatch(pattern, n)]
    assert len(found) == 1, f"{name} must be one parameter, got {len(found)}"
    return found[0]


def _write_factors(model: PeftModel, factors: Mapping[str, Tensor]) -> None:
    if not any(".experts." in name for name in factors):
        num_trainable = sum(param.requires_grad for param in model.parameters())
        assert len(factors) == num_trainable, (
            f"{num_trainable} factors must be given, got {len(factors)}"
        )
    with torch.no_grad():
        for name, value in factors.items():
            param = _parameter(model, name)
            assert param.shape == value.shape, f"{name} must be {param.shape}, got {value.shape}"
            param.copy_(value)


def _read_factors(model: PeftModel, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _parameter(model, name).detach().clone() for name in names}


def _backward(model: PeftModel, batch: Sequence[Sequenced]) -> float:
    """Adds the gradient of the batch's mean loss, one graph a sequence; returns that loss."""
    num_targets = sum(int(torch.as_tensor(sequence.is_target)[1:].sum()) for sequence in batch)
    assert num_targets > 0, "a batch must hold a target token"
    total = 0.0
    for sequence in batch:
        tokens = torch.as_tensor(sequence.tokens).long()
        is_target = torch.as_tensor(sequence.is_target).bool()[1:]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits[is_target], tokens[1:][is_target], reduction="sum")
        (loss / num_targets).backward()
        total += loss.item() / num_targets
    return total


def cached_train_alone(
    base_dir: Path,
    job: JobSpec,
    factors: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequenced]],
    quantised: FakeQuant | None = None,
) -> OracleResult:
    """The result of `train_alone`, trained only if no earlier call had the same inputs.

    It follows from the base's files, the job's settings, its initial factors, the sequences of each
    step, this source and the libraries' versions. Where pytest has no cache, every call trains.
    """
    folder = os.environ.get(ORACLE_CACHE)
    digest = hashlib.sha256()
    for part in _parts(base_dir, job, factors, batches, quantised):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    path = Path(folder or "nowhere") / f"{digest.hexdigest()}.pt"
    if path.is_file():
        return OracleResult(**torch.load(path, weights_only=True))
    result = train_alone(base_dir, job, factors, batches, quantised)
    if folder:
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(asdict(result), partial)
        partial.rename(path)  # another process may be at the same job
    return result


def _parts(
    base_dir: Path,
    job: JobSpec,
    factors: Mapping[str, Tensor],
    batches: Sequence[Sequence[Sequenced]],
    quantised: FakeQuant | None,
) -> Iterator[bytes]:
    yield Path(__file__).read_bytes()
    yield Path(oracle_experts.__file__).read_bytes()
    yield repr(torch.get_default_dtype()).encode()
    if quantised is not None:
        yield Path(fake_quant_peft.__file__).read_bytes()
        yield repr(quantised).encode()
    yield repr([version(name) for name in ("torch", "transformers", "peft")]).encode()
    yield repr((job.lora, job.optimizer, job.schedule, job.max_steps)).encode()
    for file in sorted(base_dir.glob("*.json")) + sorted(base_dir.glob("*.safetensors")):
        yield file.name.encode()
        yield file.read_bytes()
    for name, factor in sorted(factors.items()):
        yield f"{name} {tuple(factor.shape)} {factor.dtype}".encode()
        yield factor.contiguous().numpy().tobytes()
    for batch in batches:
        yield str(len(batch)).encode()
        for sequence in batch:
            for values in (sequence.tokens, sequence.is_target):
                yield torch.as_tensor(values).numpy().tobytes()
