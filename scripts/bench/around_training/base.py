"""Hugging Face folders of random weights, to be read as a run reads a real base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.bench.harness.arguments import REPO
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.formats.hf_convert import hf_shapes

TOKENIZER = REPO / "configs" / "quickstart" / "base"
_FILE_BYTES = 4 << 30
_STD = 0.02


def shape_of(size: str) -> dict[str, Any]:
    """A config.json by name: Llama-3.1-8B's, six layers of width 2,048, or a toy for CPUs."""
    config = json.loads((REPO / "configs" / "models" / "llama-3.1-8b.json").read_text())
    if size in ("six layers", "toy"):
        config |= {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        }
    if size == "toy":
        config |= {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
        }  # fmt: skip
    return config


def write_config(config: dict[str, Any], directory: Path) -> None:
    """Writes a base without weights: config and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, directory)
    kind = {"architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config | kind))


def write_base(size: str, directory: Path) -> int:
    """Writes config, tokenizer and bf16 weights unless they are there; returns their bytes."""
    done = directory / "complete"
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        write_config(shape_of(size) | {"torch_dtype": "bfloat16"}, directory)
        _write_weights(directory)
        done.touch()
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def warm_page_cache(directory: Path) -> None:
    """Reads every file once, so that all variants find them in memory."""
    buffer = bytearray(64 << 20)
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def base_in(folder: Path, size: str, dtype: str) -> dict[str, Any]:
    """The section `base_model` of a base of that size, which it writes into a folder."""
    write_base(size, folder)
    warm_page_cache(folder)
    return {"path": str(folder), "dtype": dtype}


def _write_weights(directory: Path) -> None:
    spec = read_model_spec(directory / "config.json")
    files = list(_files(hf_shapes(spec)))
    index: dict[str, str] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _random(shape, device) for name, shape in names.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _files(tensors: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Cuts the tensors into files of a usual size."""
    file: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in tensors.items():
        if file and size > _FILE_BYTES:
            yield file
            file, size = {}, 0
        file[name] = shape
        size += 2 * torch.Size(shape).numel()
    yield file


def _random(shape: tuple[int, ...], device: str) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, _STD).cpu()
