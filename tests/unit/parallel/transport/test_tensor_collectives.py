"""The choice of collectives by place, and those of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlora_megatron.integrations.megatron.nano_batches import NanoBatches
from tlora_megatron.parallel import collectives
from tlora_megatron.parallel.collectives import (
    SkippedCollectives,
    make_tensor_collectives,
)
from tlora_megatron.parallel.copy_engine import encoded
from tlora_megatron.parallel.peer_memory import Copy, Exchange, Place, Sum

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of two, never communicated over."""
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(collectives.dist, "get_rank", lambda group: 1)
    return SimpleNamespace()


def test_one_process_communicates_nothing() -> None:
    alone = make_tensor_collectives(None, CPU)
    x = torch.randn(6, 4)
    assert alone.all_reduce(x, 0) is x
    torch.testing.assert_close(alone.reduce_scatter(x, 0), x)
    torch.testing.assert_close(alone.all_gather(x, 0), x)


def test_skipped_has_the_right_shapes() -> None:
    skipped = SkippedCollectives(2, 1)
    x = torch.arange(12.0).view(6, 2)
    torch.testing.assert_close(skipped.reduce_scatter(x, 0), x[3:])
    torch.testing.assert_close(skipped.all_gather(x, 0), torch.cat([x, x]))


def test_a_cpu_gets_gloo(group: Any) -> None:
    assert make_tensor_collectives(group, CPU).name == "gloo"
    with pytest.raises(ValueError, match="must be auto on a CPU, got 'nccl'"):
        make_tensor_collectives(group, CPU, "nccl")
    with pytest.raises(ValueError, match=r"must be one of auto, .*, got 'ring'"):
        make_tensor_collectives(group, CPU, "ring")  # type: ignore[arg-type]


def test_without_peer_memory_auto_takes_nccl_and_says_why(
    group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collectives, "obstacle", lambda group, device: "of the moon")
    with caplog.at_level("INFO"):
        assert make_tensor_collectives(group, GPU).name == "nccl"
    assert "nccl, since of the moon" in caplog.text
    with pytest.raises(ValueError, match="must be nccl here, got copy_engine: of the moon"):
        make_tensor_collectives(group, GPU, "copy_engine")


def test_with_peer_memory_auto_takes_copy_engines(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "obstacle", lambda group, device: None)
    found = make_tensor_collectives(group, GPU)
    assert found.name == "copy_engine"
    with pytest.raises(RuntimeError, match="lane must be prepared, got 0 of 0"):
        found.all_reduce(torch.zeros(2, 2), 0)


def test_steps_are_encoded_as_the_kernels_read_them() -> None:
    steps = encoded(
        [
            Copy(Place("x", 32), Place(1, 64), 16),
            Exchange(1),
            Sum(Place("x", 1), Place(0, 2), Place("out", 3), 4),
            Sum(Place("x", 1), Place("out", 2), None, 4, alone=True),
        ],
        3,
    )
    assert [step.kind for step in steps] == [0, 1, 2, 2]
    assert (steps[0].from_base, steps[0].to_base, steps[0].num_bytes) == (-2, 1, 16)
    assert steps[1].phase == 1
    assert (steps[2].also_base, steps[2].also_offset, steps[2].sources) == (-1, 3, 3)
    assert (steps[3].also_base, steps[3].sources) == (-3, 1)


@pytest.mark.usefixtures("world_of_one")
def test_nano_batches_give_their_collectives_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SimpleNamespace(cp_size=1, pp_size=1)
    groups: Any = SimpleNamespace(layout=layout, pp_rank=0, tp_group=None, device=CPU)
    closed = []
    monkeypatch.setattr(SkippedCollectives, "close", lambda made: closed.append(made))
    nano_batches = NanoBatches([], groups)
    nano_batches.close()
    assert not closed
    nano_batches.set_count(2)
    assert nano_batches.count == 2
    nano_batches.close()
    nano_batches.close()
    assert (len(closed), nano_batches.count) == (1, 1)
