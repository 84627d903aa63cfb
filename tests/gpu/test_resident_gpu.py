"""On a GPU, too, jobs that come and go leave the bits of the others alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.resident_case import Command, Resident, resident

pytestmark = pytest.mark.gpu
SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}


def commands(opened: Resident, name: str, job: str, at: int) -> list[Command]:
    document = {**opened.documents[job], "portion_tokens": 128, "max_steps": 8}
    order = {"kind": "prepare", "job": name, "body": {"document": document}}
    return [(at, order), (at, {"kind": "join", "job": name})]


def adapter(opened: Resident, name: str) -> bytes:
    return (opened.job_dir(name) / "adapter" / "adapter_model.safetensors").read_bytes()


def test_neighbours_keep_their_bits(tmp_path: Path) -> None:
    base, run = {"dtype": "bfloat16"}, {"deterministic": True}
    with resident(tmp_path, 1, {}, base_model=base, run=run, **SHAPE) as opened:
        opened.run(commands(opened, "alone", "everything", 1))
        opened.run(
            [
                *commands(opened, "first", "mlp", 1),
                *commands(opened, "beside", "everything", 2),
                *commands(opened, "behind", "outputs", 4),
                (6, {"kind": "leave", "job": "first", "body": {"save": False}}),
                *commands(opened, "last", "attention", 8),
            ]
        )
        assert adapter(opened, "beside") == adapter(opened, "alone")
