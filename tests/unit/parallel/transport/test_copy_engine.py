"""The host's part in a copy-engine collective, without a GPU: one call, told of once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlora_megatron.ops.lora.cuda_arguments import ExchangeArguments
from tlora_megatron.parallel import copy_engine
from tlora_megatron.parallel.copy_engine import CopyEngineCollectives
from tlora_megatron.parallel.peer_memory import Copy, Exchange, Lane, Sum

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


def test_steps_are_made_once_for_a_lane_a_size_and_a_dtype(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = collectives(), []
    steps: Callable[..., Any] = Lane.steps

    def counted(lane: Lane, operation: Any, num_bytes: int) -> Any:
        asked.append((operation, num_bytes))
        return steps(lane, operation, num_bytes)

    monkeypatch.setattr(Lane, "steps", counted)
    for rows, dtype in ((8, torch.bfloat16), (4, torch.float32), (12, torch.bfloat16)):
        for _ in range(3):
            made.all_reduce(torch.zeros(rows, 16, dtype=dtype), 0)
    sizes = [("all_reduce", size) for size in (256, 256, 384)]
    assert asked == sizes
    made.all_reduce(torch.zeros(8, 16, dtype=torch.bfloat16), 1)
    assert asked == [*sizes, ("all_reduce", 256)]
    assert [c["dtype"] for c in library.calls] == [0, 0, 0, 2, 2, 2, 0, 0, 0, 0]


def test_descriptions_name_every_place(library: Library) -> None:
    made = collectives()
    steps = made.steps("all_reduce", 256)
    found = made.describe(0, steps, torch.float16)
    kinds = {Copy: 0, Exchange: 1, Sum: 2}
    assert [s.kind for s in found.steps[: found.num_steps]] == [kinds[type(s)] for s in steps]
    assert tuple(found.flags[:SIZE]) == ADDRESSES
    assert [a - f for a, f in zip(found.areas[:SIZE], ADDRESSES, strict=True)] == [512] * SIZE
    assert (found.dtype, found.device) == (1, 2)
