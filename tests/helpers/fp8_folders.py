"""Tiny folders in the formats in which FP8 models are published, and their decoder.

Nothing here is shared with the package: codes are looked up in a table made from the definition of
e4m3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.tiny_models import make_tiny_model

FILE = "model.safetensors"
Format = Literal["channel", "tensor", "block", "fp8", "fp8_bf16", "ue8m0"]
FORMATS: tuple[Format, ...] = ("channel", "tensor", "block", "fp8", "fp8_bf16", "ue8m0")
SHAPE = {"hidden_size": 192, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 512}
"""Blocks of 128: the last of the hidden size is a half, nothing else has a rest."""
LINEARS = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
)


def _table() -> Tensor:
    """The value of each of the 256 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        size = float("nan") if code & 127 == 127 else size
        values.append(-size if code > 127 else size)
    return torch.tensor(values)


TABLE = _table()


def make_fp8_folder(root: Path, kind: Format, **options: Any) -> Path:
    """A folder of two layers whose linears hold random codes; the last layer's down is wide."""
    shape: dict[str, Any] = SHAPE | {"num_key_value_heads": 2, "num_hidden_layers": 2} | options
    return put_codes(make_tiny_model(root, "llama", vocab_size=127, **shape), kind)


def put_codes(directory: Path, kind: Format) -> Path:
    """Turns a tiny folder of two layers into a published one; see `make_fp8_folder`."""
    tensors: dict[str, Tensor] = dict(load_file(directory / FILE))
    generator = torch.Generator().manual_seed(5)
    for name in wide_names(tensors):
        tensors |= _coded(name, tensors[name].shape, kind, generator)
    save_file(tensors, directory / FILE)
    set_quantization(directory, statement(kind))
    return directory


def wide_names(tensors: dict[str, Tensor]) -> list[str]:
    left = "model.layers.1.mlp.down_proj"
    names = [f"model.layers.{layer}.{linear}" for layer in range(2) for linear in LINEARS]
    return [f"{name}.weight" for name in names if name != left and f"{name}.weight" in tensors]


def statement(kind: Format) -> dict[str, Any]:
    left = ["lm_head", "model.layers.1.mlp.down_proj"]
    if kind in ("fp8", "fp8_bf16", "ue8m0"):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": left,
        } | ({"scale_fmt": "ue8m0"} if kind == "ue8m0" else {})
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**common, "strategy": kind, "dynamic": False, "observer": "minmax"}
    inputs: dict[str, Any] = {**common, "strategy": "token", "dynamic": True}
    if kind == "block":
        weights["block_structure"] = [128, 128]
        inputs |= {"strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": [left[0], "re:.*layers\\.1\\.mlp\\.down.*"],
        "config_groups": {"group_0": group},
    }


def set_quantization(directory: Path, value: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": value}))


def _coded(
    name: str, shape: torch.Size, kind: Format, generator: torch.Generator
) -> dict[str, Tensor]:
    codes = torch.randint(0, 127, tuple(shape), generator=generator)
    codes += 128 * torch.randint(0, 2, tuple(shape), generator=generator)
    rows, columns = shape
    sizes: dict[str, tuple[int, ...]] = {"channel": (rows, 1), "tensor": (1,)}
    size = sizes.get(kind, (-(-rows // 128), -(-columns // 128)))
    scales = torch.rand(size, generator=generator) * 1e-3 + 1e-4
    if kind == "fp8_bf16":
        scales = scales.bfloat16()
    if kind == "ue8m0":
        bits = torch.randint(100, 120, size, generator=generator, dtype=torch.uint8)
        scales = bits.view(torch.float8_e8m0fnu)
    suffix = "weight_scale_inv" if kind in ("fp8", "fp8_bf16", "ue8m0") else "weight_scale"
    weight = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    return {name: weight, f"{name.removesuffix('weight')}{suffix}": scales}


def decoded(directory: Path) -> dict[str, Tensor]:
    tensors = dict(load_file(directory / FILE))
    return {
        name: value.values * value.scales if isinstance(value, Dequantized) else value
        for name, value in _read(tensors).items()
    }


class Dequantized(NamedTuple):
    """The values of a weight's codes, and the scale of each of them, fp32."""

    values: Tensor
    scales: Tensor


def dequantized(directory: Path) -> dict[str, Dequantized]:
    found = _read(dict(load_file(directory / FILE)))
    return {name: value for name, value in found.items() if isinstance(value, Dequantized)}


def _read(tensors: dict[str, Tensor]) -> dict[str, Tensor | Dequantized]:
    return {
        name: _decode(name, tensors) if value.dtype == torch.float8_e4m3fn else value
        for name, value in tensors.items()
        if "_scale" not in name
    }


def _decode(name: str, tensors: dict[str, Tensor]) -> Dequantized:
    values = TABLE[tensors[name].view(torch.uint8).int()]
    stem = name.removesuffix("weight")
    scales = tensors.get(f"{stem}weight_scale", tensors.get(f"{stem}weight_scale_inv"))
    assert scales is not None, name
    if scales.dtype == torch.float8_e8m0fnu:
        scales = 2.0 ** (scales.view(torch.uint8).float() - 127)
    scales = scales.float()
    if (scales.dim() == 2 and scales.shape[1] > 1) or "inv" in "".join(tensors):
        scales = scales.repeat_interleave(128, 0)[: len(values)]
        scales = scales.repeat_interleave(128, 1)[:, : values.shape[1]]
    return Dequantized(values, scales.expand_as(values))
