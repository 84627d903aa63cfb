"""Makes a built model rotate heads by the frequencies that its arguments ask for.

Megatron-LM's `--rope-scaling-factor` does not reach the model: `pretrain_gpt.py` builds every model
with the factor 8 (core_v0.16.1 to main), and HybridModel knows no scaling. Llama 3.2 has 32.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.frozen.rotary import inverse_frequencies

logger = logging.getLogger(__name__)

_BUILT_FACTOR = 8.0
"""Default of GPTModel's `rope_scaling_factor`, which no script changes."""
_ROUNDING = 1e-5
"""Relative; devices raise to a power in their own way."""


def set_rotary_frequencies(model: Any, spec: ModelSpec) -> None:
    """Gives a built model the rope scaling that its script has left out.

    Args:
        spec: what the arguments describe.

    Raises:
        ValueError: if the model has frequencies that nobody asked for.
    """
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None or model.position_embedding_type != "rope":
        return
    expected = inverse_frequencies(spec)
    if _equal(rotary.inv_freq, expected):
        return
    if not any(_equal(rotary.inv_freq, built) for built in _left_out(spec)):
        raise ValueError(
            f"the model's rotary frequencies must be those of --rotary-base "
            f"{spec.rope_theta:.0f} and rope scaling {spec.rope_scaling}, got {rotary.inv_freq}"
        )
    logger.warning(
        "--rope-scaling-factor %g is set in the model: the script had left it out",
        spec.rope_scaling["factor"] if spec.rope_scaling else 1,
    )
    rotary.inv_freq = expected.to(rotary.inv_freq.device)


def _left_out(spec: ModelSpec) -> list[torch.Tensor]:
    """Frequencies of scripts that ignore the factor, or all scaling."""
    if spec.rope_scaling is None:
        return []
    scaling = spec.rope_scaling | {"factor": _BUILT_FACTOR}
    return [inverse_frequencies(replace(spec, rope_scaling=s)) for s in (scaling, None)]


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found = found.detach().float().cpu()
    return found.shape == expected.shape and torch.allclose(
        found, expected, rtol=_ROUNDING, atol=0.0
    )
