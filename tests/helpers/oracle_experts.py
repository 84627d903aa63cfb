"""Adapters on routed experts as PEFT trains them, for the oracle.

PEFT wraps `gate_up_proj [E, 2 I, H]` and `down_proj [E, H, I]` and forms `W + scaling * B A` for
every expert. It has one A for gate and up. Where they have an A each, the wrapper gets rank 2 r:
gate's rows of B read the first r rows of A, up's the others. B's other half stays zero, because its
gradient is masked; norm, clipping and AdamW are then those of separate modules. What all experts
share is one parameter of torch's parametrization, which repeats it for PEFT.

Shapes: E experts, r rank, H hidden features, I features inside an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tlora_megatron.config.job import LoraSpec

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_OF_GATE_UP = ("experts.gate_proj", "experts.up_proj", "experts.linear_fc1")


def peft_fields(lora: LoraSpec) -> dict[str, Any]:
    """The fields of PEFT's configuration that a job with targets on routed experts has."""
    targets = lora.expert_targets
    rank = lora.rank_of(targets[0])
    ranks = {}
    if any(target in _OF_GATE_UP for target in targets):
        ranks[_GATE_UP] = rank if "experts.linear_fc1" in targets else 2 * rank
    if not all(target in _OF_GATE_UP for target in targets):
        ranks[_DOWN] = rank
    dense = [target for target in lora.target_modules if target not in targets]
    return {
        "r": lora.rank, "lora_alpha": lora.scaling * lora.rank,
        "target_modules": dense or "nothing",
        "target_parameters": [f"mlp.{name}" for name in ranks], "rank_pattern": ranks,
        "alpha_pattern": {name: lora.scaling * r for name, r in ranks.items()}, "use_rslora": False,
    }  # fmt: skip


def expert_factor(model: nn.Module, name: str, *, grad: bool = False) -> Tensor:
    """A view of PEFT's parameter as the canonical factor, `[E, r, in]` or `[E, out, r]`.

    Without E where all experts share it.

    Args:
        grad: of its gradient instead.
    """
    found = re.fullmatch(r"layers\.(\d+)\.(experts\.\w+)\.lora_([ab])", name)
    assert found is not None, name
    layer, target, side = found.groups()
    wrapper = _wrapper(model, layer, is_gate_up=target in _OF_GATE_UP)
    count = wrapper.num_experts
    module = getattr(wrapper, f"lora_{side.upper()}")["default"]
    is_shared = parametrize.is_parametrized(module)
    parameter = module.parametrizations.weight.original if is_shared else module.weight
    weight = parameter.grad if grad else parameter.data
    if is_shared:
        whole = weight
    elif side == "a":
        whole = weight.view(count, -1, weight.shape[1])
    else:
        whole = weight.view(weight.shape[0], -1, count).permute(2, 0, 1)
    if target not in ("experts.gate_proj", "experts.up_proj"):
        return whole
    half = 0 if target == "experts.gate_proj" else 1
    if side == "a":
        return whole.chunk(2, -2)[half]
    return whole.chunk(2, 1)[half].chunk(2, 2)[half]


class _OfAllExperts(nn.Module):
    """Repeats a factor for every expert, as PEFT stores them: A expert-major, B expert-minor."""

    def __init__(self, side: str, count: int) -> None:
        super().__init__()
        self._side, self._count = side, count

    def forward(self, shared: Tensor) -> Tensor:
        if self._side == "A":
            return shared.repeat(self._count, 1)
        return shared.repeat_interleave(self._count, 1)

    def right_inverse(self, weight: Tensor) -> Tensor:
        if self._side == "A":
            return weight[: len(weight) // self._count].clone()
        return weight[:, :: self._count].clone()


def share_outer(model: nn.Module, lora: LoraSpec) -> None:
    """Makes A of gate and up and B of down one parameter for all experts of a layer."""
    if lora.expert_sharing == "none":
        return
    for is_gate_up, side in ((True, "A"), (False, "B")):
        for module in _wrappers(model, is_gate_up=is_gate_up):
            linear = getattr(module, f"lora_{side}")["default"]
            repeated = _OfAllExperts(side, module.num_experts)
            parametrize.register_parametrization(linear, "weight", repeated)


def as_exported(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Factors as files have them: one A of gate and up with each, shared ones with each expert."""
    found: dict[str, Tensor] = {}
    counts = [len(factor) for factor in factors.values() if factor.ndim == 3]
    for name, factor in factors.items():
        if ".experts." in name and factor.ndim == 2:
            factor = factor.expand(counts[0], *factor.shape)
        parts = [factor, factor] if name.endswith("lora_a") else list(factor.chunk(2, -2))
        if "experts.linear_fc1" in name:
            for part, value in zip(("gate_proj", "up_proj"), parts, strict=True):
                found[name.replace("linear_fc1", part)] = value.contiguous()
        else:
            found[name.replace("experts.linear_fc2", "experts.down_proj")] = factor
    return found


def mask_gradients(model: nn.Module, lora: LoraSpec) -> None:
    """Keeps gate's rows of B from up's half of A, and the other way round."""
    if "experts.gate_proj" not in lora.expert_targets:
        return
    for module in _wrappers(model, is_gate_up=True):
        weight = module.lora_B["default"].weight
        mask = torch.zeros(weight.shape).view(weight.shape[0], -1, module.num_experts)
        half_out, half_rank = weight.shape[0] // 2, mask.shape[1] // 2
        mask[:half_out, :half_rank] = mask[half_out:, half_rank:] = 1
        weight.register_hook(mask.view(weight.shape).mul)
        weight.data.mul_(mask.view(weight.shape))


def _wrappers(model: nn.Module, *, is_gate_up: bool) -> list[Any]:
    name = "gate_up_proj" if is_gate_up else "down_proj"
    modules: list[Any] = list(model.modules())
    return [m for m in modules if getattr(m, "parameter_name", None) == name]


def _wrapper(model: nn.Module, layer: str, *, is_gate_up: bool) -> Any:
    return _wrappers(model, is_gate_up=is_gate_up)[int(layer)]
