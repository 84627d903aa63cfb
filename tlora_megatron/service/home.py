"""The folder of a service on the disk: where everything is, how it is written, where its store is.

Everything below it belongs to the service's user alone: folders are 0700, files 0600.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from tlora_megatron.config.reader import must
from tlora_megatron.files import read_json, write_json

VARIABLE = "TLORA_SERVICE"
"""Environment variable that names the folder where `--service` is not given."""
DEFAULT = "~/.tlora"

JOB_NAME = "job.json"
"""In a job's folder: its base and its document, as it was accepted."""
ARCHIVES = "cache/archives"
"""Zip files of jobs that were asked for over HTTP, the last ones."""
LEASE_NAME = "lease.json"
_JOB_ID = re.compile(r"j[0-9a-z]{1,31}")
_REMAINDER = re.compile(r"\.j[0-9a-z]{1,31}\.[0-9a-f]{12}")
_GANG = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_UPLOAD = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right of one gang to write the folder of a job."""

    gang: str
    epoch: int
    """Epoch of the gang."""
    lease: int
    """Grows by one whenever the job is given to a gang."""


@dataclass(frozen=True, slots=True)
class Home:
    """The folders and files of one service."""

    root: Path

    @classmethod
    def open(cls, root: str | Path | None = None) -> Home:
        """Opens the service's folder and makes it if it is missing;

        None = TLORA_SERVICE or `~/.tlora`.

        Raises:
            ValueError: if the folder cannot be made or used, or belongs to somebody else.
        """
        path = Path(root or os.environ.get(VARIABLE) or DEFAULT).expanduser().absolute()
        try:
            make_folder(path)
            found = path.stat()
        except OSError as error:
            raise ValueError(f"--service must be a folder that can be used, got {error}") from error
        if found.st_uid != os.geteuid():
            raise ValueError(
                f"--service must be a folder of your own, got {path}, which belongs to user "
                f"{found.st_uid}"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(
                f"--service must be closed to other users, got {path} with mode "
                f"{stat.S_IMODE(found.st_mode):04o}; chmod 700 closes it"
            )
        home = cls(path.resolve())
        for folder in (home.jobs, home.gangs, home.tokens, home.standby, home.tenants):
            make_folder(folder)
        return home

    @property
    def store(self) -> Path:
        """The SQLite file."""
        return self.root / "store.sqlite"

    @property
    def jobs(self) -> Path:
        """The folder of all jobs' folders."""
        return self.root / "jobs"

    @property
    def gangs(self) -> Path:
        """The folder of all gangs' folders."""
        return self.root / "gangs"

    @property
    def tokens(self) -> Path:
        """The cache of tokenized files."""
        return self.root / "cache" / "tokens"

    @property
    def standby(self) -> Path:
        """The folder of processes that wait for a gang."""
        return self.root / "standby"

    @property
    def tenants(self) -> Path:
        """The folder of all tenants' folders."""
        return self.root / "tenants"

    def tenant(self, tenant: str) -> Path:
        """The folder below which a tenant's jobs may name files; it may be missing."""
        return self.tenants / check_tenant(tenant)

    def upload(self, tenant: str, upload: str) -> Path:
        """The file that a tenant has uploaded; it may be missing, not misnamed."""
        return self.tenant(tenant) / "files" / _checked(upload, _UPLOAD, "id of a file")

    def job(self, job_id: str) -> Path:
        """The folder of a job; it may be missing, not misnamed (`ValueError`)."""
        return self.jobs / _checked(job_id, _JOB_ID, "id of a job")

    def remove_job(self, job_id: str, part: str = "") -> None:
        """Deletes a job's folder or a part of it, with its archives; a kill leaves a remainder.

        A whole folder stays while somebody samples with an adapter of it.
        """
        for archive in (self.root / ARCHIVES).glob(f"{job_id}-*.zip"):
            archive.unlink(missing_ok=True)
        folder, aside = self.job(job_id), self.jobs / f".{job_id}.{secrets.token_hex(6)}"
        with suppress(FileNotFoundError):
            if part:
                remove_folder(folder / part, aside)
            else:
                remove_unheld(folder, aside)

    def remove_remainders(self) -> None:
        """Deletes what is left of folders of jobs whose deletion was cut off."""
        for name in filter(_REMAINDER.fullmatch, os.listdir(self.jobs)):
            _delete(self.jobs / name)

    def job_bytes(self, job_id: str) -> dict[str, int]:
        """Bytes of each entry of a job's folder; links count for nothing."""
        found = {}
        with suppress(FileNotFoundError), os.scandir(self.job(job_id)) as entries:
            for entry in entries:
                found[entry.name] = _bytes_of(entry)
        return found

    def gang(self, gang: str, epoch: int) -> Path:
        """The folder of a gang's epoch; it may be missing, not misnamed."""
        return self.gangs / f"{_checked(gang, _GANG, 'name of a gang')}-{int(epoch)}"


def check_tenant(name: str) -> str:
    """The name, if a tenant may be called so; raises `ValueError` if it may not."""
    if not _TENANT.fullmatch(name):
        raise ValueError(
            "a tenant's name must be at most 32 lower-case letters, digits and hyphens, the first "
            f"of which is no hyphen, got {name!r:.80}"
        )
    return name


def make_folder(folder: Path) -> Path:
    """Makes a folder and what lacks above it, for this user alone; one that is there stays."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder")
    return folder


def remove_folder(folder: Path, aside: Path | None = None) -> None:
    """Deletes a folder and all that is in it, but of a link what it leads to stays.

    Nobody sees a half of it: it first gets another name, which `aside` may choose.
    """
    aside = aside or folder.with_name(f".{folder.name}.{secrets.token_hex(6)}")
    os.rename(folder, aside)
    _delete(aside)


_HELD = "adapter_config.json"
"""In an adapter's folder: the file on which whoever samples with it has a lock."""


_locks: dict[Path, list[BinaryIO]] = {}
"""Of each folder that is held here the locked file, once for each who holds it."""
_guard = threading.Lock()


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """Keeps an adapter's folder from `remove_unheld` in any process; None = there is none to keep.

    One that was deleted before is not there inside, either.
    """
    if folder is None or (file := _locked(folder)) is None:
        yield
        return
    try:
        yield
    finally:
        with _guard:
            _locks[folder].remove(file)
            if not _locks[folder]:
                del _locks[folder]
                file.close()


def _locked(folder: Path) -> BinaryIO | None:
    """A file with a lock that keeps a folder; None if the folder is gone, or no adapter's."""
    with _guard:
        if folder not in _locks:
            try:
                file = (folder / _HELD).open("rb")
            except (FileNotFoundError, NotADirectoryError):
                return None
            fcntl.flock(file, fcntl.LOCK_SH)
            _locks[folder] = [file]
        else:
            _locks[folder].append(_locks[folder][0])
        return _locks[folder][0]


def remove_unheld(folder: Path, aside: Path | None = None) -> bool:
    """Deletes a folder as `remove_folder`, unless an adapter in it is held; False if one is."""
    with ExitStack() as stack:
        for path in folder.rglob(_HELD):
            file = stack.enter_context(path.open("rb+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        remove_folder(folder, aside)
    return True


def _delete(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _bytes_of(entry: os.DirEntry[str]) -> int:
    """Bytes of a file, or of all files below a folder; links count for nothing."""
    try:
        if not entry.is_dir(follow_symlinks=False):
            return 0 if entry.is_symlink() else entry.stat().st_size
        with os.scandir(entry) as inner:
            return sum(map(_bytes_of, inner))
    except FileNotFoundError:  # it is written or deleted meanwhile
        return 0


def write_lease(job_folder: Path, lease: Lease) -> None:
    """Gives a job's folder to a gang; from now on no other may write there."""
    write_json(job_folder / LEASE_NAME, asdict(lease))


def read_lease(job_folder: Path) -> Lease | None:
    """Who may write a job's folder; None if nobody was ever allowed, or the file is damaged."""
    try:
        value = read_json(job_folder / LEASE_NAME)
        return Lease(gang=str(value["gang"]), epoch=int(value["epoch"]), lease=int(value["lease"]))
    except (ValueError, TypeError, KeyError):
        return None


def _checked(value: str, pattern: re.Pattern[str], what: str) -> str:
    if not pattern.fullmatch(value):
        raise ValueError(f"the {what} must match {pattern.pattern}, got {value!r:.80}")
    return value


DATABASE = "database.json"
"""Address of a store that is not a file in the service's folder."""


def store_place(of: Home, database: str | None = None) -> str | Path:
    """Where a service's store is: its folder's SQLite file, or a database that it remembers.

    Args:
        database: address to use from now on; None = what is remembered.

    Raises:
        ConfigError: if it is no address, or the service has another store already.
    """
    remembered = read_json(of.root / DATABASE)
    if database is None:
        return of.store if remembered is None else str(remembered["url"])
    if "://" not in database:  # a file in this process's folder, which no other command would find
        rule = "be postgresql+psycopg://user@host/database"
        raise must("--database", rule, database, "without it the store is a file in --service")
    if of.store.exists() or (remembered is not None and remembered["url"] != database):
        remedy = "take another folder for --service, or leave --database out"
        # Not the address: it may hold a password.
        raise must("--database", "be the one that the service has", "another", remedy)
    return database


def remember_store(of: Home, place: str | Path) -> None:
    """Notes a database in the folder, once it could be opened: a mistyped one is not kept."""
    if "://" in str(place):
        write_json(of.root / DATABASE, {"url": str(place)})
