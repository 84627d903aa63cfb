"""Holds the model that Megatron-LM built and loaded to the fingerprint beside its checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from tlora_megatron.integrations.megatron.built.model import language_models
from tlora_megatron.training.fingerprint.check import Precision

_TRACKER = "latest_checkpointed_iteration.txt"
_QUANTIZED = ("fp8", "fp4")


def checkpoint_of_convert(args: argparse.Namespace) -> Path | None:
    """Returns the folder that `tlora convert` wrote and Megatron is about to load; None = another.

    Training that goes on from such a folder may save into it: then its tracker names an iteration,
    whose weights are no longer those of the fingerprint.
    """
    from megatron.training.checkpointing import checkpoint_exists

    sources = (args.load, args.pretrained_checkpoint)
    folder = next((Path(source) for source in sources if checkpoint_exists(source)), None)
    if folder is None or getattr(args, "ckpt_step", None) is not None:
        return None
    tracker = folder / _TRACKER
    return folder if tracker.is_file() and tracker.read_text().strip() == "release" else None


def precision_of(args: argparse.Namespace) -> Precision:
    """Returns the precision of the base's weights."""
    if getattr(args, "fp8_param_gather", False) or getattr(args, "fp4_param_gather", False):
        return "fp8"
    return "bfloat16" if args.bf16 else "float32"


@contextmanager
def without_quantization(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Runs the models in the precision of their weights: without the FP8 and FP4 of activations.

    What is asked is which model it is, and that shows the better the less is rounded. The scales
    of delayed scaling, which training begins with, stay as they are.
    """
    given = [
        (config, name, getattr(config, name))
        for config in _configs(chunks)
        for name in _QUANTIZED
        if getattr(config, name, None)
    ]
    for config, name, _ in given:
        setattr(config, name, None)
    try:
        yield
    finally:
        for config, name, value in given:
            setattr(config, name, value)


def _configs(chunks: Sequence[nn.Module]) -> list[Any]:
    """Every configuration that a module of the models asks."""
    modules = (module for model in language_models(chunks) for module in model.modules())
    found = (getattr(module, "config", None) for module in modules)
    return list({id(config): config for config in found if config is not None}.values())
