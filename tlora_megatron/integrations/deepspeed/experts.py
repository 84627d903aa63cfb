"""Models with routed experts under DeepSpeed: transformers computes them, and they stay frozen."""

from __future__ import annotations

from typing import Any

from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig

_NO_EXPERTS = "routed experts carry no adapters"
_REFUSED = {
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), _NO_EXPERTS),
    "gate": "routers carry no adapters",
    "shared_expert_gate": "it only weighs the shared expert",
}
"""Names that PEFT takes for parts of routed experts, or of what weighs them."""


def has_experts(model: Any) -> bool:
    """Returns True for a model with routed experts, which transformers calls so everywhere."""
    return any("experts" in name.split(".") for name, _ in model.named_modules())


def refused_targets(model: Any) -> dict[str, str]:
    """Returns names that cannot be targets in a model with routed experts, with the reasons."""
    return dict(_REFUSED) if has_experts(model) else {}


def check_run_over_experts(model: Any, config: DeepSpeedConfig) -> None:
    """Refuses settings that a model with routed experts cannot keep; others pass.

    Raises:
        ValueError: naming the key.
    """
    if not has_experts(model):
        return
    if config.tp_size > 1:
        raise ValueError(
            "tensor_parallel.autotp_size must be 1 over a base with routed experts, which AutoTP "
            f"does not cut as we need it, got {config.tp_size}"
        )
    if config.run.run.deterministic:
        raise ValueError(
            "run.deterministic must be false over a base with routed experts: an expert's rows "
            "come in any number, which moves the last bits, got True"
        )
