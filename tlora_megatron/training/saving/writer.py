"""Threads that write what a run has to write, and versions of adapters, which never change.

    jobs/ID/sampler/.versions/00000123    what request 123 of the job's client has published
    .../00000123/.sampled                 the same in bf16, where only a sampler waited for it
    jobs/ID/sampler/NAME                  a link to the version that was published last by this name
    jobs/ID/sampler/.durable              the number up to which they are on the disk

A sampler may read a folder again at any time, so what lies under a path must stay what it is. A
version can be sampled from before it is on the disk. If the machine falls between the two, its
request is carried out again: no checkpoint of the job that counts it was written before.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from tlora_megatron.files import flush, read_json, write_json
from tlora_megatron.training.formats.atomic_directory import Permit, replace_link

logger = logging.getLogger(__name__)

FOLDER = "sampler"
"""In a job's folder: names, and the versions that they lead to."""
_VERSIONS = ".versions"
SAMPLED = ".sampled"
"""In a version's folder: what is there before the fp32 weights are."""
_NUMBER = re.compile(r"\d{8,}")


class AdapterVersion(NamedTuple):
    """Weights of a job that were published once."""

    job: str
    number: int
    """Of the request that published them; whoever carries it out again gets the same bits."""

    def __str__(self) -> str:
        return f"{self.job}@{self.number}"

    def folder(self, jobs: Path) -> Path:
        """Its folder; `jobs` holds all jobs'."""
        return jobs / self.job / FOLDER / _VERSIONS / f"{self.number:08d}"

    def sampled_folder(self, jobs: Path) -> Path:
        """What samplers read: the one in 16 bits where there is one."""
        inner = self.folder(jobs) / SAMPLED
        return inner if inner.is_dir() else inner.parent

    @classmethod
    def parse(cls, text: str) -> AdapterVersion:
        """Reads what `str` gives."""
        job, _, number = text.rpartition("@")
        return cls(job, int(number))

    @classmethod
    def of(cls, folder: Path) -> AdapterVersion | None:
        """The version whose folder it is; None if it is another one's."""
        job = folder.parent.parent.parent
        if folder.parent.name != _VERSIONS or not _NUMBER.fullmatch(folder.name):
            return None
        return cls(job.name, int(folder.name))


_DURABLE = ".durable"


def publish(name: Path, number: int, write: Callable[[Path], int], permit: Permit) -> int:
    """Writes a version unless it is on the disk, and lets its name lead to it; `settle` is next.

    A version that is there stays: it has the same bits, and somebody may be reading it. A name that
    leads to a later version stays, too: the request is then carried out a second time.

    Args:
        write: writes the folder that it is given, as a whole, unless it holds the same bits;
            returns the number of bytes.
    """
    durable = read_json(name.parent / _DURABLE) or 0
    if number <= durable:
        return 0
    folder = name.parent / _VERSIONS / f"{number:08d}"
    size_bytes = write(folder)
    before = AdapterVersion.of(published_folder(name))
    if before is None or before.number < number:
        replace_link(name, f"{_VERSIONS}/{folder.name}", permit)
    return size_bytes


def settle(name: Path, number: int, permit: Permit) -> None:
    """Waits until a version and its name are on the disk, and notes that.

    Must come before any checkpoint that counts its request. Logs what the disk refuses: the version
    is there all the same, unless the machine falls.
    """
    folder, noted = name.parent / _VERSIONS / f"{number:08d}", name.parent / _DURABLE
    try:
        above = folder, folder.parent, name.parent, name.parent.parent
        for path in (*folder.rglob("*"), *above):
            with suppress(FileNotFoundError):  # it was deleted, or never written
                flush(path)
        is_whole = any(path.is_file() for path in folder.glob("[!.]*"))
        if is_whole and number > (read_json(noted) or 0):
            permit()
            write_json(noted, number)
    except (OSError, ValueError) as error:
        logger.warning("version %d of %s may not be on the disk: %s", number, name, error)


def published_folder(name: Path) -> Path:
    """The folder that a name leads to now; itself where it is a folder."""
    try:
        return name.parent / os.readlink(name)
    except OSError:
        return name


def versions_of(job_folder: Path) -> list[AdapterVersion]:
    """The versions of a job that are on the disk, oldest first."""
    folder = job_folder / FOLDER / _VERSIONS
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (AdapterVersion.of(folder / name) for name in names)
    return sorted(version for version in found if version is not None)


_THREADS = 2
T = TypeVar("T")


class WriterDied(RuntimeError):
    """A thread ended of an error that no single file is to blame for."""


class _Task(NamedTuple):
    run: Callable[[], None]
    job: str | None
    """Whose files it writes; None = of no job, or of several."""


class Writer:
    """Runs tasks on threads of its own; those of one job in the order in which they come.

    A task of no job begins when all before it are done, and ends before any behind it begins.

    A task deals with the errors that it expects. Any other ends its thread, and every call from
    then on raises `WriterDied`. The threads do not keep a process alive; at its regular exit what
    was submitted is still carried out.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held by whoever changes what others wait for; its waiters look anew at every task's end.
        """
        self._tasks: deque[_Task] = deque()
        self._running: set[str | None] = set()
        """The jobs of the tasks that run."""
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    def submit(self, run: Callable[[], None], job: str | None = None) -> None:
        """Has a task carried out behind those that were submitted before.

        Args:
            job: only tasks of the same job, or of none, need be done before.
        """
        with self.changed:
            self._check()
            self._tasks.append(_Task(run, job))
            if not self._threads:
                atexit.register(self._drain_at_exit)
                for number in range(_THREADS):
                    name = f"tlora-writer-{number}"
                    thread = threading.Thread(target=self._work, name=name, daemon=True)
                    self._threads.append(thread)
                    thread.start()
            self.changed.notify_all()

    def wait(self, ready: Callable[[], T | None]) -> T:
        """Waits until `ready`, which is called with the lock held, returns something but None."""
        with self.changed:
            while (found := ready()) is None:
                self._check()
                self.changed.wait()
            return found

    @property
    def is_idle(self) -> bool:
        """True if every task is done."""
        return not (self._running or self._tasks)

    def drain(self) -> None:
        """Waits until every task is done."""
        self.wait(lambda: self.is_idle or None)
        self._check()

    def close(self) -> None:
        """Carries out what was submitted and ends the threads; a second call does nothing."""
        threads, self._threads = self._threads, []
        if not threads:
            return
        atexit.unregister(self._drain_at_exit)
        self.drain()
        with self.changed:
            self._is_closing = True
            self.changed.notify_all()
        for thread in threads:
            thread.join()
        self._is_closing = False

    def _check(self) -> None:
        if self._error is not None:
            atexit.unregister(self._drain_at_exit)  # it would say this once more
            raise WriterDied(f"the writer of checkpoints has ended: {self._error}") from self._error

    def _work(self) -> None:
        while (task := self._next()) is not None:
            job = task.job
            try:
                task.run()
            except BaseException as error:
                self._error = self._error or error
            del task  # or the job that it wrote would stay in memory until the next one comes
            with self.changed:
                self._running.remove(job)
                self.changed.notify_all()

    def _next(self) -> _Task | None:
        """Waits for a task that may begin; None once there will be none."""
        with self.changed:
            while self._error is None:
                if (task := self._first_free()) is not None:
                    self._tasks.remove(task)
                    self._running.add(task.job)
                    return task
                if self._is_closing:
                    break
                self.changed.wait()
            return None

    def _first_free(self) -> _Task | None:
        """The first task that nothing that runs or was submitted before keeps waiting."""
        ahead = set(self._running)
        for task in self._tasks:
            if None in ahead or (task.job is None and ahead):
                return None
            if task.job not in ahead:
                return task
            ahead.add(task.job)
        return None

    def _drain_at_exit(self) -> None:
        try:
            self.drain()
        except WriterDied as error:
            logger.error("%s", error)
