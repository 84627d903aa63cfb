"""A base read by the threaded reader into parameters on a device, beside `megatron_tensors`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.training.formats.base_reader import read_base
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.hf_convert import megatron_tensors
from tlora_megatron.training.formats.rank_tensors import rank_tensors

FILE = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def assert_base_is_read(
    directory: Path, device: torch.device, *, tp_size: int = 1, dtype: torch.dtype = torch.float32
) -> None:
    """Reads every rank's part into memory full of NaN and compares it bit by bit."""
    spec, checkpoint = read_model_spec(directory / "config.json"), HFCheckpoint(directory)
    for tp_rank in range(tp_size):
        part: dict[str, Any] = {
            "tp_rank": tp_rank,
            "tp_size": tp_size,
            "layers": range(1, spec.num_layers),
            "with_embedding": True,
            "with_output": True,
        }
        tensors = list(rank_tensors(spec, **part))
        parameters = {
            tensor.name: torch.full(tensor.shape, float("nan"), dtype=dtype, device=device)
            for tensor in tensors
        }
        read_base(checkpoint, tensors, parameters)
        expected = dict(megatron_tensors(spec, checkpoint, **part))
        assert parameters.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(parameters[name].cpu(), value.to(dtype)), name
