"""Where a service's store is: a file in its folder, or a database that the folder remembers."""

from __future__ import annotations

from pathlib import Path

from tlora_megatron.config.reader import must
from tlora_megatron.files import read_json, write_json
from tlora_megatron.service.home import Home

DATABASE = "database.json"
"""Address of a store that is not a file in the service's folder."""


def store_place(of: Home, database: str | None = None) -> str | Path:
    """Where a service's store is: its folder's SQLite file, or a database that it remembers.

    Args:
        of: the service's folder.
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
