"""Tensor-parallel collectives that the GPUs' copy engines transport.

GEMMs keep all multiprocessors while rows travel; those are taken only to add up what has arrived.
Sums are made in rank order in fp32 and rounded once, so that every process gets the same bits, and
a row the same ones whatever T is.

With CUDA_DEVICE_MAX_CONNECTIONS=1 a lane's waiting holds up what was enqueued after it on any
stream; 8 or more let lanes and compute run beside each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.kernel_build import load_extension
from tlora_megatron.ops.lora.cuda_arguments import ExchangeArguments, ExchangeStep
from tlora_megatron.ops.lora.cuda_calls import multiprocessors
from tlora_megatron.parallel.peer_memory import (
    Copy,
    Exchange,
    Lane,
    Operation,
    Place,
    Step,
    Sum,
    SymmetricMemory,
    allocate,
)
from tlora_megatron.parallel.peer_memory import slot_bytes as slot_bytes_for

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_FLAG_BYTES = 512
"""Size before a lane's area: two phases of `MAX_RANKS` flags of 4 bytes, and alignment."""
_BLOCKS = 4
"""Blocks of the sum's kernel on a multiprocessor: all that it holds, to read memory at full speed.
"""
_BASES = {"x": -2, "out": -1}
_NOWHERE = -3
_Calls = Callable[[Operation, int, torch.dtype], ExchangeArguments]
"""A lane's descriptors, by bytes of the whole tensor; each is made once."""


class CopyEngineCollectives:
    """`TensorCollectives` that the GPUs' copy engines transport."""

    name = "copy_engine"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        """
        Args:
            max_bytes: bytes that one round of a lane carries; larger tensors take several. A lane
                holds `1 + 1 / n` times as much memory.
        """
        self.group, self.device = group, device
        self.size = dist.get_world_size(group)
        self._lane = Lane(
            rank=dist.get_rank(group),
            size=self.size,
            slot_bytes=slot_bytes_for(max_bytes, self.size),
        )
        self.lane_bytes = _FLAG_BYTES + self._lane.area_bytes
        self._memory: list[SymmetricMemory] = []
        self._calls: list[_Calls] = []

    def prepare(self, num_lanes: int) -> None:
        """Allocates the lanes that do not exist yet."""
        for lane in range(len(self._memory), num_lanes):
            self._memory.append(allocate(self.group, self.device, self.lane_bytes))
            # Jobs vary the number of rows: as many as a lane may meet.
            describe = functools.partial(self._describe, lane)
            self._calls.append(functools.lru_cache(maxsize=1024)(describe))

    def all_reduce(self, x_TH: Tensor, lane: int) -> Tensor:
        x_TH = x_TH.contiguous()
        self._run("all_reduce", x_TH, x_TH, lane, x_TH.dtype)
        return x_TH

    def reduce_scatter(self, x_TH: Tensor, lane: int) -> Tensor:
        assert len(x_TH) % self.size == 0, f"{self.size} must divide the rows, got {len(x_TH)}"
        result = x_TH.new_empty(len(x_TH) // self.size, *x_TH.shape[1:])
        self._run("reduce_scatter", x_TH.contiguous(), result, lane, x_TH.dtype)
        return result

    def all_gather(self, x_TH: Tensor, lane: int) -> Tensor:
        x_TH = x_TH.contiguous()
        result = x_TH.new_empty(len(x_TH) * self.size, *x_TH.shape[1:])
        dtype = x_TH.dtype
        if dtype == torch.uint8:
            # Bytes are moved as fp32, which one source that nothing is added to leaves as it is.
            assert x_TH.nbytes % 4 == 0, f"bytes must come in fours, got {x_TH.nbytes}"
            dtype = torch.float32
        self._run("all_gather", x_TH, result, lane, dtype)
        return result

    def close(self) -> None:
        """Unmaps the lanes after all processes have finished with them. Waits for the device."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group, device_ids=[self.device.index])
        self._memory.clear()
        self._calls.clear()
        del self.group

    def _run(
        self, operation: Operation, x: Tensor, out: Tensor, lane: int, dtype: torch.dtype
    ) -> None:
        """Enqueues all steps on the current stream with one call of the library."""
        if lane >= len(self._calls):
            raise RuntimeError(f"lane must be prepared, got {lane} of {len(self._calls)}")
        whole_bytes = max(x.nbytes, out.nbytes)
        arguments = self._calls[lane](operation, whole_bytes, dtype)
        arguments.x, arguments.out = x.data_ptr(), out.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        load_extension().call("exchange", arguments, stream)

    def _describe(
        self, lane: int, operation: Operation, num_bytes: int, dtype: torch.dtype
    ) -> ExchangeArguments:
        """Returns a call's arguments without the tensors; good for any number of calls."""
        steps = [_encoded(step, self.size) for step in self._lane.steps(operation, num_bytes)]
        arguments = ExchangeArguments(
            steps=(ExchangeStep * len(steps))(*steps),
            num_steps=len(steps),
            slot_bytes=self._lane.slot_bytes,
            rank=self._lane.rank,
            size=self.size,
            dtype=_DTYPES[dtype],
            blocks=_BLOCKS * multiprocessors(self.device),
            device=self.device.index,
        )
        for rank, address in enumerate(self._memory[lane].addresses):
            arguments.flags[rank] = address
            arguments.areas[rank] = address + _FLAG_BYTES
        return arguments


def _encoded(step: Step, size: int) -> ExchangeStep:
    """Returns a step of a group of `size` processes in the CUDA extension's form."""
    match step:
        case Copy(source, target, num_bytes):
            places = _fields("from", source) | _fields("to", target)
            return ExchangeStep(kind=0, num_bytes=num_bytes, **places)
        case Exchange(phase):
            return ExchangeStep(kind=1, phase=phase)
        case Sum(own, target, also, num_bytes, alone):
            places = _fields("from", own) | _fields("to", target) | _fields("also", also)
            sources = 1 if alone else size
            return ExchangeStep(kind=2, sources=sources, num_bytes=num_bytes, **places)


def _fields(name: str, place: Place | None) -> dict[str, int]:
    if place is None:
        return {f"{name}_base": _NOWHERE}
    base = place.base if isinstance(place.base, int) else _BASES[place.base]
    return {f"{name}_base": base, f"{name}_offset": place.offset}
