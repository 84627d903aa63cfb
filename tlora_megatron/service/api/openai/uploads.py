"""Takes a file that a tenant sends: to the disk, hashed, its lines checked while they arrive.

FastAPI's own forms are whole on the disk before anybody may refuse them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import Request, UploadFile
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException, MultiPartParser

from tlora_megatron.service.api.gate import ApiError, Caller, refused
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.store import NewUpload, Upload
from tlora_megatron.training.data.preferences import is_pair, parse_pair
from tlora_megatron.training.data.rows import parse_row

LONGEST_LINE = 4 * 2**20
"""Bytes; a line is held in memory."""
_BOM = b"\xef\xbb\xbf"


class LineCheck:
    """Takes a file's bytes in parts; refuses the first line that could not be trained."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rest = b""
        self._number = 0
        self.rows = 0
        """Lines that hold something."""
        self.kinds: dict[str, int] = {}
        """How many rows have which format: completion, messages, text or pairs."""

    def feed(self, part: bytes) -> None:
        """Checks all lines that the part completes; a `ValueError` names file and line."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            self._check(line)
        if len(self._rest) > LONGEST_LINE:
            self._too_long(self._number + 1)

    def end(self) -> None:
        """Checks what follows the last line break, and that any line holds something."""
        self._check(self._rest)
        if not self.rows:
            raise ValueError(f"a training file must hold at least one line, got none: {self._name}")

    def _check(self, line: bytes) -> None:
        self._number += 1
        if self._number == 1:
            line = line.removeprefix(_BOM)
        if len(line) > LONGEST_LINE:
            self._too_long(self._number)
        if not line.strip():
            return
        where = f"{self._name} line {self._number}"
        if is_pair(line):
            parse_pair(line, where)
            kind = "pairs"
        else:
            kind = parse_row(line, where).kind
        self.rows += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def _too_long(self, number: int) -> None:
        raise ValueError(
            f"a line must have at most {LONGEST_LINE:,} bytes, got more: {self._name} line {number}"
        )


_LARGEST_FIELD = 1024
_MOST_FIELDS = 16


class _Form(MultiPartParser):
    """Reads a form whose one file goes to an arrival while it comes."""

    has_ended = False

    def __init__(self, request: Request, arrival: Arrival) -> None:
        limits = {"max_fields": _MOST_FIELDS, "max_part_size": _LARGEST_FIELD}
        super().__init__(request.headers, request.stream(), max_files=1, **limits)
        self._arrival: Any = arrival

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        if part.file is not None:
            part.file.file.close()
            part.file = UploadFile(self._arrival, filename=part.file.filename)

    def on_end(self) -> None:
        self.has_ended = True


async def read_form(request: Request, field: str, arrival: Arrival) -> str:
    """Takes the file in a form's field, and returns its name; raises `ValueError` if it is none."""
    content_type = request.headers.get("content-type", "")
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        rule = "must come as multipart/form-data with a boundary"
        raise ValueError(f"a file {rule}, got {content_type!r:.80}")
    form = _Form(request, arrival)
    try:
        fields = dict(await form.parse())
    except MultiPartException as error:
        raise ValueError(f"the body must be multipart/form-data, got {error.message}") from error
    if not form.has_ended:
        raise ValueError("the body must end with its boundary, got one that was cut")
    file = fields.pop(field, None)
    if not isinstance(file, UploadFile):
        raise ValueError(f"{field} must be given: a part of the form with a file's name")
    if field == "file":
        check_fields(fields)
    return file.filename or ""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuses another purpose, and what would let a file go by itself."""
    if fields.get("purpose") != PURPOSE:
        raise refused("purpose", f"be {PURPOSE}", fields.get("purpose"))
    for field in fields.keys() - {"purpose"}:
        name = field.partition("[")[0][:80]
        sentence = f"{name} must be left out: files stay until they are deleted"
        raise ApiError(400, sentence, param=name, code="unsupported_parameter")


PURPOSE, PART = "fine-tune", "upload.part"
LARGEST_FILE = 2**30
LARGEST_PART = 64 << 20
AT_ONCE = 16
"""Files of a tenant on their way: until they are there, none counts for the others' limit."""
_PARTIAL = ".partial-"
_LEFT_S = 86400.0
"""No upload takes as long: what a killed process has left is removed."""
_LONGEST_NAME = 255
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Arrival:
    """A file on its way into a tenant's folder; it has no name there before it is whole."""

    def __init__(self, path: Path, most_bytes: int, lines: LineCheck | None) -> None:
        folder = make_folder(path.parent)
        for left in folder.glob(f"{_PARTIAL}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFT_S:
                    left.unlink()
        self._path = path
        self._partial = folder / f"{_PARTIAL}{path.name}"
        self._most_bytes = most_bytes
        self._lines = lines
        self.size = 0
        self.digest = hashlib.sha256()
        self._file: BinaryIO = open(os.open(self._partial, _NEW, 0o600), "wb")  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Takes the next bytes; raises `ApiError` or `ValueError` if they are refused."""
        self.size += len(data)
        if self.size > self._most_bytes:
            raise refused("file", f"have at most {self._most_bytes:,} bytes", "more", status=413)
        if self._lines is not None:
            self._lines.feed(data)
        self.digest.update(data)
        self._file.write(data)

    def seek(self, place: int) -> None:
        """Does nothing: nobody reads it here, as forms would."""

    def end(self) -> None:
        """Checks the lines as a whole, and gives the file its name."""
        if self._lines is not None:
            self._lines.end()
        self._file.flush()
        os.fsync(self._file.fileno())
        os.rename(self._partial, self._path)

    def close(self) -> None:
        """Removes what did not become a file."""
        with closing(self._file):  # which a full disk refuses, too
            self._partial.unlink(missing_ok=True)


class Incoming:
    """What tenants send: counted while it comes, and held to their limits."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._counts: Counter[str] = Counter()

    async def take(
        self,
        caller: Caller,
        write: Callable[[Arrival], Awaitable[str]],
        *,
        part_of: str | None = None,
        apart: int = 0,
        **facts: Any,
    ) -> Upload:
        """Keeps a training file, or a part of an upload; if it is refused there is none.

        Args:
            write: writes it, and returns its owner's name for it.
            apart: bytes of the tenant that do not count meanwhile.
        """
        service, tenant = self._service, caller.tenant
        if self._counts[tenant] >= AT_ONCE:
            rule = f"send at most {AT_ONCE} files at a time, got one more: try again when some are"
            raise ApiError(429, f"a tenant must {rule} there", headers={"Retry-After": "5"})
        self._counts[tenant] += 1
        is_part, lines = part_of is not None, LineCheck("file")
        most, limit = LARGEST_PART if is_part else LARGEST_FILE, caller.limits.upload_bytes
        path = service.home.upload(tenant, f"file-{secrets.token_hex(12)}")
        add = service.store.uploads.add
        try:
            await service.read(service.quota.check_disk, tenant)
            held = await service.read(service.store.uploads.bytes_of, tenant)
            besides = await service.read(service.quota.beside_uploads, tenant, fresh=True) - apart
            most = max(0, min(most, limit - held - besides))
            arrival = await service.read(Arrival, path, most, None if is_part else lines)
            try:
                name = await write(arrival)
                await service.read(arrival.end)
            finally:
                await service.read(arrival.close)
            new = NewUpload(
                id=path.name,
                name=part_of or display_name(name),
                purpose=PART if is_part else PURPOSE,
                digest=arrival.digest.hexdigest(),
                size=arrival.size,
                facts=facts if is_part else {**facts, "rows": lines.rows, "kinds": lines.kinds},
            )
            return await service.change(
                lambda: add(new, tenant=tenant, most_bytes=limit, besides=besides)
            )
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), param="file", code="invalid_file") from error
            raise
        finally:
            self._counts[tenant] -= 1


def display_name(name: str) -> str:
    """The client's name of a file, without folders and what cannot be printed."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[:_LONGEST_NAME] or "file"
