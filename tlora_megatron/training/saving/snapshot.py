"""Copies of jobs' states at one step, taken while the GPU goes on, in host memory.

`torch.distributed.checkpoint.staging`'s StateDictStager does not serve: it keeps a copy of every
tensor that it ever saw, without a bound, pins it on the thread that trains, and overwrites it at
the next save whether or not it has been written.

A round reads the compute copies of the adapters. Only a job's own optimizer step changes its
masters and moments, so nothing but that step waits for the copy (`AdapterSlab.wait_for_readers`).
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import AdapterSlab, WholeTensor, find_whole_tensors
from tlora_megatron.layers.slab_layout import SlabLayout, slab_layout
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.formats.safetensors_file import PendingTensor, Scratch

logger = logging.getLogger(__name__)

_locked: set[HostMemory] = set()
"""Kept alive until they are closed: pages must not go back to the system while they are locked."""
_ALIGNMENT = 64
"""Elements: a range begins on 256 bytes."""


class Arena:
    """Gives out ranges of a fixed number of elements; knows nothing of threads or memory."""

    def __init__(self, numel: int) -> None:
        self.numel = -(-numel // _ALIGNMENT) * _ALIGNMENT
        self._held: list[range] = []
        """In ascending order."""

    def take(self, numel: int) -> range | None:
        """Returns the first free range that is large enough; None until one is given back.

        Raises:
            ValueError: if there never will be one.
        """
        if numel > self.numel:
            raise ValueError(f"numel must be at most {self.numel}, got {numel}")
        size, begin = -(-numel // _ALIGNMENT) * _ALIGNMENT, 0
        for place, held in enumerate([*self._held, range(self.numel, self.numel)]):
            if held.start - begin >= size:
                self._held.insert(place, range(begin, begin + size))
                return range(begin, begin + numel)
            begin = held.stop
        return None

    def has_room(self, numel: int) -> bool:
        """True if `take` would find a range now."""
        taken = self.take(numel) if numel <= self.numel else None
        if taken is not None:
            self.give_back(taken)
        return taken is not None

    def give_back(self, taken: range) -> None:
        """Makes a range free again."""
        self._held = [held for held in self._held if held.start != taken.start]


class HostMemory:
    """fp32 memory of the host, page-locked where a GPU copies into it.

    A thread touches and locks the pages, which takes 0.3 s a GB, while the run goes on.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self._device = device
        self._is_pinned = False
        self._thread: threading.Thread | None = None
        if device.type != "cuda" or not numel:  # the driver locks no empty memory
            self._flat = torch.empty(numel)
            return
        pages = mmap.mmap(-1, max(4 * numel, mmap.PAGESIZE))
        with suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._flat = torch.frombuffer(pages, dtype=torch.float32)[:numel]
        self._thread = threading.Thread(target=self._pin, name="tlora-pin", daemon=True)
        self._thread.start()

    def flat(self) -> Tensor:
        """Returns the memory; waits until it can be used."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._flat

    def close(self) -> None:
        """Unlocks the pages; nothing may be copied any more."""
        self.flat()
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._flat.data_ptr())
            self._is_pinned = False
            _locked.discard(self)

    def _pin(self) -> None:
        """Locks the pages; a host that refuses makes saves slower, which is told once."""
        torch.cuda.set_device(self._device)  # or this thread would open the first GPU
        self._flat.numpy().fill(0)
        size_bytes = self._flat.numel() * 4
        portable = 1
        error = int(
            torch.cuda.cudart().cudaHostRegister(self._flat.data_ptr(), size_bytes, portable)
        )
        self._is_pinned = error == 0
        if not error:
            _locked.add(self)
        else:
            logger.warning(
                "%.1f GB of host memory could not be locked (CUDA error %d): rounds stand still "
                "while a job is copied for saving; a smaller run.save_memory_gb may help",
                size_bytes / 1e9, error,
            )  # fmt: skip


def save_memory_numel(sizes: list[int], memory_gb: float | None) -> int:
    """Returns how many fp32 elements the snapshots of jobs may take together.

    Args:
        sizes: elements of each job's snapshot; the largest always finds room.
    """
    allowed = _free_bytes() // 4 if memory_gb is None else memory_gb * 1e9
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return max(max(padded, default=0), min(sum(padded), int(allowed // 4)))


def _free_bytes() -> int:
    """Memory of this host, or of its container, that is not in use."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().split("MemAvailable:")
        free = int(lines[1].split()[0]) * 1024
    with suppress(OSError, ValueError, KeyError):  # no limit reads "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        cached = int(dict(line.split() for line in lines)["inactive_file"])
        free = min(free, limit - int((group / "memory.current").read_text()) + cached)
    return max(free, 0)


BUFFERS = ("master", "exp_avg", "exp_avg_sq")
"""The buffers of a checkpoint; an adapter is the first."""


class Snapshot(NamedTuple):
    """The whole state of one adapter at one step, in the host's memory of the writer."""

    lora: LoraSpec
    spec: Backbone
    layouts: tuple[SlabLayout, ...]
    """Layouts of the slabs of the model-parallel ranks."""
    buffers: dict[str, Tensor]
    """fp32 `[ranks, elements]`, each rank's flat buffer at the begin of its row."""
    copied: torch.cuda.Event | None
    """None where the copy is complete."""

    def wait(self) -> None:
        """Waits until the values are there."""
        if self.copied is not None:
            self.copied.synchronize()

    def tensors(self, buffer: str, prefix: str = "") -> list[PendingTensor]:
        """Returns a buffer's whole canonical tensors, to be put together when they are read."""
        rows = zip(self.layouts, self.buffers[buffer], strict=True)
        flat = [row[: layout.numel] for layout, row in rows]
        return [
            PendingTensor(
                prefix + tensor.name,
                tensor.shape,
                partial(_read, tensor),
                partial(_read_expert, tensor),
            )
            for tensor in find_whole_tensors(self.layouts, flat, self.spec)
        ]

    def state(self) -> tuple[list[PendingTensor], list[PendingTensor]]:
        """Returns a checkpoint's weights, and its moments with their buffer before each name."""
        master, *moments = BUFFERS
        of_moments = [t for name in moments for t in self.tensors(name, prefix=f"{name}.")]
        return self.tensors(master), of_moments


def _read(tensor: WholeTensor, scratch: Scratch) -> Tensor:
    stored = tensor.as_stored()
    return tensor.join(scratch.room(tensor.shape)) if stored is None else stored


def _read_expert(tensor: WholeTensor, expert: int, scratch: Scratch) -> Tensor:
    return _read(tensor.of_expert(expert), scratch)


class SnapshotTaker:
    """Takes snapshots on a stream beside the training's; collectives run in program order.

    Args:
        groups: those of the super-model. A gather over the ranks that hold an adapter takes device
            memory for one buffer of each, one buffer at a time.
    """

    def __init__(self, spec: Backbone, groups: ParallelGroups) -> None:
        self._spec, self._groups = spec, groups
        on_gpu = groups.device.type == "cuda"
        self._stream = torch.cuda.Stream(groups.device) if on_gpu else None
        self._layouts = cache(self._make_layouts)

    def numel(self, lora: LoraSpec, num_buffers: int = len(BUFFERS)) -> int:
        """Returns the elements of a snapshot."""
        layouts = self._layouts(lora)
        return num_buffers * len(layouts) * _row_size(layouts)

    def take(
        self, slab: AdapterSlab, buffers: Sequence[str], room: Tensor | None
    ) -> Snapshot | None:
        """Copies an adapter's buffers; collective over the ranks that hold parts of it.

        Args:
            room: flat, of the size that `numel` says; None on ranks that write nothing.

        Returns:
            The snapshot; None where there is no room.
        """
        layouts = self._layouts(slab.layout.lora)
        rows: list[Tensor | None] = [None] * len(buffers)
        if room is not None:
            rows = list(room.view(len(buffers), len(layouts), _row_size(layouts)))
        with self._beside(slab, buffers) as copied:
            for buffer, into in zip(buffers, rows, strict=True):
                self._copy(slab, buffer, layouts, into)
        if room is None:
            return None
        named = {name: row for name, row in zip(buffers, rows, strict=True) if row is not None}
        return Snapshot(slab.layout.lora, self._spec, layouts, named, copied)

    @contextmanager
    def _beside(
        self, slab: AdapterSlab, buffers: Sequence[str]
    ) -> Iterator[torch.cuda.Event | None]:
        """Runs what is inside on the side stream, behind all that the current one was given."""
        if self._stream is None:
            yield None
            return
        copied = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._groups.device))
        with torch.cuda.stream(self._stream):
            yield copied
            copied.record(self._stream)
        for name in buffers:
            held = slab.buffers()[name]
            if held.is_cuda:  # a job may leave, and its memory with it, before it is copied
                held.record_stream(self._stream)
        slab.read_until(copied)

    def _copy(
        self, slab: AdapterSlab, buffer: str, layouts: tuple[SlabLayout, ...], into: Tensor | None
    ) -> None:
        """Brings one buffer of every model-parallel rank into `[ranks, elements]`."""
        group, is_holder = self._holders(slab.layout.lora)
        is_alone = len(layouts) == 1
        if is_alone and slab.placement.group is None:
            held = slab.buffers()[buffer]  # wherever it lies
        else:
            held = slab.whole(buffer)
        if not is_holder:
            return
        if is_alone:
            if into is not None:
                into[0, : held.numel()].copy_(held, non_blocking=True)
            return
        # A collective takes equal sizes only, and stages may hold different numbers of layers.
        missing = _row_size(layouts) - held.numel()
        local = F.pad(held, (0, missing)) if missing else held
        if into is None:
            dist.gather(local, group=group, group_dst=0)
            return
        parts = list(into) if self._stream is None else [torch.empty_like(local) for _ in into]
        dist.gather(local, parts, group=group, group_dst=0)
        if self._stream is not None:
            for row, part in zip(into, parts, strict=True):
                row.copy_(part, non_blocking=True)

    def _make_layouts(self, lora: LoraSpec) -> tuple[SlabLayout, ...]:
        layout, layouts = self._groups.layout, []
        holders = layout.expert_holders if lora.expert_targets else layout.tp_size
        for pp_rank, rank in itertools.product(range(layout.pp_size), range(holders)):
            place, tp_rank = layout.expert_place(rank), rank % layout.tp_size
            sites = stage_sites(self._spec, layout, tp_rank=tp_rank, pp_rank=pp_rank, place=place)
            layouts.append(slab_layout(sites, lora))
        return tuple(layouts)

    def _holders(self, lora: LoraSpec) -> tuple[dist.ProcessGroup, bool]:
        """Returns the group of the ranks that together hold an adapter, and if this is one."""
        groups = self._groups
        if not lora.expert_targets:
            return groups.model_group, groups.is_first_replica
        assert groups.experts is not None, "the base has routed experts"
        return groups.experts.holder_group, groups.experts.is_holder


def _row_size(layouts: Sequence[SlabLayout]) -> int:
    return max(layout.numel for layout in layouts)
