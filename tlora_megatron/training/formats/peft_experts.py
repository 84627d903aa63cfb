"""Adapters on routed experts in PEFT's files: one tensor an expert, or all of a layer in one.

We write one tensor an expert, which PEFT 0.21 joins when it loads them, and which transformers 4
and vLLM know; where all experts of a layer share a factor, on request the form in which vLLM
(`enable_moe_shared_loras`) and SGLang keep it once:

    ...experts.w1.lora_A.weight          [1, r, H]    w1 is gate, w3 up, w2 down
    ...experts.w1.lora_B.weight          [E, I, r]
    ...experts.w2.lora_A.weight          [E, r, I]
    ...experts.w2.lora_B.weight          [1, H, r]

We read both, and the one that PEFT itself saves of `target_parameters`:

    ...experts.base_layer.lora_A.weight  [E r, H]     gate_up: A is expert-major, shared by both
    ...experts.base_layer.lora_B.weight  [2 I, r E]   B is expert-minor
    ...experts.lora_A.weight             [E r, I]     down; gate_up, too, where it is alone
    ...experts.lora_B.weight             [H, r E]

Shapes: E experts, r rank, H hidden features, I features inside an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.config.job import EXPERT_TARGETS
from tlora_megatron.layers.slab import split_name
from tlora_megatron.model.spec import ExpertPart, ExpertsSpec, ModelSpec
from tlora_megatron.training.formats.safetensors_file import PendingTensor, Scratch

GATE, UP, DOWN = EXPERT_TARGETS
_PARTS: dict[str, ExpertPart] = {GATE: "gate_proj", UP: "up_proj", DOWN: "down_proj"}
_STACKED = {GATE: "w1", UP: "w3", DOWN: "w2"}
_ALL = -1
"""In the place of an expert's number, for a tensor of all of them."""


class _Place(NamedTuple):
    """What one tensor of a file is of."""

    target: str
    """`fused` for all experts' tensors of PEFT's own form."""
    expert: int


def expert_tensors(
    factor: PendingTensor, target: str, rows: slice, model: ModelSpec
) -> Iterator[PendingTensor]:
    """Yields one target's tensors of a file, one an expert: the same of each where they share it.

    Args:
        factor: canonical, of the target or of a fused one that holds it.
        rows: those of each expert's matrix that are the target's.
    """
    (layer, _, side), experts = split_name(factor.name), model.experts
    assert experts is not None, "the factor is of routed experts"
    shape = (rows.stop - rows.start, factor.shape[-1])
    for expert in range(experts.num_experts):
        key = tensor_key(f"model.layers.{layer}.{_module(experts, expert, target)}", side)
        yield PendingTensor(key, shape, partial(_read_rows, factor, expert, rows))


def tensor_key(module: str, side: str) -> str:
    """Returns PEFT's name of a module's factor `lora_a` or `lora_b`."""
    return f"base_model.model.{module}.lora_{side[-1].upper()}.weight"


def _read_rows(factor: PendingTensor, expert: int, rows: slice, scratch: Scratch) -> Tensor:
    if len(factor.shape) == 2:
        return factor.read(scratch)[rows].contiguous()
    assert factor.read_one is not None, "checked when the file was planned"
    return factor.read_one(expert, scratch)[rows].contiguous()


def stacked_tensor(
    factor: PendingTensor, target: str, rows: slice, model: ModelSpec
) -> PendingTensor:
    """Returns one target's tensor of all experts, as vLLM and SGLang name it."""
    (layer, _, side), experts = split_name(factor.name), model.experts
    assert experts is not None, "the factor is of routed experts"
    count = factor.shape[0] if len(factor.shape) == 3 else 1
    shape = (count, rows.stop - rows.start, factor.shape[-1])
    key = tensor_key(f"model.layers.{layer}.{_folder(experts)}.{_STACKED[target]}", side)
    return PendingTensor(key, shape, partial(_read_stacked, factor, rows, shape))


def _read_stacked(
    factor: PendingTensor, rows: slice, shape: tuple[int, ...], scratch: Scratch
) -> Tensor:
    return factor.read(scratch)[..., rows, :].reshape(shape)


def common_matrix(factor_ERC: Tensor, what: str) -> Tensor:
    """Returns the one matrix of a factor that all experts share.

    Raises:
        ValueError: naming the first expert that has another one.
    """
    for expert, matrix in enumerate(factor_ERC):
        if not torch.equal(matrix, factor_ERC[0]):
            raise ValueError(
                f"{what} must be the same for all experts to be shared (lora.expert_sharing: "
                f"outer), got another one for expert {expert}"
            )
    return factor_ERC[0]


def module_names(model: ModelSpec) -> dict[str, str]:
    """Returns the last part of the experts' names by target: of gate_proj in Mixtral `w1`."""
    experts = model.experts
    if experts is None:
        return {}
    return {target: _module(experts, 0, target).rpartition(".")[2] for target in _PARTS}


def _module(experts: ExpertsSpec, expert: int, target: str) -> str:
    return experts.stored(expert, _PARTS[target]).removesuffix(".weight")


def _folder(experts: ExpertsSpec) -> str:
    return _module(experts, 0, GATE).rsplit(".", 2)[0]


class ExpertReader:
    """Collects the tensors of routed experts while a file is read.

    Args:
        model: None for a backbone without routed experts.
    """

    def __init__(self, model: ModelSpec | None) -> None:
        experts = None if model is None else model.experts
        self._hidden_size = 0 if model is None else model.hidden_size
        self._ffn_size = 0 if experts is None else experts.ffn_size
        self._num_experts = 0 if experts is None else experts.num_experts
        self._found: dict[str, dict[int, Tensor]] = {}
        """By canonical name, each expert's; fused ones as expert 0, those of all as `_ALL`."""
        self._places: dict[str, _Place] = {}
        if experts is not None:
            for expert in range(experts.num_experts):
                for target in EXPERT_TARGETS:
                    self._places[_module(experts, expert, target)] = _Place(target, expert)
            for folder in ("mlp.experts", _folder(experts)):
                for target, name in _STACKED.items():
                    self._places[f"{folder}.{name}"] = _Place(target, _ALL)
            self._places["mlp.experts"] = _Place("fused", 0)  # in Mixtral's modules, too
            self._places["mlp.experts.base_layer"] = _Place("fused.base_layer", 0)

    def takes(self, match: re.Match[str], key: str, tensor: Tensor) -> bool:
        """Keeps a tensor if it is of routed experts; returns False if not.

        Args:
            match: of the key, with the groups above, layer, below and side.
        """
        place = self._places.get(match["below"])
        if place is None or match["above"] != "model.layers":
            return False
        name = f"layers.{int(match['layer'])}.{place.target}.lora_{match['side'].lower()}"
        found = self._found.setdefault(name, {})
        if place.expert in found:
            of = "" if place.expert == _ALL else f" of expert {place.expert}"
            raise ValueError(f"{name}{of} must be stored once, got a second one under {key!r}")
        found[place.expert] = tensor.to(torch.float32)
        return True

    def factors(self) -> dict[str, Tensor]:
        """Returns the canonical factors.

        Raises:
            ValueError: if experts are missing, or a tensor has a shape that is no adapter's.
        """
        if not self._found:
            return {}
        fused = {name for name in self._found if ".fused" in name}
        if fused and len(fused) < len(self._found):
            raise ValueError(
                "tensors of routed experts must be one an expert or one a layer, got both"
            )
        if fused:
            return self._split({name: self._found[name][0] for name in fused})
        return {name: self._stacked(name, found) for name, found in self._found.items()}

    def _stacked(self, name: str, found: Mapping[int, Tensor]) -> Tensor:
        if _ALL in found:
            if len(found) > 1:
                raise ValueError(f"{name} must be one tensor an expert or one of all, got both")
            is_shared = found[_ALL].ndim == 3 and len(found[_ALL]) == 1
            return found[_ALL].expand(self._num_experts, -1, -1) if is_shared else found[_ALL]
        for expert in range(self._num_experts):
            if expert not in found:
                raise ValueError(f"{name} must be there of every expert, got none of {expert}")
            if found[expert].shape != found[0].shape:
                raise ValueError(
                    f"{name} must have one shape for all experts, got {list(found[0].shape)} of "
                    f"expert 0 and {list(found[expert].shape)} of {expert}"
                )
        return torch.stack([found[expert] for expert in sorted(found)])

    def _split(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Takes PEFT's own form apart: gate and up get their rows of B, and the same A."""
        count, hidden, ffn = self._num_experts, self._hidden_size, self._ffn_size
        for size, what in ((2 * ffn, "gate_up_proj"), (ffn, "down_proj")):
            if size == hidden:
                raise ValueError(
                    f"adapters on routed experts must be stored one tensor an expert over a base "
                    f"whose {what} is square: versions of PEFT exchange A and B there, got one "
                    f"tensor a layer"
                )
        factors: dict[str, Tensor] = {}
        for name in sorted(found):
            if not name.endswith(".lora_a"):
                continue
            stem = name.removesuffix(".lora_a")
            layer = stem.split(".fused")[0]
            a, b = found[name], found.get(f"{stem}.lora_b")
            is_down = a.shape[1] == ffn and b is not None and b.shape[0] == hidden
            is_gate_up = a.shape[1] == hidden and b is not None and b.shape[0] == 2 * ffn
            if b is None or not (is_down or is_gate_up) or a.shape[0] % count:
                got = None if b is None else list(b.shape)
                raise ValueError(
                    f"{name} and lora_b must be [experts rank, in] and [out, rank experts], got "
                    f"{list(a.shape)} and {got}"
                )
            lora_a = a.view(count, -1, a.shape[1])
            lora_b = b.view(b.shape[0], -1, count).permute(2, 0, 1)
            rows = {DOWN: slice(0, hidden)} if is_down else {
                GATE: slice(0, ffn), UP: slice(ffn, 2 * ffn)
            }  # fmt: skip
            for target, part in rows.items():
                factors[f"{layer}.{target}.lora_a"] = lora_a
                factors[f"{layer}.{target}.lora_b"] = lora_b[:, part].contiguous()
        return factors
