"""Reaches the service that a command names: its folder on this host, or a service over HTTP."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tlora_megatron.cli.service.in_folder import (
    ONE_BY_ONE,
    Accepted,
    FolderService,
    JobRow,
    Row,
    add_service_argument,
    missing_job,
    open_service,
    warn,
)
from tlora_megatron.cli.tables import refuse_duplicates
from tlora_megatron.config.documents import merge, read_document
from tlora_megatron.config.job_rows import Acted, Action, JobState, is_address
from tlora_megatron.config.load import SECTIONS, split_sweep
from tlora_megatron.config.reader import ConfigError, must, nearest, unknown
from tlora_megatron.config.sections import as_job_list, read_job
from tlora_megatron.service.home import VARIABLE

if TYPE_CHECKING:
    from tlora_megatron.client import Client, Job


_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
_DATA = ("train", "eval")
Upload = Callable[[Path], str]
"""Sends a file and returns its id."""


def read_files(files: Sequence[str], overrides: Sequence[str], upload: Upload) -> dict[str, Any]:
    """One document with the jobs of all files, naming uploaded data.

    Args:
        overrides: texts `path=value` for each of them.
        upload: called once for each data file of this host, when all jobs are checked.

    Raises:
        ConfigError: for the first mistake, or if the files are of several bases.
    """
    documents = [_read(path, overrides) for path in files]
    bases = [document.get("base_model") for document in documents]
    if any(base != bases[0] for base in bases):
        rule = "be of one base: all their jobs are submitted, or none"
        raise must("FILE...", rule, bases, "submit them one by one")
    entries = [entry for document in documents for entry in document["jobs"]]
    refuse_duplicates("FILE...", [str(entry.get("name")) for entry in entries], ONE_BY_ONE)
    _send_data(entries, upload)
    found = {key: documents[0][key] for key in documents[0] if key not in ("jobs", "defaults")}
    return {**found, "jobs": entries}


def _send_data(entries: Sequence[dict[str, Any]], upload: Upload) -> None:
    """Names the uploads of data in the place of files of this host, each sent once."""
    ids: dict[Path, str] = {}

    def sent(named: Any) -> Any:
        if isinstance(named, list):
            return [sent(each) for each in named]
        if isinstance(named, Path):
            ids[named] = ids.get(named) or upload(named)
        return ids.get(named, named)

    for entry in entries:
        data = entry.get("data") or {}
        data.update({key: sent(value) for key, value in data.items()})


def _read(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """A file with defaults merged into its jobs, and absolute paths of what is on this host."""
    try:
        document = as_job_list(read_document(Path(path), overrides=overrides))
        for key in document:
            if key not in SECTIONS:
                raise unknown("", key, SECTIONS)
        entries = document.get("jobs")
        if not isinstance(entries, list) or not entries:
            raise must("jobs", "be a list of at least one job", entries)
        defaults = document.get("defaults") or {}
        folder = Path(path).resolve().parent
        jobs = [
            _entry(entry, defaults, folder, f"jobs[{index}]") for index, entry in enumerate(entries)
        ]
    except ConfigError as error:
        raise ConfigError(str(error) if path in str(error) else f"{path}: {error}") from error
    return {**document, "jobs": jobs}


def _entry(entry: Any, defaults: Any, folder: Path, place: str) -> dict[str, Any]:
    # Checked here, too: a mistake is told before gigabytes of data are sent.
    read_job(entry, None, path=place, defaults=defaults)
    merged = merge(defaults, entry)
    data = merged.get("data") or {}
    for key in _DATA:
        if key in data:
            data[key] = _here(data[key], folder)
    return merged


def _here(named: Any, folder: Path) -> Any:
    """The paths of files that are on this host; whatever else is named as it is."""
    if isinstance(named, list):
        return [_here(each, folder) for each in named]
    if isinstance(named, str) and not _FILE_ID.fullmatch(named):
        path = folder / Path(named).expanduser()
        return path.resolve() if path.is_file() else named
    return named


_FEW = 4
"""So many jobs are asked for one by one; more are looked for in lists."""
_PASSES = (429, 500)
"""Statuses from the second on, and the first, are no mistakes of whoever asks."""


class HttpService:
    """A service by its address."""

    look_every_s = 0.5
    how_to_serve = "tlora serve --http on its host"

    def __init__(self, client: Client) -> None:
        self._client = client
        self.place = client.address

    @property
    def is_served(self) -> bool:
        return self._client.page(limit=1).served

    def submit(self, files: Sequence[str], overrides: Sequence[str], key: str) -> Accepted:
        """Uploads the data that the jobs name, and submits all of them or none."""
        document = read_files(files, overrides, self._client.upload)
        made = self._client.submit(document, key=key)
        warn(made.warnings)
        return Accepted(made.jobs, frozenset(job.id for job in made.jobs if made.is_new))

    def submit_sweep(self, path: str, overrides: Sequence[str], key: str) -> dict[str, Any]:
        """Uploads the data of a sweep, and submits all of its trials or none."""
        document = read_document(Path(path), overrides=overrides)
        split_sweep(document)  # a mistake is told before data are sent
        job = _entry(document["job"], {}, Path(path).resolve().parent, "job")
        _send_data([job], self._client.upload)
        document = {key: document[key] for key in document if key not in ("parallel", "run")}
        return self._client.submit_sweep(document | {"job": job}, key=key)

    def sweep(self, name: str) -> dict[str, Any]:
        return self._client.sweep(name)

    def sweeps(self) -> list[dict[str, Any]]:
        return self._client.sweeps()

    def find(self, name: str) -> JobRow:
        from tlora_megatron.client import ServiceError

        try:
            return self._client.job(name)
        except (ValueError, UnicodeEncodeError):
            raise missing_job(name) from None
        except ServiceError as error:
            raise missing_job(name) if error.status == 404 else error from None

    def get(self, jobs: Sequence[str]) -> list[JobRow]:
        if len(jobs) <= _FEW:
            return [self._client.job(job) for job in jobs]
        found: dict[str, Job] = {}
        wanted, after = set(jobs), None
        while len(found) < len(wanted):
            page = self._client.page(after=after, limit=1000, newest_first=True)
            found |= {job.id: job for job in page.jobs if job.id in wanted}
            after = page.next
            if after is None:
                break
        return [found[job] for job in jobs]

    def all(self, states: Sequence[str] | None, tenant: str | None = None) -> Iterator[JobRow]:
        return self._client.jobs(states, tenant)

    def disk(self, states: Sequence[str] | None) -> Iterator[tuple[JobRow, Mapping[str, int]]]:
        return ((job, job.disk or {}) for job in self._client.jobs(states, disk=True))

    def why(self, jobs: Sequence[JobRow]) -> Mapping[str, str]:
        return {job.id: why for job in jobs if (why := getattr(job, "waits", None))}

    def speeds(self, jobs: Sequence[JobRow]) -> Mapping[str, Mapping[str, float | None]]:
        names = ("tokens_per_s", "promised_tokens_per_s")
        return {job.id: {name: getattr(job, name, None) for name in names} for job in jobs}

    def counts(self) -> Mapping[Any, int]:
        return self._client.page(limit=1).counts

    def news(self) -> object:
        """The jobs that are not over, and how many are in which state."""
        unfinished = [(job.id, job.state) for job in self._client.jobs() if not job.state.is_over]
        return unfinished, self.counts()

    def act(self, action: Action, jobs: Sequence[JobRow]) -> Acted[Any]:
        return self._client.act(action, [job.id for job in jobs])

    def history(self, job: JobRow, *, follow: bool) -> Iterator[Row]:
        for event in self._client.events(job.id, follow=follow):
            yield dict(event.row)

    def fetch_adapter(self, job: JobRow, out: Path) -> None:
        """Downloads the adapter of a finished job."""
        self._client.adapter(job.id, out)


Service: TypeAlias = FolderService | HttpService
"""A service that a command has opened, on this host or by its address."""


@contextmanager
def open_address(address: str) -> Iterator[HttpService]:
    """Opens the service of an address; raises `ConfigError` also for what it refuses inside."""
    from tlora_megatron.client import Client, ServiceError

    try:
        opened = Client(address)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        with opened as client:
            yield HttpService(client)
    except ServiceError as error:
        if error.status == _PASSES[0] or error.status >= _PASSES[1]:
            raise
        raise ConfigError(str(error)) from error


def add_reach_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--service` for a command that also reaches services over HTTP."""
    add_service_argument(
        parser, also="or its address, http://HOST:PORT, with a token in TLORA_TOKEN"
    )


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--state` for a command that chooses jobs."""
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        dest="states",
        metavar="S",
        help="only jobs in this state (repeatable): queued, running, failed, ...",
    )


def check_states(given: Sequence[str]) -> list[str]:
    """The states that `--state` names, or a `ConfigError`."""
    names = [str(state) for state in JobState]
    for state in given:
        if state not in names:
            raise must("--state", f"be one of {', '.join(names)}", state, nearest(state, names))
    return list(given)


@contextmanager
def reach_service(args: argparse.Namespace) -> Iterator[Service]:
    """Opens the service that `--service` names, a folder or an address."""
    named = args.service or os.environ.get(VARIABLE) or ""
    if is_address(named):
        with open_address(named) as service:
            yield service
        return
    with open_service(args) as found:
        yield found


def find_jobs(service: Service, names: Sequence[str]) -> list[JobRow]:
    """The jobs that a command names, by id or name, each once, in order; refuses unknown ones."""
    return list({job.id: job for job in map(service.find, names)}.values())
