"""The section `base_model` of a configuration: where the frozen base is, and how it is held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron.config.job import HF_TARGETS
from tlora_megatron.config.reader import ConfigError, must, nearest, read_spec
from tlora_megatron.config.rules import existing_file, resolve
from tlora_megatron.config.schema import EMBEDDING, HEAD, BaseModelSpec

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that are one GEMM."""


def read_base_model(raw: Any, folder: Path) -> BaseModelSpec:
    """Reads and checks the section.

    Args:
        folder: where relative paths start.

    Raises:
        ConfigError: for the first mistake.
    """
    if raw is None:
        raise ConfigError(
            "base_model must be given: {path: DIR}, or {config: FILE, random_init: true}"
        )
    if isinstance(raw, str):
        remedy = "names of bases are for services over HTTP; here give {path: DIR}, its folder"
        raise must("base_model", "be a mapping", raw, remedy)
    base = read_spec(BaseModelSpec, raw, "base_model")
    check_unquantised(base.unquantised)
    if (base.path is None) == (base.config is None):
        got = "neither" if base.path is None else "both"
        raise ConfigError(f"base_model must set exactly one of path and config, got {got}")
    if base.path is not None:
        if base.random_init:
            raise must("base_model.random_init", "be false with path", True, "give config instead")
        path = resolve(base.path, folder)
        if not Path(path).is_dir():
            remedy = "names on the Hugging Face hub are not downloaded: hf download NAME first"
            raise must("base_model.path", "be an existing directory", path, remedy)
        return replace(base, path=path)
    if not base.random_init:
        raise must("base_model.random_init", "be true with config", False, "or give path")
    config = existing_file(base.config or "", folder, "base_model.config")
    return replace(base, config=config)


def refuse_quantization(base: BaseModelSpec, where: str) -> None:
    """Refuses FP8 where a trainer of somebody else's holds the base.

    Args:
        where: the trainer, such as `DeepSpeed`.

    Raises:
        ConfigError: if `base_model.quantization` is set.
    """
    if base.quantization is not None:
        remedy = "`tlora train` has it; or delete the key"
        raise must("base_model.quantization", f"be null under {where}", base.quantization, remedy)


def ignored_base_settings(base: BaseModelSpec) -> list[str]:
    """One sentence for each setting of the base that has no effect."""
    found = []
    if base.seed and not base.random_init:
        found.append("base_model.seed has no effect without random_init")
    if base.quantization is None and set(base.unquantised) != {EMBEDDING, HEAD}:
        found.append("base_model.unquantised has no effect without quantization")
    return found


def check_unquantised(names: Sequence[str]) -> None:
    """Refuses a list of unquantised linears that names something else, or a part of one GEMM.

    Raises:
        ConfigError: naming the entry.
    """
    for name in (EMBEDDING, HEAD):
        if name not in names:
            rule = f"hold {name}, which has no FP8 kernels"
            raise must("base_model.unquantised", rule, list(names))
    for index, name in enumerate(names):
        head, target = _split(name)
        if (head is None and target in (EMBEDDING, HEAD)) or target in (None, *HF_TARGETS):
            continue
        valid = [EMBEDDING, HEAD, *HF_TARGETS]
        rule = f"be one of {', '.join(valid)}, layers.N or layers.N.TARGET"
        raise must(f"base_model.unquantised[{index}]", rule, name, nearest(target, valid))
    for layer in dict.fromkeys(_split(name)[0] for name in names):
        held = {target for name in names for at, target in [_split(name)] if at == layer}
        for fused in _FUSED:
            if held & set(fused) and not held >= set(fused):
                rule = f"name {', '.join(fused)} together: they are one GEMM"
                raise must("base_model.unquantised", rule, list(names))


def _split(name: str) -> tuple[int | None, str | None]:
    """The layer and the target that an entry names; None stands for all of them."""
    match = re.fullmatch(r"layers\.(\d+)(?:\.(.+))?", name)
    return (int(match[1]), match[2]) if match else (None, name)


def is_unquantised(names: Sequence[str], layer: int, target: str) -> bool:
    """True if the list leaves a linear of a layer as it is."""
    return any(_split(name) in ((None, target), (layer, target), (layer, None)) for name in names)
