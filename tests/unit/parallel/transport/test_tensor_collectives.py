"""The choice of collectives by place, those of one process, and the host's part in copy-engine
ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlora_megatron.integrations.megatron.nano_batches import NanoBatches
from tlora_megatron.ops.lora.cuda_arguments import ExchangeArguments
from tlora_megatron.parallel import collectives as tensor_collectives
from tlora_megatron.parallel import copy_engine
from tlora_megatron.parallel.collectives import NoCollectives, make_tensor_collectives
from tlora_megatron.parallel.copy_engine import CopyEngineCollectives

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of two, never communicated over."""
    monkeypatch.setattr(tensor_collectives.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(tensor_collectives.dist, "get_rank", lambda group: 1)
    return SimpleNamespace()


def test_one_process_communicates_nothing() -> None:
    alone = make_tensor_collectives(None, CPU)
    x = torch.randn(6, 4)
    assert alone.all_reduce(x, 0) is x
    torch.testing.assert_close(alone.reduce_scatter(x, 0), x)
    torch.testing.assert_close(alone.all_gather(x, 0), x)


def test_a_cpu_gets_gloo(group: Any) -> None:
    assert make_tensor_collectives(group, CPU).name == "gloo"
    with pytest.raises(ValueError, match="must be auto on a CPU, got 'nccl'"):
        make_tensor_collectives(group, CPU, "nccl")


def test_without_peer_memory_auto_takes_nccl_and_says_why(
    group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensor_collectives, "obstacle", lambda group, device: "of the moon")
    with caplog.at_level("INFO"):
        assert make_tensor_collectives(group, GPU).name == "nccl"
    assert "nccl, since of the moon" in caplog.text
    with pytest.raises(ValueError, match="must be nccl here, got copy_engine: of the moon"):
        make_tensor_collectives(group, GPU, "copy_engine")


def test_auto_takes_copy_engines(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_collectives, "obstacle", lambda group, device: None)
    found = make_tensor_collectives(group, GPU)
    assert found.name == "copy_engine"
    with pytest.raises(RuntimeError, match="lane must be prepared, got 0 of 0"):
        found.all_reduce(torch.zeros(2, 2), 0)


@pytest.mark.usefixtures("world_of_one")
def test_nano_batches_give_their_collectives_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SimpleNamespace(cp_size=1, pp_size=1)
    groups: Any = SimpleNamespace(layout=layout, pp_rank=0, tp_group=None, device=CPU)
    closed = []
    monkeypatch.setattr(NoCollectives, "close", lambda made: closed.append(made))
    nano_batches = NanoBatches([], groups)
    nano_batches.close()
    assert not closed
    nano_batches.set_count(2)
    assert nano_batches.count == 2
    nano_batches.close()
    nano_batches.close()
    assert (len(closed), nano_batches.count) == (1, 1)


RANK, SIZE = 1, 4
ADDRESSES = (1 << 20, 2 << 20, 3 << 20, 4 << 20)


class Library:
    """Takes the place of the CUDA extension and keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, int]] = []

    def call(self, name: str, arguments: ExchangeArguments, stream: int) -> None:
        assert name == "exchange"
        fields = ("x", "out", "num_steps", "dtype", "rank", "size")
        self.calls.append({f: getattr(arguments, f) for f in fields} | {"stream": stream})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    group = {"get_world_size": lambda group: SIZE, "get_rank": lambda group: RANK}
    monkeypatch.setattr(copy_engine, "dist", SimpleNamespace(**group))
    monkeypatch.setattr(copy_engine, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(copy_engine, "load_extension", lambda: found)
    memory = SimpleNamespace(addresses=ADDRESSES)
    monkeypatch.setattr(copy_engine, "allocate", lambda group, device, num_bytes: memory)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 70 + i, raising=False)
    return found


def collectives() -> CopyEngineCollectives:
    group: Any = object()
    made = CopyEngineCollectives(group, torch.device("cuda", 2), 4096)
    made.prepare(2)
    return made


def test_a_collective_is_one_call_on_the_current_stream(library: Library) -> None:
    made, x = collectives(), torch.zeros(8, 16, dtype=torch.bfloat16)
    assert made.all_reduce(x, 0) is x
    part = made.reduce_scatter(x, 1)
    whole = made.all_gather(part, 1)
    assert (part.shape, whole.shape) == ((2, 16), (8, 16))
    tensors = [(c["x"], c["out"]) for c in library.calls]
    assert tensors == [
        (x.data_ptr(), x.data_ptr()),
        (x.data_ptr(), part.data_ptr()),
        (part.data_ptr(), whole.data_ptr()),
    ]
    # Copies to and from 3 others, two phases, a sum; the gathering's sum keeps own rows.
    assert [c["num_steps"] for c in library.calls] == [9, 6, 6]
    assert {c["stream"] for c in library.calls} == {72}
    assert {(c["dtype"], c["rank"], c["size"]) for c in library.calls} == {(0, RANK, SIZE)}


def test_bytes_are_gathered_as_words_that_nothing_is_added_to(library: Library) -> None:
    made = collectives()
    whole = made.all_gather(torch.zeros(3, 4, dtype=torch.uint8), 0)
    assert (whole.shape, whole.dtype) == ((3 * SIZE, 4), torch.uint8)
    assert library.calls[0]["dtype"] == 2
    with pytest.raises(AssertionError, match="come in fours, got 6"):
        made.all_gather(torch.zeros(2, 3, dtype=torch.uint8), 0)
