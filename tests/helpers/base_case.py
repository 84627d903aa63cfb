"""A rank's part of a base: read tensor by tensor, and by the threaded reader beside that."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.base_reader import read_base
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, WeightSource
from tlora_megatron.training.formats.hf_convert import assemble
from tlora_megatron.training.formats.rank_tensors import RankTensor, rank_tensors

FILE = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def parts_of(
    spec: ModelSpec, tp_rank: int, tp_size: int, layers: range | None = None
) -> list[RankTensor]:
    """The tensors of a rank that holds embedding, output and layers; None = all of them."""
    part = rank_tensors(
        spec, tp_rank=tp_rank, tp_size=tp_size, layers=layers or range(spec.num_layers),
        with_embedding=True, with_output=True,
    )  # fmt: skip
    return list(part)


def converted(
    spec: ModelSpec, source: WeightSource, tp_rank: int, tp_size: int
) -> dict[str, Tensor]:
    """The values of `parts_of`, one after the other."""
    return {part.name: assemble(part, source) for part in parts_of(spec, tp_rank, tp_size)}


def assert_base_is_read(
    directory: Path, device: torch.device, *, tp_size: int = 1, dtype: torch.dtype = torch.float32
) -> None:
    """Reads every rank's part into memory full of NaN and compares it bit by bit."""
    spec, checkpoint = read_model_spec(directory / "config.json"), HFCheckpoint(directory)
    for tp_rank in range(tp_size):
        tensors = parts_of(spec, tp_rank, tp_size, range(1, spec.num_layers))
        parameters = {
            tensor.name: torch.full(tensor.shape, float("nan"), dtype=dtype, device=device)
            for tensor in tensors
        }
        read_base(checkpoint, tensors, parameters)
        for tensor in tensors:
            value = assemble(tensor, checkpoint).to(dtype)
            assert torch.equal(parameters[tensor.name].cpu(), value), tensor.name
