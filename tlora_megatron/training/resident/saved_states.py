"""States that clients have saved under names: read on a thread, and copied to a GPU beside work."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.layers.slab import Fill
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.driven_jobs import DrivenState
from tlora_megatron.training.driven_requests import Answer, Category, Clients, Request
from tlora_megatron.training.formats.checkpoint import find_checkpoint
from tlora_megatron.training.formats.peft import CONFIG_NAME
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.saving.saver import Target
from tlora_megatron.training.saving.snapshot import Snapshot
from tlora_megatron.training.saving.writer import FOLDER, SAMPLED, publish, settle

logger = logging.getLogger(__name__)

_THREADS = 2
"""That read: the thread that trains has to get its turn in Python."""


class ReadState(NamedTuple):
    """A state that a job can take up."""

    buffers: dict[str, Tensor]
    """Buffers of its slab on this rank, on the host."""
    updates: int


class StateLoad:
    """One state on its way into a job."""

    def __init__(
        self, job: DrivenState, number: int, folder: Path, spec: Backbone, *, moments: bool
    ) -> None:
        self.number = number
        self.found: ReadState | None = None
        self.error: str | None = None
        """Why there is none."""
        arguments = (job, folder, spec, moments)
        name = "tlora-load-state"
        threading.Thread(target=self._work, args=arguments, name=name, daemon=True).start()

    @property
    def state(self) -> int | None:
        """None while it is read, 1 once it is there, negative if it cannot be read."""
        if self.error is not None:
            return -1
        return None if self.found is None else 1

    def _work(self, job: DrivenState, folder: Path, spec: Backbone, moments: bool) -> None:
        try:
            found = find_checkpoint(folder)
            if found is None:
                raise ValueError(f"path must lead to a state that was saved, got {folder.name}")
            found.check_fits(job.spec, job.data, spec)
            updates = int(found.state["progress"]["updates"]) if moments else 0
            buffers = found.read(job.adapter.slab, _THREADS, moments=moments)
            self.found = ReadState(buffers, updates)
        except Exception as error:  # whatever is wrong with one state, the others train on
            is_told = isinstance(error, ValueError | OSError)
            text = str(error) if is_told else f"{type(error).__name__}: {error}"
            self.error = text.replace(f"{folder}", folder.name)


_STATES = "states"


class StateFiles:
    """Saves jobs under names that their clients give, and loads states."""

    def __init__(
        self, loop: Loop, clients: Clients, answer: Callable[[DrivenState, int, Answer], None]
    ) -> None:
        self._loop = loop
        self._clients = clients
        self._answer = answer
        self._loads: dict[str, StateLoad] = {}
        """States on their way into jobs, by the jobs' names."""
        self.full: set[str] = set()
        """Jobs of which no snapshot can be taken now without a wait."""

    def save_state(self, job: DrivenState, number: int, request: Request) -> bool:
        """Saves weights, moments and progress; False if it must wait for the disk."""
        folder = self._folder(job, _STATES, request)
        may_replace = bool(request.params.get("overwrite", False))
        check = partial(_check_name, folder, job.name, number, may_replace=may_replace)
        job.saving = number
        target = self._loop.files.state(job, folder, self._failed(job, number), check)
        job.saving = 0
        return self._save(job, number, target, folder)

    def save_for_sampler(self, job: DrivenState, number: int, request: Request) -> bool:
        """Publishes the adapter, for PEFT, by a name; False if it must wait for the disk.

        It is answered once it can be read; that it is on the disk comes after. Where only samplers
        read it and the base has bf16, they get that, in a third of the time, and its fp32 weights
        come after, too.
        """
        name, files = self._folder(job, FOLDER, request), self._loop.files
        failed, permit = self._failed(job, number), partial(files.permit, job.name)
        dtype = self._loop.super_model.bank.dtype
        is_sampled = bool(request.params.get("only_sampled")) and dtype == torch.bfloat16
        rest: list[Path] = []

        def write(snapshot: Snapshot) -> int:
            def write_folder(folder: Path) -> int:
                if not is_sampled:
                    return files.adapter(job, failed, folder, durable=False).write(snapshot)
                rest.append(folder)
                inner = files.adapter(job, failed, folder / SAMPLED, durable=False, dtype=dtype)
                size_bytes = inner.write(snapshot)
                if not (config := folder / CONFIG_NAME).exists():  # it is an adapter's folder
                    shutil.copyfile(folder / SAMPLED / CONFIG_NAME, config)
                return size_bytes

            return publish(name, number, write_folder, permit)

        def write_rest(snapshot: Snapshot) -> None:
            for folder in rest:
                try:
                    files.adapter(job, failed, folder, durable=False).write(snapshot)
                except (OSError, ValueError) as error:
                    logger.warning("version %d of %s can only be sampled: %s", number, name, error)
                    (folder / CONFIG_NAME).unlink(missing_ok=True)  # so `settle` sees it

        target = files.adapter(job, failed, name)
        settled = partial(settle, name, number, permit)
        target = target._replace(write=write, write_rest=write_rest, clean_up=settled)
        return self._save(job, number, target, name)

    def load_state(self, job: DrivenState, number: int, request: Request) -> bool:
        """Begins to read a state on a thread; the job waits for it, the others train on."""
        folder = self._clients.state_folder(str(request.params["path"]))
        moments = bool(request.params.get("optimizer", True))
        self._loads[job.name] = StateLoad(job, number, folder, self._loop.backbone, moments=moments)
        return False

    def loads(self) -> dict[str, int | None]:
        """How far states are read, in the form that `staging.Readiness` takes; by jobs' names."""
        return {name: load.state for name, load in self._loads.items()}

    def is_loading(self, job: DrivenState) -> bool:
        """True if a job waits for a state."""
        return job.name in self._loads

    def take_up(self, job: DrivenState, *, is_read: bool) -> None:
        """Fills a job with the state that all ranks have read, or that some cannot read.

        Its moments and their count go with it, or begin anew; its gradient is dropped.
        """
        load = self._loads.pop(job.name)
        found = load.found
        if not is_read or found is None:
            error = load.error or "some process could not read the state"
            job.finish(load.number)
            self._answer(job, load.number, Answer(error=error, category="user"))
            return
        slab, model = job.adapter.slab, self._loop.super_model
        slab.wait_for_readers()
        for buffer, flat in found.buffers.items():
            slab.put(buffer, flat)
        slab.zero_grad()
        job.updates = found.updates
        model.bank.refresh(next(i for i, other in enumerate(model.jobs) if other is job))
        job.moved(load.number, applied=True)
        # The state that it read may be replaced, and a replay would take that.
        self._loop.saves.make_due(job.name)
        self._answer(job, load.number, Answer(values={"step": job.updates}))

    def forget(self, names: Collection[str]) -> None:
        """Drops what was read for jobs other than these, which have left."""
        for name in [name for name in self._loads if name not in names]:
            del self._loads[name]

    def _folder(self, job: DrivenState, kind: str, request: Request) -> Path:
        return self._loop.files.folder(job) / kind / str(request.params["name"])

    def _save(self, job: DrivenState, number: int, target: Target, folder: Path) -> bool:
        if job.name in self.full:
            return False
        self.full.add(job.name)
        path = f"jobs/{job.name}/{folder.parent.name}/{folder.name}"
        answer = Answer(values={"path": path, "step": job.step})
        done = partial(self._answer, job, number, answer)
        self._loop.saver.save(job, [target._replace(on_done=done)])
        job.finish(number)
        return True

    def _failed(self, job: DrivenState, number: int) -> Callable[[Exception], None]:
        def answer(error: Exception) -> None:
            category: Category = "user" if isinstance(error, ValueError) else "server"
            self._answer(job, number, Answer(error=str(error), category=category))

        return answer


def _check_name(folder: Path, job: str, number: int, *, may_replace: bool) -> None:
    """Refuses a name that another request has used; runs on the writer's thread."""
    if may_replace or not folder.exists():
        return
    try:
        journal = json.loads((folder / "state.json").read_text())["progress"]["journal"]
    except (OSError, ValueError, KeyError):
        journal = {}
    if (journal.get("job"), journal.get("saved")) != (job, number):
        raise ValueError(f"name must be new, or overwrite true, got {folder.name!r}")


_BUFFERS, _BUFFER_NUMEL = 12, 1 << 21
"""96 MB in all: a buffer for each thread that reads, and some on their way. A round fills the GPU's
queue, and a copy that is begun then waits for room in it (60 ms on an H200): few large ones."""


class _Buffer(NamedTuple):
    memory: Tensor
    copied: torch.cuda.Event
    """The GPU has what was last put there."""


class LockedRing:
    """Copies values of the host to a GPU on a stream of its own; any thread may copy.

    Its buffers are locked once. Locking memory stops the whole device, and torch would lock other
    sizes for other jobs and keep them all.

    Args:
        memory: fp32 `[buffers, elements]`, page-locked.
    """

    def __init__(self, stream: torch.cuda.Stream, memory: Tensor) -> None:
        self.stream = stream
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        """The one that was used longest ago comes first."""
        for row in memory:
            self._free.put(_Buffer(row, torch.cuda.Event(blocking=True)))
        self.numel = memory.shape[1]
        """Elements that one copy brings at most."""

    @classmethod
    def on(cls, device: torch.device) -> LockedRing:
        """Locks the memory, for copies to a GPU."""
        memory = torch.empty(_BUFFERS, _BUFFER_NUMEL, pin_memory=True)
        return cls(torch.cuda.Stream(device), memory)

    def copy(self, target: Tensor, fill: Fill) -> None:
        """Begins to copy what is filled in into flat fp32 memory of the GPU.

        Waits for the GPU where it has not taken the buffers' last values yet.
        """
        if target.numel() <= self.numel:
            self._copy_part(target, fill)
            return
        values = torch.empty(target.numel())
        fill(values)
        for into, part in zip(target.split(self.numel), values.split(self.numel), strict=True):
            self._copy_part(into, partial(_copy, part))

    def _copy_part(self, target: Tensor, fill: Fill) -> None:
        buffer = self._free.get()
        try:
            buffer.copied.synchronize()
            locked = buffer.memory[: target.numel()]
            fill(locked)
            with torch.cuda.stream(self.stream):
                target.copy_(locked, non_blocking=True)
                buffer.copied.record(self.stream)
        finally:
            self._free.put(buffer)


def _copy(values: Tensor, room: Tensor) -> None:
    room.numpy()[:] = values.numpy()
