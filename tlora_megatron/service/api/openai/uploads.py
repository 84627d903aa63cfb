"""Takes a file that a tenant sends: to the disk, hashed and checked while it arrives."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool

from tlora_megatron.service.api.errors import ApiError, refused
from tlora_megatron.service.api.openai.lines import LineCheck
from tlora_megatron.service.api.openai.multipart import FormReader
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.store import NewUpload

PURPOSE = "fine-tune"
LARGEST_FILE = 2**30
_PARTIAL = ".partial-"
_LEFT_S = 86400.0
"""No upload takes as long: what a killed process has left is removed."""
_LONGEST_NAME = 255
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Arrival:
    """A file on its way into a tenant's folder; it has no name there before it is whole."""

    def __init__(self, home: Home, tenant: str, content_type: str, most_bytes: int) -> None:
        self.id = f"file-{secrets.token_hex(12)}"
        self._path = home.upload(tenant, self.id)
        folder = make_folder(self._path.parent)
        _sweep(folder)
        self._partial = folder / f"{_PARTIAL}{self.id}"
        self._most_bytes = min(LARGEST_FILE, most_bytes)
        self._size = 0
        self._digest = hashlib.sha256()
        self._lines = LineCheck("file")
        self._form = FormReader(content_type, self._take)
        self._file: BinaryIO = open(os.open(self._partial, _NEW, 0o600), "wb")  # noqa: SIM115

    def feed(self, part: bytes) -> None:
        """Takes the next bytes of the request.

        Raises:
            ApiError: if the file is too large.
            ValueError: if form or file cannot be used.
        """
        self._form.feed(part)

    def end(self) -> NewUpload:
        """Checks what arrived as a whole and gives the file its name.

        Raises:
            ApiError: if it came for another purpose.
            ValueError: if form or file cannot be used.
        """
        self._form.end()
        fields = dict(self._form.fields)
        purpose = fields.pop("purpose", None)
        if purpose != PURPOSE:
            raise refused("purpose", f"be {PURPOSE}", purpose)
        if fields:
            name = next(iter(fields)).partition("[")[0]
            raise ApiError(400, f"{name:.80} must be left out: files stay until they are deleted")
        self._lines.end()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._partial, self._path)
        return NewUpload(
            id=self.id,
            name=_display_name(self._form.filename or ""),
            purpose=purpose,
            digest=self._digest.hexdigest(),
            size=self._size,
            facts={"rows": self._lines.rows, "kinds": self._lines.kinds},
        )

    def close(self) -> None:
        """Removes what did not become a file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def forget(self) -> None:
        """Removes the file, too."""
        self._path.unlink(missing_ok=True)

    def _take(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._most_bytes:
            raise refused("file", f"have at most {self._most_bytes:,} bytes", "more", status=413)
        self._lines.feed(data)
        self._digest.update(data)
        self._file.write(data)


async def receive(arrival: Arrival, parts: AsyncIterator[bytes]) -> NewUpload:
    """Takes a whole request; checks and writes beside the event loop.

    Raises:
        ApiError: for the first reason to refuse it; nothing is kept.
    """
    try:
        async for part in parts:
            if part:
                await run_in_threadpool(arrival.feed, part)
        return await run_in_threadpool(arrival.end)
    except ValueError as error:
        raise ApiError(400, str(error), param="file", code="invalid_file") from error
    finally:
        await run_in_threadpool(arrival.close)


def _display_name(name: str) -> str:
    """The client's name of a file, without folders and what cannot be printed."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[:_LONGEST_NAME] or "file"


def _sweep(folder: Path) -> None:
    """Removes files that never arrived as a whole, and whose process is gone."""
    for path in folder.glob(f"{_PARTIAL}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_S:
                path.unlink()
