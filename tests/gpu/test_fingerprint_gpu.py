"""Models on a GPU reproduce their base's fingerprint: fp32, bf16, Transformer Engine, FP8."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.launch import REPO, python
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.formats.fingerprint import make_fingerprint, write_fingerprint
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
from tlora_megatron.training.formats.hf_convert import hf_shapes

WORKER = REPO / "tests" / "distributed" / "fingerprint_worker.py"
QUICKSTART = REPO / "configs" / "quickstart" / "base"
LOCAL = [
    f"engine={engine},dtype={d}" for engine in ("own", "built") for d in ("float32", "bfloat16")
]
TE = [
    *("engine=te,dtype=float32", "engine=te,dtype=bfloat16"),
    *(f"engine=te,dtype=bfloat16,fp8={recipe}" for recipe in ("tensorwise", "delayed")),
]
WRONG = "dtype=bfloat16,wrong=--rotary-base 1000000"
WIDE = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 2816,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def cases() -> list[str]:
    """Returns the cases that this machine can run."""
    te = importlib.util.find_spec("transformer_engine") is not None
    return [*LOCAL, *(TE if te else []), WRONG]


def errors_of(folder: Path) -> dict[str, float]:
    """Errors of all cases over a base whose fingerprint is taken here, on the CPU and the GPU."""
    spec, source = read_model_spec(folder / "config.json"), HFCheckpoint(folder)
    taken = [
        make_fingerprint(spec, source, dtype=torch.float32, device=torch.device(device))
        for device in ("cpu", "cuda")
    ]
    assert taken[1].log_probs == pytest.approx(taken[0].log_probs, abs=1e-2)
    write_fingerprint(folder, taken[0])
    python(WORKER, folder, folder / "errors.json", *cases())
    found: dict[str, float] = json.loads((folder / "errors.json").read_text())
    return found


def make_base(folder: Path, kind: str) -> Path:
    """The quickstart's base, or one of 100 million drawn parameters with steep attention."""
    folder.mkdir()
    if kind == "trained":
        for file in QUICKSTART.iterdir():
            (folder / file.name).symlink_to(file)
        return folder
    (folder / "config.json").write_text(json.dumps(WIDE))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 0.05
        for name, shape in hf_shapes(read_model_spec(folder / "config.json")).items()
    }
    save_file({name: x.bfloat16() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["trained", "wide"])
def test_right_models_are_accepted_and_a_wrong_one_is_not(kind: str, tmp_path: Path) -> None:
    errors = errors_of(make_base(tmp_path / kind, kind))
    assert {case for case, error in errors.items() if error < 0} == {WRONG}
