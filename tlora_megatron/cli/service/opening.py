"""Opens a service's folder for a command, and finds the jobs that the command names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tlora_megatron.config.reader import must
from tlora_megatron.service import home

if TYPE_CHECKING:
    from tlora_megatron.service.store import Job, Store

_DATABASE = "database.json"
"""Address of a store that is not a file in the service's folder."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service as a command sees it: its folder and its store."""

    home: home.Home
    store: Store

    @property
    def is_served(self) -> bool:
        """True while a controller gives signs of life."""
        return self.store.lock.is_held()

    @property
    def how_to_serve(self) -> str:
        """The command that starts a controller of this service."""
        return serve_command(self.home.root)


def add_service_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--service`."""
    parser.add_argument(
        "--service",
        metavar="DIR",
        help=f"folder of the service (default: ${home.VARIABLE}, or {home.DEFAULT})",
    )


@contextmanager
def open_service(args: argparse.Namespace) -> Iterator[Service]:
    """Opens the service that `--service` names; it must be there.

    Raises:
        ConfigError: if nobody has served that folder yet.
    """
    root = service_folder(args.service)
    if not any((root / name).is_file() for name in ("store.sqlite", _DATABASE)):
        remedy = f"start one with: {serve_command(root)}"
        raise must("--service", "be the folder of a service", str(root), remedy)
    # Not at the top: it takes a third of a second, and `--help` needs none of it.
    from tlora_megatron.service.store import open_store

    found = home.Home.open(root)
    with open_store(store_place(found)) as store:
        yield Service(found, store)


def store_place(of: home.Home, database: str | None = None) -> str | Path:
    """Where a service's store is: its folder's SQLite file, or a database that it remembers.

    Args:
        of: the service's folder.
        database: address to use from now on; None = what is remembered.

    Raises:
        ConfigError: if it is no address, or the service has another store already.
    """
    remembered = home.read_json(of.root / _DATABASE)
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


def remember_store(of: home.Home, place: str | Path) -> None:
    """Notes a database in the folder, once it could be opened: a mistyped one is not kept."""
    if "://" in str(place):
        home.write_json(of.root / _DATABASE, {"url": str(place)})


def service_folder(given: str | None) -> Path:
    """The folder that `--service`, the environment or the default names; it may be missing."""
    return Path(given or os.environ.get(home.VARIABLE) or home.DEFAULT).expanduser().absolute()


def serve_command(root: Path) -> str:
    """What to type to serve a folder, as short as it can be."""
    is_default = root == service_folder(None)
    return "tlora serve" if is_default else f"tlora serve --service {root}"


def find_jobs(service: Service, names: Sequence[str]) -> list[Job]:
    """The jobs that a command names, by id or name; each once, in order.

    Raises:
        ConfigError: for a name that no job has.
    """
    found = {job.id: job for job in (_find(service, name) for name in names)}
    return list(found.values())


def _find(service: Service, name: str) -> Job:
    from tlora_megatron.service.store import NotFound

    try:
        return service.store.jobs.find(name)
    except (NotFound, UnicodeEncodeError):  # the second: bytes that are no text
        raise must(
            "NAME", "be the id or the name of a job", name, "`tlora jobs --all` lists them"
        ) from None
