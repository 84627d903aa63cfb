"""Reads a rank's part of a Hugging Face base into its parameters, on several threads.

A thread reads runs of whole rows into a block of memory that the GPU copies from by itself, and
queues on its own stream: the copy, a look for NaN and infinity, and a copy of rows and columns to
their places in the parameter, cast to its dtype, or quantised. No tensor is ever put together on
the host, nor a quantised one in a wider dtype on the GPU.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.parallel.groups import host_threads
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, StoredTensor, all_finite
from tlora_megatron.training.formats.hf_convert import CodePlaces, Rounding
from tlora_megatron.training.formats.quantised import all_numbers
from tlora_megatron.training.formats.rank_tensors import Piece, RankTensor

_BLOCK_BYTES = 16 << 20
"""Much less costs calls, much more costs pinned memory: two blocks a thread."""
_MAX_THREADS = {"cuda": 8, "cpu": 2}
"""On a CPU torch's own threads do the copying."""

_QUANTISING = threading.Lock()


class _Run(NamedTuple):
    """Rows that are read at once, and where they go."""

    source: str
    stored: StoredTensor
    begin: int
    """First row of the stored tensor."""
    cols: slice | None
    to: Tensor
    """`[units, rows, ...]`, a view of the parameter."""
    name: str
    """Name of the parameter."""
    scales: Tensor | None
    """`[units, rows]`: the rows are quantised, and these are their scales."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is read: whole rows."""
        return (*self.to.shape[:2], *self.stored.shape[1:])


def read_base(
    checkpoint: HFCheckpoint,
    tensors: Iterable[RankTensor],
    parameters: Mapping[str, Tensor],
    scales: Mapping[str, Tensor] | None = None,
) -> Rounding:
    """Fills the parameters that the tensors name; all lie on one device, which is waited for.

    Returns:
        How far codes are from what was read.

    Raises:
        ValueError: if a stored tensor holds NaN or infinity, is quantised, or its file ends early.
    """
    runs = list(_runs(checkpoint, tensors, parameters, scales or {}))
    if not runs:
        return Rounding()
    device = runs[0].to.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # before other streams write what this one has made
    block_bytes = max(_num_bytes(run) for run in runs)
    todo, lock = iter(runs), threading.Lock()

    def take() -> _Run | None:
        with lock:
            return next(todo, None)

    lanes = [
        _Lane(device, block_bytes)
        for _ in range(min(host_threads(_MAX_THREADS[device.type]), len(runs)))
    ]
    with ThreadPoolExecutor(len(lanes)) as pool:
        spoilt = [name for names in pool.map(lambda lane: lane.work(take), lanes) for name in names]
    if spoilt:
        raise checkpoint.not_finite(min(spoilt))
    rounding = Rounding().join(lane.rounding for lane in lanes)
    if device.type == "cuda" and scales:
        del lanes
        torch.cuda.empty_cache()  # no other stream could use what lies in the lanes' own
    return rounding


class _Lane:
    """One reading thread's blocks of memory and its stream."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        gpu = device.type == "cuda"
        empty = torch.empty(block_bytes, dtype=torch.uint8, pin_memory=gpu)
        self._blocks = [empty, torch.empty_like(empty, pin_memory=True)] if gpu else [empty]
        self._on_device = torch.empty_like(empty, device=device) if gpu else None
        self._copied = [torch.cuda.Event(), torch.cuda.Event()] if gpu else []
        self._stream = torch.cuda.Stream(device) if gpu else None
        self._turn = 0
        self.rounding = Rounding()

    def work(self, take: Callable[[], _Run | None]) -> list[str]:
        """Reads until there is no run left; returns the names of tensors that are not finite."""
        finite: dict[str, Tensor] = {}
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.no_grad(), on_stream:
            while (run := take()) is not None:
                rows = self._rows(run)
                found = all_numbers(rows) if rows.dtype == torch.uint8 else all_finite(rows)
                finite[run.source] = finite.get(run.source, found) & found
                if run.scales is None:
                    run.to.copy_(rows if run.cols is None else rows[..., run.cols])
                    continue
                # The first launch of a kernel compiles it: once is enough.
                with _QUANTISING if self._stream is not None else nullcontext():
                    squares = CodePlaces(run.to, run.scales).put(rows, run.cols)
                self.rounding.add(run.name, squares)
            if self._stream is not None:
                self._stream.synchronize()
            return [name for name, value in finite.items() if not value]

    def _rows(self, run: _Run) -> Tensor:
        """A run's rows in their stored dtype, on the parameter's device."""
        self._turn = (self._turn + 1) % len(self._blocks)
        block = self._blocks[self._turn][: _num_bytes(run)]
        if self._stream is not None:
            self._copied[self._turn].synchronize()
        _read(run, block.numpy().data)
        if self._on_device is not None:
            block = self._on_device[: len(block)].copy_(block, non_blocking=True)
            self._copied[self._turn].record()
        return block.view(run.stored.dtype).view(run.shape)


def _read(run: _Run, block: memoryview) -> None:
    at = run.stored.offset + run.begin * _row_bytes(run.stored)
    with run.stored.path.open("rb", buffering=0) as file:
        while block:
            count = os.preadv(file.fileno(), [block], at)
            if count == 0:
                raise ValueError(
                    f"{run.stored.path} must be a complete safetensors file, got its end in "
                    f"{run.source}"
                )
            block, at = block[count:], at + count


def _runs(
    checkpoint: HFCheckpoint,
    tensors: Iterable[RankTensor],
    parameters: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
) -> Iterator[_Run]:
    """Cuts all pieces into runs; sets rows without a source to zero."""
    filled: set[int] = set()
    for tensor in tensors:
        parameter = parameters[tensor.name]
        if id(parameter) in filled:  # tied
            continue
        filled.add(id(parameter))
        parameter.data[tensor.num_rows :] = 0
        units = tensor.units_of(parameter.data)
        for piece in tensor.pieces:
            if piece.width:
                window = slice(piece.begin, piece.begin + piece.width)
                stored, held = checkpoint.stored(piece.source), scales.get(tensor.name)
                is_wide = held is not None and stored.dtype != torch.uint8
                of = tensor.units_of(held)[:, window] if held is not None and is_wide else None
                yield from _cut(tensor.name, piece, stored, units[:, window], of)


def _cut(
    name: str, piece: Piece, stored: StoredTensor, to: Tensor, scales: Tensor | None
) -> Iterator[_Run]:
    """Whole units as long as a block holds one, else rows of a unit."""
    rows = max(1, _BLOCK_BYTES // _row_bytes(stored))
    units = max(1, rows // piece.width)
    for unit in range(0, len(to), units):
        for row in range(0, piece.width, rows):
            begin = piece.rows.start + unit * piece.width + row
            part = to[unit : unit + units, row : row + rows]
            of = None if scales is None else scales[unit : unit + units, row : row + rows]
            yield _Run(piece.source, stored, begin, piece.cols, part, name, of)


def _num_bytes(run: _Run) -> int:
    return run.to.shape[0] * run.to.shape[1] * _row_bytes(run.stored)


def _row_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape[1:]) * stored.dtype.itemsize
