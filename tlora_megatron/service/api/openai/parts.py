"""`/v1/uploads`: training files that come in parts, as `client.uploads` sends large ones.

What is under way are rows and files as those of `/v1/files`, of other purposes: they count for a
tenant's bytes, and go when the upload ends, or an hour later when the tenant begins another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from tlora_megatron.service.api.gate import Caller, Submitter, missing, refused
from tlora_megatron.service.api.openai.objects import file_object
from tlora_megatron.service.api.openai.uploads import (
    LARGEST_FILE,
    PART,
    PURPOSE,
    Arrival,
    Incoming,
    check_fields,
    display_name,
    read_form,
)
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import NewUpload, NotFound, Upload

MOST_PARTS = 1000
KEPT_S = 3600
_UPLOAD = "upload"
"""Purpose of an upload's row; that of a part has its id as a name."""


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

    def find(upload: str, caller: Caller) -> Upload:
        try:
            row = store.get(upload, tenant=caller.tenant)
        except (NotFound, UnicodeEncodeError):
            raise missing("upload", upload) from None
        if row.purpose != _UPLOAD or _is_old(row):
            raise missing("upload", upload)
        return row

    def parts_of(row: Upload) -> dict[str, Upload]:
        """The parts of an upload by their ids; refuses one that has become a file."""
        if made_of(row) is not None:
            raise refused("upload", "be pending", "completed")
        found = store.page(tenant=row.tenant, purpose=PART, limit=16 * MOST_PARTS)
        return {part.id: part for part in found if part.name == row.id}

    def made_of(row: Upload) -> Upload | None:
        files = store.page(tenant=row.tenant, purpose=PURPOSE)
        return next((file for file in files if file.facts.get(_UPLOAD) == row.id), None)

    def join(row: Upload, parts: Mapping[str, Upload], body: Complete, arrival: Arrival) -> str:
        """Writes parts in the order in which the body names them."""
        digest = hashlib.md5(usedforsecurity=False)
        for id in body.part_ids:
            if id not in parts:
                raise refused("part_ids", "be parts of the upload", id)
            data = home.upload(row.tenant, id).read_bytes()
            digest.update(data)
            arrival.write(data)
        if arrival.size != (wanted := row.facts["bytes"]):
            raise refused("part_ids", f"hold the {wanted:,} bytes of the upload", arrival.size)
        if body.md5 not in (None, digest.hexdigest()):
            raise refused("md5", f"be that of the parts, {digest.hexdigest()}", body.md5)
        return row.name

    @routes.post("")
    def begin(body: Begin, caller: Submitter) -> dict[str, Any]:
        """Begins an upload in parts."""
        check_fields(body.model_dump(include={"purpose", "expires_after"}, exclude_none=True))
        for purpose in (_UPLOAD, PART):
            rows = store.page(tenant=caller.tenant, purpose=purpose, newest_first=False)
            forget(filter(_is_old, rows))
        new = NewUpload(
            id=f"file-{secrets.token_hex(12)}",
            name=display_name(body.filename),
            purpose=_UPLOAD,
            digest="",
            size=0,
            facts={"bytes": body.bytes},
        )
        return _object(store.add(new, tenant=caller.tenant), "pending")

    @routes.post("/{upload}/parts")
    async def add(upload: str, request: Request, caller: Submitter) -> dict[str, Any]:
        """Takes one part, as `multipart/form-data` with the field `data`."""
        row = await service.read(find, upload, caller)
        if len(await service.read(parts_of, row)) >= MOST_PARTS:
            raise refused("upload", f"have at most {MOST_PARTS} parts", "one more")
        write = partial(read_form, request, "data")
        part = await incoming.take(caller, write, part_of=upload)
        told = {"id": part.id, "object": "upload.part", "upload_id": upload}
        return {**told, "created_at": int(part.created_at)}

    @routes.post("/{upload}/complete")
    async def complete(upload: str, body: Complete, caller: Submitter) -> dict[str, Any]:
        """Makes a training file of parts in their order, checked as one that comes at once."""
        row = await service.read(find, upload, caller)
        async with turns.setdefault(upload, asyncio.Lock()):
            file = await service.read(made_of, row)
            if file is None:  # else it is a retry
                parts = await service.read(parts_of, row)
                size = sum(part.size for part in parts.values())
                file = await incoming.take(
                    caller,
                    lambda arrival: service.read(join, row, parts, body, arrival),
                    apart=size,
                    upload=upload,
                )
                await service.read(forget, parts.values())
        return _object(row, "completed", file)

    @routes.post("/{upload}/cancel")
    def cancel(upload: str, caller: Submitter) -> dict[str, Any]:
        """Gives an upload up."""
        row = find(upload, caller)
        forget([*parts_of(row).values(), row])
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
