"""Reads and writes adapters as PEFT directories.

With `peft_config`, the only place that speaks PEFT's names (`r`, `lora_alpha`, `lora_A.weight`).
PEFT itself is not imported, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tlora_megatron.config.job import EXPERT_TARGETS, LoraSpec
from tlora_megatron.layers.slab import check_finite, factor_shape, split_name
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.atomic_directory import (
    Permit,
    always,
    readable_directory,
    replace_directory,
)
from tlora_megatron.training.formats.peft_config import (
    FUSED_PARTS,
    hf_targets,
    lora_spec,
    peft_config,
    read_peft_config,
)
from tlora_megatron.training.formats.peft_experts import (
    ExpertReader,
    expert_tensors,
    stacked_tensor,
    tensor_key,
)
from tlora_megatron.training.formats.quantised import (
    README,
    QuantisationCard,
    as_metadata,
    may_write_readme,
    read_card,
    readme,
    remove_readme,
)
from tlora_megatron.training.formats.safetensors_file import (
    PendingTensor,
    Scratch,
    holds_tensors,
    write_tensors,
)

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
_OURS = (WEIGHTS_NAME, CONFIG_NAME)
_METADATA = {"format": "pt"}

_KEY = re.compile(
    r"base_model\.model\.(?P<above>.+?)\.(?P<layer>\d+)\.(?P<below>.+)"
    r"\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
"""The second form, with the adapter's name, was written by early PEFT and by plain state dicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFile:
    """An adapter read from a PEFT directory."""

    lora: LoraSpec
    """`target_modules` in the order of the model's `peft_targets`."""
    base_model: str | None
    """The file's name of its base: a path or a hub name, not checked."""
    quantisation: QuantisationCard | None = None
    """The quantisation of the base that it was trained over here."""
    factors: dict[str, Tensor]
    """Canonical whole factors, fp32 on the CPU."""


def export_adapter(
    directory: Path,
    *,
    lora: LoraSpec,
    factors: Mapping[str, Tensor],
    model: Backbone,
    base_model: str,
    quantisation: QuantisationCard | None = None,
    dtype: torch.dtype = torch.float32,
    stacks_experts: bool = False,
) -> None:
    """Writes an adapter whose factors are at hand; see `write_adapter`.

    Args:
        factors: canonical whole factors, any device, all layers of all targets.
    """
    pending = [
        PendingTensor(name, tuple(factor.shape), partial(_on_cpu, factor), partial(_one, factor))
        for name, factor in factors.items()
    ]
    write_adapter(
        directory,
        lora=lora,
        factors=pending,
        model=model,
        base_model=base_model,
        quantisation=quantisation,
        dtype=dtype,
        stacks_experts=stacks_experts,
    )


def _on_cpu(factor: Tensor, _: Scratch) -> Tensor:
    return factor.detach().cpu().contiguous()


def _one(factor: Tensor, index: int, _: Scratch) -> Tensor:
    return factor[index].detach().cpu().contiguous()


def write_adapter(
    directory: Path,
    *,
    lora: LoraSpec,
    factors: Sequence[PendingTensor],
    model: Backbone,
    base_model: str,
    quantisation: QuantisationCard | None = None,
    dtype: torch.dtype = torch.float32,
    stacks_experts: bool = False,
    permit: Permit = always,
    durable: bool = True,
) -> int:
    """Writes an adapter that PEFT and vLLM load; fused targets become q/k/v, gate/up and so on.

    A fused linear's B is cut by rows and its one A is repeated, which computes the same. Both files
    are replaced in one step (see `replace_directory`), so the previous adapter survives a crash or
    a full disk. Others' files in the directory stay, and an adapter that is there already is left
    alone, whatever name of its base somebody has put into its configuration.

    Args:
        directory: missing, empty, or holding an earlier adapter.
        stacks_experts: routed experts of a layer become one tensor, which PEFT does not load.
        durable: see `replace_directory`.

    Raises:
        ValueError: if factors are missing, not finite or of the wrong shape, if two targets hold
            the same module, or if the directory holds something else.
    """
    directory = Path(directory)
    modules = hf_targets(lora.target_modules)
    _check_factors({factor.name: factor.shape for factor in factors}, model, lora)
    tensors = _peft_tensors(factors, model, stacks_experts=stacks_experts)
    config = peft_config(lora, modules, base_model, model)
    weights, metadata = directory / WEIGHTS_NAME, _METADATA | as_metadata(quantisation)
    if _holds_config(directory, config) and holds_tensors(
        weights, tensors, metadata=metadata, dtype=dtype
    ):
        return 0
    check_adapter_directory(directory)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    tells = quantisation is not None and may_write_readme(directory)
    permit()
    if quantisation is None:
        remove_readme(directory)
    names = (README, *_OURS) if tells else _OURS
    with replace_directory(directory, names, permit, durable=durable) as incoming:
        if quantisation is not None and tells:
            (incoming / README).write_text(readme(base_model, quantisation), encoding="utf-8")
        (incoming / CONFIG_NAME).write_text(text)
        size_bytes = write_tensors(incoming / WEIGHTS_NAME, tensors, metadata=metadata, dtype=dtype)
    return size_bytes + len(text)


def check_adapter_directory(directory: Path) -> None:
    """Refuses a directory that an adapter must not be written to.

    Raises:
        ValueError: if it is a link, or holds something but no adapter.
    """
    if directory.is_symlink():
        raise ValueError(
            f"adapter directory must be no symbolic link, got {directory} to "
            f"{directory.readlink()}; move it away"
        )
    if not directory.exists():
        return
    is_ours = directory.is_dir() and (
        any((directory / name).is_file() for name in _OURS) or not any(directory.iterdir())
    )
    if not is_ours:
        raise ValueError(f"adapter directory must be empty or hold an adapter, got {directory}")


def _holds_config(directory: Path, config: Mapping[str, Any]) -> bool:
    """True if a directory's configuration says the same; its base may have got another name."""
    try:
        stored = json.loads((directory / CONFIG_NAME).read_text())
    except (OSError, ValueError):
        return False
    names = config.keys() - {"base_model_name_or_path"}
    return isinstance(stored, dict) and all(
        name in stored and stored[name] == config[name] for name in names
    )


def load_adapter(directory: Path, *, model: Backbone) -> AdapterFile:
    """Reads and checks a PEFT LoRA adapter; its targets are those that have tensors.

    Raises:
        ValueError: naming the directory and what does not fit: files missing or corrupt, a field
            that changes what LoRA computes, tensors unknown, missing, misshapen or not finite.
    """
    folder = readable_directory(Path(directory))
    try:
        config = read_peft_config(folder / CONFIG_NAME)
        factors = _read_factors(folder, model)
        present = {split_name(name)[1] for name in factors}
        lora = lora_spec(config, present, model)
        _check_factors({name: factor.shape for name, factor in factors.items()}, model, lora)
        check_finite(factors)
    except ValueError as error:
        raise ValueError(f"adapter {directory}: {error}") from error
    base_model = config.get("base_model_name_or_path")
    card = read_card(folder / WEIGHTS_NAME)
    return AdapterFile(lora=lora, base_model=base_model, quantisation=card, factors=factors)


def stored_dtype(directory: Path) -> torch.dtype:
    """Returns the type of an adapter's tensors in its files; of several, that of the first."""
    with safe_open(readable_directory(directory) / WEIGHTS_NAME, "pt") as tensors:
        return tensors.get_tensor(sorted(tensors.keys())[0]).dtype


def _peft_tensors(
    factors: Sequence[PendingTensor], model: Backbone, *, stacks_experts: bool
) -> list[PendingTensor]:
    """Tensors of Hugging Face modules only: a fused B cut by rows, its A repeated."""
    tensors: list[PendingTensor] = []
    for factor in factors:
        layer, target, side = split_name(factor.name)
        begin, (rows, columns) = 0, factor.shape[-2:]
        for part in FUSED_PARTS.get(target, (target,)):
            if side == "lora_b":
                rows = model.target_shape(part)[0]
            held = slice(begin, begin + rows)
            if part in EXPERT_TARGETS and isinstance(model, ModelSpec):
                if stacks_experts:
                    tensors.append(stacked_tensor(factor, part, held, model))
                else:
                    tensors += expert_tensors(factor, part, held, model)
            else:
                key = tensor_key(model.module_path(layer, part), side)
                read = partial(_rows, factor, held)
                tensors.append(PendingTensor(key, (rows, columns), read))
            begin += rows if side == "lora_b" else 0
    return tensors


def _rows(factor: PendingTensor, rows: slice, scratch: Scratch) -> Tensor:
    return factor.read(scratch)[rows]


def _factor_name(key: str, targets: Mapping[str, str]) -> str:
    """Canonical name of a PEFT tensor; `targets` are those of layer 0 by their module paths."""
    match = _KEY.fullmatch(key)
    target = match and targets.get(f"{match['above']}.0.{match['below']}")
    if match is None or target is None:
        raise ValueError(
            f"tensors must be lora_A or lora_B of a decoder layer's "
            f"{', '.join(targets.values())}, got {key!r}"
        )
    return f"layers.{int(match['layer'])}.{target}.lora_{match['side'].lower()}"


def _read_factors(folder: Path, model: Backbone) -> dict[str, Tensor]:
    """Canonical factors in fp32; only names and types are checked."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        if (folder / PICKLE_NAME).exists():
            raise ValueError(f"weights must be safetensors, got {PICKLE_NAME} (pickle)")
        raise ValueError(f"directory must hold {WEIGHTS_NAME}, got none")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{WEIGHTS_NAME} must be a whole safetensors file, got {error}") from error
    targets = {model.module_path(0, target): target for target in model.peft_targets}
    factors: dict[str, Tensor] = {}
    of_experts = ExpertReader(model if isinstance(model, ModelSpec) else None)
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is not None and of_experts.takes(match, key, tensor):
            continue
        name = _factor_name(key, targets)
        if name in factors:
            raise ValueError(f"{name} must be stored once, got a second one under {key!r}")
        if not tensor.is_floating_point():
            raise ValueError(f"{key} must be floating point, got {tensor.dtype}")
        factors[name] = tensor.to(torch.float32)
    factors |= of_experts.factors()
    if not factors:
        raise ValueError(f"{WEIGHTS_NAME} must hold LoRA tensors, got none")
    return factors


def _check_factors(shapes: Mapping[str, Sequence[int]], model: Backbone, lora: LoraSpec) -> None:
    """Exactly an A and a B for every target of every layer, each of its shape."""
    num_layers, targets = model.num_layers, lora.target_modules
    expected = {
        f"layers.{layer}.{target}.{side}"
        for layer in range(num_layers)
        for target in targets
        for side in ("lora_a", "lora_b")
    }
    for name in sorted(shapes.keys() - expected):
        raise ValueError(
            f"factors must be of {', '.join(targets)} in layers 0 to {num_layers - 1}, got {name}"
        )
    missing = sorted(expected - shapes.keys())
    if missing:
        raise ValueError(
            f"factors must cover {', '.join(targets)} in all {num_layers} layers, "
            f"got none for {missing[0]} ({len(missing)} missing)"
        )
    for name, shape in shapes.items():
        wanted = factor_shape(model, name, lora)
        if tuple(shape) != wanted:
            raise ValueError(f"{name} must have shape {list(wanted)}, got {list(shape)}")
