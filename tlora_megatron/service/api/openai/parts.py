"""`/v1/uploads`: training files that come in parts, as `client.uploads` sends large ones.

What is under way are rows and files as those of `/v1/files`, of other purposes: they count for a
tenant's bytes, and go when the upload ends, or an hour later when the tenant begins another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from tlora_megatron.service.api.gate import ApiError, Caller, Submitter, missing, refused
from tlora_megatron.service.api.openai.objects import file_object
from tlora_megatron.service.api.openai.uploads import (
    LARGEST_FILE,
    PURPOSE,
    Arrival,
    Incoming,
    check_fields,
    receive,
)
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import NotFound, Upload

LARGEST_PART = 64 << 20
MOST_PARTS = 1000
KEPT_S = 3600
_UPLOAD, _PART = "upload", "upload.part"
"""Purposes of rows; a part's `name` is the id of its upload."""
_MOST_ROWS = 16 * MOST_PARTS


class Begin(BaseModel):
    """The body that begins an upload."""

    model_config = ConfigDict(extra="forbid")

    bytes: StrictInt = Field(ge=1, le=LARGEST_FILE)
    filename: StrictStr
    mime_type: StrictStr
    purpose: StrictStr
    expires_after: Any = None


class Complete(BaseModel):
    """The body that ends one."""

    model_config = ConfigDict(extra="forbid")

    part_ids: list[StrictStr] = Field(min_length=1, max_length=MOST_PARTS)
    md5: StrictStr | None = None


def router(service: Service, incoming: Incoming) -> APIRouter:
    routes = APIRouter(prefix="/v1/uploads", tags=["openai"])
    store, home = service.store.uploads, service.home
    turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def forget(rows: Iterable[Upload]) -> None:
        for row in rows:
            store.delete(row.id, tenant=row.tenant)
            home.upload(row.tenant, row.id).unlink(missing_ok=True)

    def find(upload: str, caller: Caller) -> tuple[Upload, dict[str, Upload]]:
        """An upload under way, with its parts by their ids."""
        try:
            row = store.get(upload, tenant=caller.tenant)
        except (NotFound, UnicodeEncodeError):
            raise missing("upload", upload) from None
        if row.purpose != _UPLOAD or _is_old(row):
            raise missing("upload", upload)
        found = store.page(tenant=caller.tenant, purpose=_PART, limit=_MOST_ROWS)
        return row, {part.id: part for part in found if part.name == upload}

    def made_of(row: Upload) -> Upload | None:
        """The file that an upload has become."""
        files = store.page(tenant=row.tenant, purpose=PURPOSE)
        return next((file for file in files if file.facts.get(_UPLOAD) == row.id), None)

    def pending(upload: str, caller: Caller) -> tuple[Upload, dict[str, Upload]]:
        row, parts = find(upload, caller)
        if made_of(row) is not None:
            raise refused("upload", "be pending", "completed")
        return row, parts

    def join(row: Upload, parts: Mapping[str, Upload], body: Complete, arrival: Arrival) -> None:
        """Writes parts in the order in which the body names them, and checks them as a whole."""
        digest = hashlib.md5(usedforsecurity=False)
        try:
            for id in body.part_ids:
                if id not in parts:
                    raise refused("part_ids", "be parts of the upload", id)
                data = home.upload(row.tenant, id).read_bytes()
                digest.update(data)
                arrival.take(data)
            if arrival.size != (wanted := row.facts["bytes"]):
                raise refused("part_ids", f"hold the {wanted:,} bytes of the upload", arrival.size)
            if body.md5 not in (None, digest.hexdigest()):
                raise refused("md5", f"be that of the parts, {digest.hexdigest()}", body.md5)
            arrival.end()
        except ValueError as error:
            raise ApiError(400, str(error), param="file", code="invalid_file") from error
        finally:
            arrival.close()

    @routes.post("")
    async def begin(body: Begin, caller: Submitter) -> dict[str, Any]:
        """Begins an upload in parts."""
        check_fields(body.model_dump(include={"purpose", "expires_after"}, exclude_none=True))
        room = await incoming.room(caller)
        if body.bytes > room.most_bytes:
            raise refused("bytes", f"be at most {room.most_bytes:,}", body.bytes, status=413)
        pages = [store.page(tenant=caller.tenant, purpose=one) for one in (_UPLOAD, _PART)]
        await service.read(forget, [row for page in pages for row in page if _is_old(row)])
        arrival = incoming.arrival(caller, 0)
        arrival.close()
        row = arrival.row(body.filename, _UPLOAD, bytes=body.bytes)
        return _object(await incoming.keep(caller, row, room), "pending")

    @routes.post("/{upload}/parts")
    async def add(upload: str, request: Request, caller: Submitter) -> dict[str, Any]:
        """Takes one part, as `multipart/form-data` with the field `data`."""
        with incoming.one(caller):
            _, parts = await service.read(pending, upload, caller)
            if len(parts) >= MOST_PARTS:
                raise refused("upload", f"have at most {MOST_PARTS} parts", "one more")
            room = await incoming.room(caller)
            most = min(LARGEST_PART, room.most_bytes)
            arrival = await service.read(incoming.arrival, caller, most)
            await receive(arrival, request, "data")
            part = await incoming.keep(caller, arrival.row(upload, _PART), room)
        made = {"id": part.id, "object": "upload.part", "upload_id": upload}
        return {**made, "created_at": int(part.created_at)}

    @routes.post("/{upload}/complete")
    async def complete(upload: str, body: Complete, caller: Submitter) -> dict[str, Any]:
        """Makes a training file of parts in their order, checked as one that comes at once."""
        async with turns.setdefault(upload, asyncio.Lock()):
            row, parts = await service.read(find, upload, caller)
            file = await service.read(made_of, row)
            if file is None:  # else it is a retry
                room = await incoming.room(caller, apart=sum(part.size for part in parts.values()))
                arrival = await service.read(incoming.file, caller, room)
                await service.read(join, row, parts, body, arrival)
                new = arrival.row(row.name, upload=upload)
                file = await incoming.keep(caller, new, room)
            await service.read(forget, parts.values())
        return _object(row, "completed", file)

    @routes.post("/{upload}/cancel")
    async def cancel(upload: str, caller: Submitter) -> dict[str, Any]:
        """Gives an upload up."""
        row, parts = await service.read(pending, upload, caller)
        await service.read(forget, [*parts.values(), row])
        return _object(row, "cancelled")

    return routes


def _is_old(row: Upload) -> bool:
    return row.created_at < time.time() - KEPT_S


def _object(row: Upload, status: str, file: Upload | None = None) -> dict[str, Any]:
    """An upload; but for its file it is told as files are."""
    size, end = row.facts["bytes"], int(row.created_at) + KEPT_S
    of_file = None if file is None else file_object(file)
    told = {"object": "upload", "bytes": size, "expires_at": end, "purpose": PURPOSE}
    return {**file_object(row), **told, "status": status, "file": of_file}
