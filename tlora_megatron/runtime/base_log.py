"""Tells how a quantised base is held, how large it is, and what its linears lose."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from tlora_megatron.model.quantisation import BaseQuantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.hf_convert import Rounding

logger = logging.getLogger(__name__)

EXPECTED = 0.0265
"""|D - W| / |W| of normal weights; e4m3 has three bits of mantissa."""
_OUTLIER = 1.25
"""Times `EXPECTED`."""


def log_base(
    quantisation: BaseQuantisation | None, spec: ModelSpec, model: Any, rounding: Rounding
) -> None:
    """Logs a quantised base on the first process; collective over the world.

    Args:
        model: this rank's part of the base.
        rounding: what was lost in reading it.
    """
    if quantisation is None:
        return
    first = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    mine = {_global_name(name, first): error for name, error in rounding.relative().items()}
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (num_bytes, mine))
    if dist.get_rank() != 0:
        return
    logger.info(
        "base: %s; at most %.2f GiB of weights on a rank",
        quantisation.describe(spec), max(size for size, _ in everyone) / 2**30,
    )  # fmt: skip
    if quantisation.published is not None and quantisation.published.rounds_scales:
        logger.warning(
            "the base's scales are powers of two (ue8m0), and servers round activations' scales to "
            "such, too; here they are not rounded"
        )
    lost: dict[str, float] = {}
    for _, found in everyone:
        for name, error in found.items():
            lost[name] = max(error, lost.get(name, 0.0))
    _log_losses(lost)


def _global_name(name: str, first_layer: int) -> str:
    """A stage counts its layers from 0."""
    before, _, after = name.removeprefix("decoder.layers.").partition(".")
    return f"layers.{int(before) + first_layer}.{after.removesuffix('.weight')}"


def _log_losses(lost: Mapping[str, float]) -> None:
    if not lost:
        return
    worst = max(lost, key=lambda name: lost[name])
    logger.info(
        "its weights lose |D - W| / |W| = %.4f to %.4f (about %.3f is normal), most in %s",
        min(lost.values()), lost[worst], EXPECTED, worst,
    )  # fmt: skip
    for name, error in lost.items():
        logger.debug("%s: |D - W| / |W| = %.4f", name, error)
    if found := outliers(lost):
        logger.warning(
            "these lose more than normal weights do; base_model.unquantised may name them: %s",
            ", ".join(f"{name} ({lost[name]:.4f})" for name in found),
        )


def outliers(lost: Mapping[str, float]) -> list[str]:
    """Names the weights that lose more than normal ones do."""
    return [name for name, error in lost.items() if error > EXPECTED * _OUTLIER]
