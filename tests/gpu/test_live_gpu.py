"""On a GPU, too, jobs and clients that come and go leave the bits of the others alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.test_driven import check_undisturbed, drive
from tests.helpers.resident_case import Command, Resident, resident
from tests.helpers.tiny_models import GPU_SHAPE, make_tiny_model
from tlora_megatron.training.resident.saved_states import LockedRing

pytestmark = pytest.mark.gpu


def commands(opened: Resident, name: str, job: str, at: int) -> list[Command]:
    return opened.coming(at, name, job, portion_tokens=128, max_steps=8)


def adapter(opened: Resident, name: str) -> bytes:
    return (opened.job_dir(name) / "adapter" / "adapter_model.safetensors").read_bytes()


def test_neighbours_keep_their_bits(tmp_path: Path) -> None:
    base, run = {"dtype": "bfloat16"}, {"deterministic": True}
    with resident(tmp_path, 1, {}, base_model=base, run=run, **GPU_SHAPE) as opened:
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


def _fill(values: torch.Tensor, room: torch.Tensor) -> None:
    room.copy_(values)


def test_ring_brings_values_of_any_size_to_the_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    ring = LockedRing(stream, torch.full((2, 1000), torch.nan, pin_memory=True))
    values = [torch.rand(numel) for numel in (7, 12_300, 63_936)]
    targets = [torch.full_like(v, torch.nan, device=device) for v in values]
    stream.wait_stream(torch.cuda.current_stream(device))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ring.copy, targets, [partial(_fill, value) for value in values]))
    stream.synchronize()
    for target, expected in zip(targets, values, strict=True):
        assert torch.equal(target.cpu(), expected)


def test_neighbours_and_errors_change_no_bit(tmp_path: Path) -> None:
    base = make_tiny_model(
        tmp_path / "base", "llama", vocab_size=264, dtype=torch.bfloat16, **GPU_SHAPE
    )
    more = {
        "base_model": {"path": str(base), "dtype": "bfloat16"},
        "run": {"micro_batch_tokens": 512, "deterministic": True},
    }
    check_undisturbed(drive("layout", tmp_path / "service", 1, "{}", json.dumps(more)))
