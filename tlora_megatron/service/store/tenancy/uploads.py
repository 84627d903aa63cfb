"""Uploads: rows of the files that tenants have sent."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import Connection, desc, func, select, update

from tlora_megatron.service.store.errors import NotFound, OverLimit
from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database
from tlora_megatron.service.store.tenancy.values import NewUpload, Upload

_UPLOAD = tables.upload.c
_PRESENT = _UPLOAD.deleted_at.is_(None)


class Uploads:
    """The uploads of a store. What one tenant asks never reads another's."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self, new: NewUpload, *, tenant: str, most_bytes: int | None = None, besides: int = 0
    ) -> Upload:
        """Writes the row of a file that is on the disk.

        Args:
            new: The file.
            tenant: Its owner.
            most_bytes: Bytes that all files of the tenant may have together.
            besides: Bytes that it has beside its uploads.

        Raises:
            OverLimit: if they would have more.
        """
        row = {**asdict(new), "tenant": tenant, "created_at": self._database.clock()}
        with self._database.write() as connection:
            held = _bytes(connection, tenant) + besides
            if most_bytes is not None and held + new.size > most_bytes:
                raise OverLimit(
                    f"the files of a tenant must have at most {most_bytes:,} bytes together, got "
                    f"{held:,} and {new.size:,} more: delete some"
                )
            made = tables.upload.insert().values(**row).returning(_UPLOAD.number)
            number = int(connection.execute(made).scalar_one())
        return Upload(**{**row, "number": number, "deleted_at": None})

    def get(self, upload: str, *, tenant: str) -> Upload:
        """The tenant's file of an id.

        Raises:
            NotFound: if it has none.
        """
        query = select(tables.upload).where(_UPLOAD.id == upload, _UPLOAD.tenant == tenant)
        with self._database.read() as connection:
            row = connection.execute(query.where(_PRESENT)).mappings().one_or_none()
        if row is None:
            raise _missing(upload)
        return Upload(**row)

    def page(
        self,
        *,
        tenant: str,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 100,
        newest_first: bool = True,
    ) -> list[Upload]:
        """A tenant's files from behind that of id `after` on.

        Raises:
            NotFound: if the tenant has no file of that id, deleted ones included.
        """
        query = select(tables.upload).where(_UPLOAD.tenant == tenant, _PRESENT).limit(limit)
        query = query.order_by(desc(_UPLOAD.number) if newest_first else _UPLOAD.number)
        if purpose is not None:
            query = query.where(_UPLOAD.purpose == purpose)
        with self._database.read() as connection:
            if after is not None:
                number = _number(connection, after, tenant)
                behind = _UPLOAD.number < number if newest_first else _UPLOAD.number > number
                query = query.where(behind)
            return [Upload(**row) for row in connection.execute(query).mappings()]

    def delete(self, upload: str, *, tenant: str) -> Upload:
        """Notes that a file is gone.

        Raises:
            NotFound: if the tenant has none of this id.
        """
        change = update(tables.upload).where(_UPLOAD.id == upload)
        with self._database.write() as connection:
            found = self.get(upload, tenant=tenant)
            connection.execute(change.values(deleted_at=self._database.clock()))
        return found

    def bytes_of(self, tenant: str) -> int:
        """Bytes of all files of a tenant."""
        with self._database.read() as connection:
            return _bytes(connection, tenant)


def _bytes(connection: Connection, tenant: str) -> int:
    query = select(func.sum(_UPLOAD.size)).where(_UPLOAD.tenant == tenant, _PRESENT)
    return int(connection.execute(query).scalar() or 0)


def _number(connection: Connection, upload: str, tenant: str) -> int:
    query = select(_UPLOAD.number).where(_UPLOAD.id == upload, _UPLOAD.tenant == tenant)
    number = connection.execute(query).scalar()
    if number is None:
        raise _missing(upload)
    return int(number)


def _missing(upload: str) -> NotFound:
    return NotFound(f"a file's id must be one of yours, got {upload!r:.80}")
