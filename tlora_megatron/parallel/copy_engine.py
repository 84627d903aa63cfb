"""Tensor-parallel collectives that the GPUs' copy engines transport over each other's memory.

GEMMs keep all multiprocessors while rows travel; those are taken only to add up what has arrived.
Sums are made in rank order in fp32 and rounded once, so that every process gets the same bits, and
a row the same ones whatever T is. With CUDA_DEVICE_MAX_CONNECTIONS=1 a lane's waiting holds up what
was enqueued after it on any stream; 8 or more let lanes and compute run beside each other. torch's
symmetric memory does the mapping. NVLink multicast is never used, and kept off.

Every process has, for each lane, an *area* of memory that all of them can reach: a slot for each
sender and one for the sum, and two sets of flags, one a phase. A collective is, in rounds that fit
a slot:

- all-reduce: copy each process's slice of x into its area (the slot of the sender), phase 0, sum
  the slices in rank order, phase 1, copy the sums out of the owners' areas;
- reduce-scatter: the same without the last copies;
- all-gather: own rows into the own area, phase 0, copy the others' rows out of their areas,
  phase 1.

In a phase a process raises its flag at every other, waits for all of theirs, and lowers those.

Why nothing is overwritten too early and no flag is lost, whatever the order of collectives in a
lane: each round has phase 0 and then phase 1, and "X before Y" holds along a stream.

1. Flags. r raises its flag of phase 1 at p after it saw p's of phase 0; it raises that of the next
   phase 0 after it saw p's of phase 1. p raises one flag after it lowered what it had waited for
   before. So r never raises a flag that p has not yet lowered.
2. A sender's slot at p. r fills it before phase 0. p reads it before it raises phase 1, and r fills
   it anew after it has seen that.
3. The sum's slot at r. p reads it after phase 1, and raises its flag of the next phase 0
   afterwards; r writes the slot anew after it has seen that (an all-reduce's sum follows phase 0).
4. Own rows at r (all-gather). r writes them before phase 0. p reads them between its two phases,
   and r passes phase 1, hence any later write, after it has seen p's flag of phase 1.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.kernel_build import ExtensionUnavailable, load_extension
from tlora_megatron.ops.lora.cuda_arguments import MAX_RANKS, ExchangeArguments, ExchangeStep
from tlora_megatron.ops.lora.cuda_calls import multiprocessors


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricMemory:
    """A buffer of the same size on each process of a group."""

    local: Tensor
    """This process's buffer, uint8."""
    addresses: tuple[int, ...]
    """Addresses at which this process sees the buffer of each rank."""
    handle: Any
    """torch's handle, which keeps the mappings."""


def allocate(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> SymmetricMemory:
    """Allocates zeros that all processes can reach; a collective. Waits for the device.

    Raises:
        RuntimeError: if the devices cannot reach each other's memory.
    """
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.empty_cache()  # it comes from the driver, and torch may hold all there is
    local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    local.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(local, group)
    bases = tuple(int(base) for base in handle.buffer_ptrs)
    inside = local.data_ptr() - bases[dist.get_rank(group)]
    # No flag may be raised in memory that its owner has yet to clear.
    dist.barrier(group, device_ids=[device.index])
    return SymmetricMemory(
        local=local, addresses=tuple(base + inside for base in bases), handle=handle
    )


def obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why this group cannot use peer memory, the same on every process; None if it can.

    A collective. Builds the CUDA extension if need be.
    """
    found: list[tuple[str, str, str | None]] = [("", "", None)] * dist.get_world_size(group)
    own = (socket.gethostname(), _uuid(device.index), _own_obstacle(group, device))
    dist.all_gather_object(found, own, group=group)
    reasons = [reason for _, _, reason in found if reason is not None]
    if reasons:
        return reasons[0]
    if len({host for host, _, _ in found}) > 1:
        return "the group spans several hosts"
    unreachable: list[str | None] = [None] * len(found)
    dist.all_gather_object(unreachable, _unreachable(device, [u for _, u, _ in found]), group=group)
    return next((reason for reason in unreachable if reason is not None), None)


def _own_obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if dist.get_world_size(group) > MAX_RANKS:
        return f"a group may have {MAX_RANKS} processes, this has {dist.get_world_size(group)}"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "the CUDA extension is built for Hopper GPUs"
    try:
        load_extension()
    except ExtensionUnavailable as error:
        return str(error)
    return None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _unreachable(device: torch.device, peers: list[str]) -> str | None:
    """Names a peer that this device sees but cannot reach.

    Nothing can be said beforehand of peers that are hidden from this process.
    """
    for other in range(torch.cuda.device_count()):
        if other == device.index or _uuid(other) not in peers:
            continue
        if not torch.cuda.can_device_access_peer(device.index, other):
            return f"GPU {device.index} of {socket.gethostname()} cannot reach GPU {other}"
    return None


SLOT_ALIGNMENT = 512
_SLICE_ALIGNMENT = 16
"""Bytes that the sum reads at once."""

Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Place(NamedTuple):
    """A byte of memory."""

    base: int | Literal["x", "out"]
    """The operand, the result, or the rank of the process whose area it is in."""
    offset: int


class Copy(NamedTuple):
    """Copies bytes from or to another process's area."""

    source: Place
    target: Place
    num_bytes: int


class Exchange(NamedTuple):
    """Raises this process's flags of a phase and waits for all others'."""

    phase: Literal[0, 1]


class Sum(NamedTuple):
    """Writes own bytes plus, unless `alone`, all others' slots, in rank order, to two places."""

    own: Place
    target: Place
    also: Place | None
    num_bytes: int
    alone: bool = False


Step: TypeAlias = Copy | Exchange | Sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One process's part in a lane."""

    rank: int
    size: int
    slot_bytes: int
    """A multiple of `SLOT_ALIGNMENT`."""

    @property
    def area_bytes(self) -> int:
        """Bytes of a slot for each sender and one for the sum."""
        return (self.size + 1) * self.slot_bytes

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks in the order of copies: at each turn every process has another target."""
        if self.size & (self.size - 1) == 0:
            return tuple(self.rank ^ turn for turn in range(1, self.size))
        return tuple((self.rank + turn) % self.size for turn in range(1, self.size))

    def slot(self, of: int, sender: int) -> Place:
        """Returns the slot of `sender` (or `size`: of the sum) in the area of process `of`."""
        return Place(of, sender * self.slot_bytes)

    def steps(self, operation: Operation, num_bytes: int) -> list[Step]:
        """Returns the steps of a collective.

        Args:
            num_bytes: of the whole tensor, gathered or to be summed; `size` must divide them,
                except for an all-reduce.
        """
        make = {
            "all_reduce": self._all_reduce,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
        }
        return list(make[operation](num_bytes))

    def _all_reduce(self, num_bytes: int) -> Iterator[Step]:
        slice_bytes = _rounded(-(-num_bytes // self.size), _SLICE_ALIGNMENT)
        for begin, room in _rounds(slice_bytes, self.slot_bytes):
            starts = [rank * slice_bytes + begin for rank in range(self.size)]
            # The last slices may be short, or empty.
            sizes = [max(0, min(room, num_bytes - start)) for start in starts]
            yield from self._scatter(starts, sizes)
            yield Exchange(0)
            start, size = starts[self.rank], sizes[self.rank]
            if size:
                total = self.slot(self.rank, self.size)
                yield Sum(Place("x", start), total, Place("out", start), size)
            yield Exchange(1)
            for peer in self.peers:
                if sizes[peer]:
                    source = self.slot(peer, self.size)
                    yield Copy(source, Place("out", starts[peer]), sizes[peer])

    def _reduce_scatter(self, num_bytes: int) -> Iterator[Step]:
        slice_bytes = num_bytes // self.size
        for begin, size in _rounds(slice_bytes, self.slot_bytes):
            starts = [rank * slice_bytes + begin for rank in range(self.size)]
            yield from self._scatter(starts, [size] * self.size)
            yield Exchange(0)
            yield Sum(Place("x", starts[self.rank]), Place("out", begin), None, size)
            yield Exchange(1)

    def _all_gather(self, num_bytes: int) -> Iterator[Step]:
        slice_bytes = num_bytes // self.size
        for begin, size in _rounds(slice_bytes, self.slot_bytes):
            own = Place("out", self.rank * slice_bytes + begin)
            slot = self.slot(self.rank, self.rank)
            yield Sum(Place("x", begin), slot, own, size, alone=True)
            yield Exchange(0)
            for peer in self.peers:
                target = Place("out", peer * slice_bytes + begin)
                yield Copy(self.slot(peer, peer), target, size)
            yield Exchange(1)

    def _scatter(self, starts: list[int], sizes: list[int]) -> Iterator[Step]:
        for peer in self.peers:
            if sizes[peer]:
                target = self.slot(peer, self.rank)
                yield Copy(Place("x", starts[peer]), target, sizes[peer])


def slot_bytes(max_bytes: int, size: int) -> int:
    """Returns a slot's bytes, such that a collective of up to `max_bytes` takes one round."""
    return _rounded(max(1, -(-max_bytes // size)), SLOT_ALIGNMENT)


def _rounds(num_bytes: int, room: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, num_bytes, room):
        yield begin, min(room, num_bytes - begin)


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_FLAG_BYTES = 512
"""Size before a lane's area: two phases of `MAX_RANKS` flags of 4 bytes, and alignment."""
_BLOCKS = 4
"""Blocks of the sum's kernel on a multiprocessor: as many as it holds, for memory's full speed."""
_BASES = {"x": -2, "out": -1}
_NOWHERE = -3
_Calls = Callable[[Operation, int, torch.dtype], ExchangeArguments]
"""A lane's descriptors, by bytes of the whole tensor; each is made once."""


class CopyEngineCollectives:
    """`TensorCollectives` that the GPUs' copy engines transport.

    Args:
        max_bytes: bytes that one round of a lane carries; larger tensors take several. A lane holds
            `1 + 1 / n` times as much memory.
    """

    name = "copy_engine"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        self.group, self.device = group, device
        self.size = dist.get_world_size(group)
        room = slot_bytes(max_bytes, self.size)
        self._lane = Lane(rank=dist.get_rank(group), size=self.size, slot_bytes=room)
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
