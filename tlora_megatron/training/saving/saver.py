"""Saves jobs while they train on: a snapshot between two rounds, files written beside the next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from tlora_megatron import timeline
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.formats.atomic_directory import always
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.saving.snapshot import (
    BUFFERS,
    Arena,
    HostMemory,
    Snapshot,
    SnapshotTaker,
    save_memory_numel,
)
from tlora_megatron.training.saving.writer import Writer


def _nothing(_: Snapshot) -> None:
    """Writes nothing more."""


class Target(NamedTuple):
    """Something to be written of a snapshot."""

    buffers: tuple[str, ...]
    """The buffers that it needs."""
    write: Callable[[Snapshot], int]
    """Writes it and returns the number of bytes; runs on the writer's thread."""
    on_error: Callable[[Exception], None]
    """Called on the thread that trains if the disk refused or a value was not finite."""
    on_done: Callable[[], None] = always
    """Called there once it is written."""
    write_rest: Callable[[Snapshot], None] = _nothing
    """Writes what nobody waits for, on the writer's thread; must not raise."""
    clean_up: Callable[[], None] = always
    """Settles it or removes what it replaces, on the writer's thread, ahead of the job's next save;
    must not raise."""


_NEWS = range(0)
"""In the place of memory: something was written meanwhile."""


@dataclass(kw_only=True, slots=True)
class SavingTimes:
    """Counts and seconds of a run's saves, on the writer."""

    stops: int = 0
    """Times that the training stood still for saves, of however many jobs."""
    longest_stop_s: float = 0.0
    stopped_s: float = 0.0
    """Sum over the stops."""
    drain_s: float = 0.0
    """Waiting until everything is on the disk: at the end, or because somebody asked for it."""
    writes: int = 0
    """Checkpoints and adapters written."""
    written_bytes: int = 0
    writer_s: float = 0.0
    """The writing threads' own time, all together, beside the training."""


class Saver:
    """Takes snapshots of jobs and has them written. Every rank makes every call of `save`.

    Only the writer's rank has memory and a thread. A job is saved again once its last save is
    written; a job that finds no memory free waits for it.

    Args:
        jobs: all that may be saved; of others `expect` must be told.
        on_wait: called before a wait for memory, and whenever something was written meanwhile: a
            slow disk is no run that hangs.
    """

    def __init__(
        self,
        jobs: Sequence[JobState],
        spec: Backbone,
        groups: ParallelGroups,
        memory_gb: float | None,
        *,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.times = SavingTimes()
        self._taker = SnapshotTaker(spec, groups)
        self._device = groups.device
        self._is_writer = groups.is_writer
        self._writer = Writer()
        self._on_wait = on_wait
        self._open: Counter[str] = Counter()
        """Snapshots of each job that are not written yet."""
        self._outcomes: list[Callable[[], None]] = []
        """Outcomes that the training thread has yet to be told, in the order of writing."""
        self._memory_gb = memory_gb
        self._memory: HostMemory | None = None
        if self._is_writer:
            sizes = [self._taker.numel(job.spec.lora) for job in jobs]
            self._arena = Arena(save_memory_numel(sizes, memory_gb))
            self._memory = HostMemory(self._arena.numel, groups.device)

    def expect(self, *loras: LoraSpec) -> None:
        """Makes sure that the snapshot of each such job finds room, if none so large was known."""
        if self._memory is None:
            return
        sizes = [self._taker.numel(lora) for lora in loras]
        if max(sizes) <= self._arena.numel:
            return
        self._writer.drain()
        self._memory.close()
        self._arena = Arena(save_memory_numel(sizes, self._memory_gb))
        self._memory = HostMemory(self._arena.numel, self._device)

    def save(self, job: JobState, targets: Sequence[Target]) -> None:
        """Takes a snapshot of a job and submits what is to be written of it; collective.

        Raises:
            WriterDied: on the writer, if its thread has ended.
        """
        buffers = [name for name in BUFFERS if any(name in target.buffers for target in targets)]
        slab = job.adapter.slab
        if self._memory is None:
            self._taker.take(slab, buffers, None)
            return
        while (taken := self._writer.wait(partial(self._room, job, len(buffers)))) is _NEWS:
            self.report()  # whoever waits for another job's files need not wait for this one
        snapshot = self._taker.take(slab, buffers, self._memory.flat()[taken.start : taken.stop])
        assert snapshot is not None, "the writer has room"
        write = partial(self._write, job.name, snapshot, taken, tuple(targets))
        self._writer.submit(write, job.name)

    def can_take(self, job: JobState) -> bool:
        """True if `save` of a checkpoint would not wait for memory now; the writer knows it."""
        with self._writer.changed:
            size = self._taker.numel(job.spec.lora)
            return not self._open[job.name] and self._arena.has_room(size)

    def wait_for_room(self, job: JobState) -> None:
        """Waits on the writer until `save` of a checkpoint would not, and reports meanwhile."""
        if self._is_writer:
            while not self._writer.wait(partial(self._has_room, job)):
                self.report()

    @property
    def is_busy(self) -> bool:
        """True while something is written, or nobody has been told of it."""
        return bool(self._outcomes) or not self._writer.is_idle

    def submit(
        self,
        write: Callable[[], None] = always,
        on_done: Callable[[], None] = always,
        *,
        job: str | None = None,
    ) -> None:
        """Has a further file written behind all that was saved before, on the writer alone.

        Args:
            on_done: called on the thread that trains, once all that was saved before is written.
            job: only what was saved of this one must be there before; None = of all.
        """
        if self._is_writer:
            self._writer.submit(partial(self._run, write, on_done), job)

    def report(self) -> None:
        """Calls `on_error` or `on_done` of what was written since the last call."""
        with self._writer.changed:
            outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            outcome()

    def drain(self) -> None:
        """Waits until everything is on the disk, and reports each job's as soon as it is."""
        begin_s = time.perf_counter()
        try:
            while self._writer.wait(self._has_news):
                self.report()
            self._writer.drain()
        finally:
            self.times.drain_s += time.perf_counter() - begin_s

    def close(self) -> None:
        """Drains, ends the thread and gives the memory back; a second call does nothing."""
        self.drain()
        self._writer.close()
        if self._memory is not None:
            self._memory.close()

    @contextmanager
    def stop(self) -> Iterator[None]:
        """Counts what is inside as one stop of the training."""
        begin_s = time.perf_counter()
        with timeline.phase("saving"):
            yield
        stopped_s = time.perf_counter() - begin_s
        self.times.stops += 1
        self.times.stopped_s += stopped_s
        self.times.longest_stop_s = max(self.times.longest_stop_s, stopped_s)

    def _has_news(self) -> bool | None:
        """True if there is something to report, False if nothing will follow; None till then."""
        return True if self._outcomes else False if self._writer.is_idle else None

    def _has_room(self, job: JobState) -> bool | None:
        """True if a job can be saved, False if there is something to report; None till then."""
        if self.can_take(job):
            return True
        self._on_wait()
        return False if self._outcomes else None

    def _room(self, job: JobState, num_buffers: int) -> range | None:
        """Takes memory for a snapshot; None while there is none, or the job's last one is open."""
        taken = None
        if not self._open[job.name]:
            taken = self._arena.take(self._taker.numel(job.spec.lora, num_buffers))
        if taken is None:
            self._on_wait()
            return _NEWS if self._outcomes else None
        self._open[job.name] += 1
        return taken

    def _write(
        self, name: str, snapshot: Snapshot, taken: range, targets: Sequence[Target]
    ) -> None:
        """Writes what a snapshot was taken for, and frees its memory; on the writer's thread."""
        begin_s = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # or waiting might open the first GPU
        snapshot.wait()
        outcomes: list[Callable[[], None]] = []
        num_bytes = num_failed = 0
        for target in targets:
            try:
                num_bytes += target.write(snapshot)
            except (OSError, ValueError) as error:
                # ValueError: values that are not finite, or a folder that holds something else.
                # Without its frames: they hold the job, and it would hold them.
                outcomes.append(partial(target.on_error, error.with_traceback(None)))
                num_failed += 1
            else:
                outcomes.append(target.on_done)
        with self._writer.changed:
            self._outcomes += outcomes
            self._writer.changed.notify_all()
        for target in targets:
            target.write_rest(snapshot)
        with self._writer.changed:
            self.times.writes += len(targets) - num_failed
            self.times.written_bytes += num_bytes
            self.times.writer_s += time.perf_counter() - begin_s
            for target in targets:  # ahead of the job's next save
                self._writer.submit(target.clean_up, name)
            self._arena.give_back(taken)
            self._open[name] -= 1
            self._writer.changed.notify_all()

    def _run(self, write: Callable[[], None], on_done: Callable[[], None]) -> None:
        """Writes a further file, on the writer's thread."""
        write()
        with self._writer.changed:
            self._outcomes.append(on_done)
