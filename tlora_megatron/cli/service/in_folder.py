"""A service whose folder is on this host: its store and files are read and written directly."""

from __future__ import annotations

import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_megatron.cli.service.ports import (
    ADAPTER,
    Accepted,
    JobRow,
    RequestedAction,
    Row,
    missing_job,
    warn,
)
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.service.home import Home

if TYPE_CHECKING:
    from tlora_megatron.service.prepare.submission import Submission
    from tlora_megatron.service.store import Job, NewJob, Store


_PAGE = 1000
_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderService:
    """A service by its folder and store."""

    look_every_s = 0.1

    def __init__(self, home: Home, store: Store, how_to_serve: str) -> None:
        self._home, self._store = home, store
        self._how_to_serve = how_to_serve

    @property
    def place(self) -> str:
        """Its folder."""
        return str(self._home.root)

    @property
    def is_served(self) -> bool:
        """True while a controller gives signs of life."""
        return self._store.lock.is_held()

    @property
    def how_to_serve(self) -> str:
        """The command that starts a controller of it."""
        return self._how_to_serve

    def submit(self, files: Sequence[str], overrides: Sequence[str], key: str) -> Accepted:
        """Submits all jobs of all files, or none."""
        submissions = _read(files, overrides)
        jobs = self._store.jobs.submit([_new_job(item, key) for item in submissions])
        return Accepted(jobs, frozenset(job.id for job in jobs if job.is_new))

    def find(self, name: str) -> JobRow:
        """The job of an id, whoever's it is, or of a name among the own ones."""
        from tlora_megatron.service.store import NotFound

        for look in (self._store.jobs.find, self._store.jobs.get):
            with suppress(NotFound, UnicodeEncodeError):  # the second: bytes that are no text
                return look(name)
        raise missing_job(name)

    def get(self, jobs: Sequence[str]) -> list[JobRow]:
        """The jobs of these ids, as they are now."""
        return [self._store.jobs.get(job) for job in jobs]

    def all(self, states: Sequence[str] | None) -> Iterator[Job]:
        """All jobs in these states (None: in any), the first submitted first."""
        from tlora_megatron.service.store import JobState

        wanted = None if states is None else [JobState(state) for state in states]
        after = 0
        while True:
            page = self._store.jobs.page(states=wanted, after=after, limit=_PAGE)
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].number

    def counts(self) -> Mapping[Any, int]:
        """Number of jobs in each state that has any."""
        return self._store.jobs.counts()

    def news(self) -> object:
        """The number of the last event."""
        return self._store.events.last()

    def request_action(self, jobs: Sequence[JobRow], action: RequestedAction) -> list[JobRow]:
        """Notes the action for all jobs or for none."""
        with self._store.transaction():
            return [self._store.jobs.request_action(job.id, action, by="tlora") for job in jobs]

    def history(self, job: JobRow, *, follow: bool) -> Iterator[Row]:
        """The events of a job and its steps."""
        from tlora_megatron.service.history import History

        history = History(self._store, self._home, job.id)
        for told in history.follow() if follow else history.read()[0]:
            yield told.row

    def fetch_adapter(self, job: JobRow, out: Path) -> None:
        """Copies the adapter of a finished job."""
        folder = self._home.job(job.id) / ADAPTER
        if not folder.is_dir():
            raise RuntimeError(
                f"the adapter of job {job.name} must lie in {folder}, got nothing there"
            )
        _copy(folder, out)


def _read(files: Sequence[str], overrides: Sequence[str]) -> list[Submission]:
    """The jobs of all files; warns of each setting that a service overlooks."""
    from tlora_megatron.service.prepare.submission import read_submissions

    jobs: list[Submission] = []
    sentences: list[str] = []
    for path in files:
        try:
            found, told = read_submissions(path, overrides)
        except ConfigError as error:
            raise ConfigError(str(error) if path in str(error) else f"{path}: {error}") from error
        jobs += found
        sentences += told
    refuse_duplicates([job.name for job in jobs])
    warn(dict.fromkeys(sentences))
    return jobs


def refuse_duplicates(names: Sequence[str]) -> None:
    """Refuses files that name a job twice; raises `ConfigError` for the first such name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"FILE... must name job {name!r} once, got it {count} times; submit the files one "
                "by one, each with its own --set name=NAME"
            )


def _new_job(submission: Submission, key: str) -> NewJob:
    from tlora_megatron.service.store import NewJob

    return NewJob(
        name=submission.name,
        document=submission.row(),
        base=submission.base_key,
        key=f"{key}/{submission.name}",
        schedule=asdict(submission.job_spec().service),
    )


def _copy(source: Path, out: Path) -> None:
    """Copies the plain files of a folder into a new one, which appears when all are there."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        for name in sorted(os.listdir(source)):
            _copy_file(source / name, partial / name)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_file(source: Path, target: Path) -> None:
    with open(os.open(source, _NO_LINK), "rb") as reader, target.open("xb") as writer:
        if not stat.S_ISREG(os.fstat(reader.fileno()).st_mode):
            raise RuntimeError(f"an adapter must consist of plain files, got {source}")
        shutil.copyfileobj(reader, writer)
