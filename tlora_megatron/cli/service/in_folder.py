"""A service whose folder is on this host: found, opened, and its store and files used directly."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tlora_megatron.cli.tables import open_console, refuse_duplicates
from tlora_megatron.config.documents import read_document
from tlora_megatron.config.job_rows import Acted, Action, JobState, is_address
from tlora_megatron.config.load import split_sweep
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.service import home as homes

if TYPE_CHECKING:
    from tlora_megatron.client import Job as ClientJob
    from tlora_megatron.service.prepare.submission import Submission
    from tlora_megatron.service.store import Job, NewJob, Store

ADAPTER = "adapter"
ONE_BY_ONE = "submit the files one by one, each with its own --set name=NAME"
_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
Row = dict[str, Any]
JobRow: TypeAlias = "Job | ClientJob"
"""A job as commands show it."""


class Accepted(NamedTuple):
    jobs: Sequence[JobRow]
    new: frozenset[str]
    """Ids of those that it made; the others' key came before."""


class FolderService:
    """A service by its folder and store."""

    look_every_s = 0.1
    """How often to ask it for what is new."""

    def __init__(self, home: homes.Home, store: Store) -> None:
        self.home, self.store = home, store
        self.place = str(home.root)
        self.how_to_serve = serve_command(home.root)
        """The command that starts a controller of it."""

    @property
    def is_served(self) -> bool:
        """True while a controller gives signs of life."""
        return self.store.lock.is_held()

    def submit(self, files: Sequence[str], overrides: Sequence[str], key: str) -> Accepted:
        """Submits all jobs of all files, or none."""
        jobs = self.store.jobs.submit(_new_jobs(_read(files, overrides), key))
        return Accepted(jobs, frozenset(job.id for job in jobs if job.is_new))

    def submit_sweep(self, path: str, overrides: Sequence[str], key: str) -> dict[str, Any]:
        """Submits all trials of a sweep's file, or none; returns how it stands."""
        from tlora_megatron.service import sweeps
        from tlora_megatron.service.prepare.submission import split_submissions
        from tlora_megatron.service.store import LOCAL

        sweep, jobs = split_sweep(read_document(Path(path), overrides=overrides))
        found, told = split_submissions(jobs, Path(path).resolve().parent)
        warn(told)
        own = sweeps.sweep_id(LOCAL, key)
        with self.store.transaction():
            rows = self.store.jobs.submit(_new_jobs(found, key, {"sweep": own}))
            sweeps.add_sweep(self.store, own, sweep, rows)
        return self.sweep(own)

    def sweep(self, name: str) -> dict[str, Any]:
        """How a sweep of an id or a name stands."""
        from tlora_megatron.service import sweeps

        return sweeps.shown_sweep(sweeps.find_sweep(self.store, name, None), self.home)

    def sweeps(self) -> list[dict[str, Any]]:
        """How all sweeps stand, the newest first."""
        from tlora_megatron.service import sweeps

        return [sweeps.shown_sweep(one, self.home) for one in sweeps.sweeps_of(self.store, None)]

    def find(self, name: str) -> JobRow:
        """The job of an id, whoever's it is, or of a name among the own ones."""
        from tlora_megatron.service.store import NotFound

        for look in (self.store.jobs.find, self.store.jobs.get):
            with suppress(NotFound, UnicodeEncodeError):  # the second: bytes that are no text
                if (found := look(name)).removed_at is None:
                    return found
        others = [job for job in self.all(None) if job.name == name]
        remedy = " or ".join(f"{job.id}, which is {job.tenant}'s" for job in others[-3:])
        raise missing_job(name, remedy and f"take the id {remedy}")

    def get(self, jobs: Sequence[str]) -> list[JobRow]:
        """The jobs of these ids, as they are now."""
        return [self.store.jobs.get(job) for job in jobs]

    def all(self, states: Sequence[str] | None, tenant: str | None = None) -> Iterator[Job]:
        """All jobs in these states (None: in any), the first submitted first."""
        wanted = None if states is None else [JobState(state) for state in states]
        return self.store.jobs.each(wanted, tenant)

    def disk(self, states: Sequence[str] | None) -> Iterator[tuple[JobRow, Mapping[str, int]]]:
        """Jobs, and the bytes of each entry of their folders."""
        return ((job, self.home.job_bytes(job.id)) for job in self.all(states))

    def why(self, jobs: Sequence[JobRow]) -> Mapping[str, str]:
        """Id -> why a job is still in the queue, of those of which it is known."""
        known = self.store.boards.why_jobs_wait()
        return {job.id: known[job.id] for job in jobs if job.id in known}

    def speeds(self, jobs: Sequence[JobRow]) -> Mapping[str, Mapping[str, float | None]]:
        """Id -> measured and promised tokens a second of a job in a gang, as in `ShownJob`."""
        known = self.store.boards.speeds_of_jobs()
        return {job.id: known[job.id] for job in jobs if job.id in known}

    def counts(self) -> Mapping[Any, int]:
        """Number of jobs in each state that has any."""
        return self.store.jobs.counts()

    def news(self) -> object:
        """The number of the last event."""
        return self.store.events.last()

    def act(self, action: Action, jobs: Sequence[JobRow]) -> Acted[Any]:
        """Asks something of jobs, or removes them; each on its own."""
        from tlora_megatron.service.removal import act_on

        return act_on(self.home, self.store, action, [job.id for job in jobs], "tlora")

    def history(self, job: JobRow, *, follow: bool) -> Iterator[Row]:
        """The events of a job and its steps."""
        from tlora_megatron.service.history import History

        history = History(self.store, self.home, job.id)
        for told in history.follow() if follow else history.read()[0]:
            yield told.row

    def fetch_adapter(self, job: JobRow, out: Path) -> None:
        """Copies the adapter of a finished job."""
        folder = self.home.job(job.id) / ADAPTER
        if not folder.is_dir():
            raise RuntimeError(
                f"the adapter of job {job.name} must lie in {folder}, got nothing there"
            )
        _copy(folder, out)


def _new_jobs(items: Sequence[Submission], key: str, more: Mapping[str, Any] = {}) -> list[NewJob]:
    """The jobs of one submit, with more settings of their scheduling."""
    from tlora_megatron.service.store import NewJob

    return [
        NewJob(
            name=item.name,
            document=item.row(),
            base=item.base_key,
            key=f"{key}/{item.name}",
            schedule={**asdict(item.job_spec().service), **more},
        )
        for item in items
    ]


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
    refuse_duplicates("FILE...", [job.name for job in jobs], ONE_BY_ONE)
    warn(dict.fromkeys(sentences))
    return jobs


def _copy(source: Path, out: Path) -> None:
    """Copies the plain files of a folder into a new one, which appears when all are there."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        for name in sorted(os.listdir(source)):
            with open(os.open(source / name, _NO_LINK), "rb") as reader:
                if not stat.S_ISREG(os.fstat(reader.fileno()).st_mode):
                    raise RuntimeError(
                        f"an adapter must consist of plain files, got {source / name}"
                    )
                with (partial / name).open("xb") as writer:
                    shutil.copyfileobj(reader, writer)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def missing_job(name: str, remedy: str = "") -> ConfigError:
    remedy = remedy or "`tlora jobs --all` lists them"
    return must("NAME", "be the id or the name of a job", name, remedy)


def warn(sentences: Iterable[str]) -> None:
    """Prints sentences about settings that have no effect."""
    console = open_console(stderr=True)
    for sentence in sentences:
        console.print(f"warning: {sentence}", style="yellow")


def add_service_argument(parser: argparse.ArgumentParser, *, also: str = "") -> None:
    parser.add_argument(
        "--service",
        metavar="DIR",
        help=f"folder of the service{also and f', {also}'} (default: ${homes.VARIABLE}, or "
        f"{homes.DEFAULT})",
    )


@contextmanager
def open_service(args: argparse.Namespace) -> Iterator[FolderService]:
    """Opens a service that is there; raises `ConfigError`, inside for what the store refuses."""
    root = service_folder(args.service)
    if not _is_service(root, getattr(args, "waits_s", 0.0)):
        named = args.service or os.environ.get(homes.VARIABLE) or ""
        looks_remote = re.fullmatch(r"[\w.-]+:\d+/?", named) is not None
        remedy = f"start one with: {serve_command(root)}"
        remedy = f"an address begins with http://, as in http://{named}" if looks_remote else remedy
        raise must("--service", "be the folder of a service", str(root), remedy)
    # Not at the top: it takes a third of a second, and `--help` needs none of it.
    from tlora_megatron.service.store import Refusal, open_store

    found = homes.Home.open(root)
    with open_store(homes.store_place(found)) as store:
        try:
            yield FolderService(found, store)
        except Refusal as error:
            raise ConfigError(str(error)) from error


def _is_service(root: Path, waits_s: float) -> bool:
    """True if a folder is a service's, or becomes one soon: a service may just be starting."""
    until_s, told = time.monotonic() + waits_s, False
    while not any((root / name).is_file() for name in ("store.sqlite", homes.DATABASE)):
        if time.monotonic() >= until_s:
            return False
        if not told:
            console = open_console(stderr=True)
            console.print(f"waiting {waits_s:g} s for a service that starts at {root}")
        told = True
        time.sleep(0.1)
    return True


def service_folder(given: str | None) -> Path:
    """The folder, perhaps missing, that `--service`, the environment or the default names."""
    named = given or os.environ.get(homes.VARIABLE) or homes.DEFAULT
    if is_address(named):
        raise must("--service", "be a folder of this host for this command", named)
    return Path(named).expanduser().absolute()


def serve_command(root: Path) -> str:
    """Returns the shortest command that serves a folder."""
    named = os.environ.get(homes.VARIABLE) or homes.DEFAULT
    is_default = not is_address(named) and root == service_folder(named)
    return "tlora serve" if is_default else f"tlora serve --service {root}"
