"""Takes a file that a tenant sends: to the disk, hashed, its lines checked while they arrive.

FastAPI's own forms are whole on the disk before anybody may refuse them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from tlora_megatron.service.api.gate import ApiError, Caller, refused
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.store import NewUpload, Upload
from tlora_megatron.training.data.rows import parse_row

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


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
        """How many rows have which format: completion, messages or text."""

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
        row = parse_row(line, f"{self._name} line {self._number}")
        self.rows += 1
        self.kinds[row.kind] = self.kinds.get(row.kind, 0) + 1

    def _too_long(self, number: int) -> None:
        raise ValueError(
            f"a line must have at most {LONGEST_LINE:,} bytes, got more: {self._name} line {number}"
        )


_LARGEST_FIELD = 1024
_MOST_PARTS = 16


class FormReader:
    """Reads the form of one request of this content type; `on_data` takes the file's bytes.

    The file is in a field of this name; `fields` holds the others.
    """

    def __init__(self, content_type: str, field: str, on_data: Callable[[bytes], None]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ValueError(
                f"a file must come as multipart/form-data with a boundary, got {content_type!r:.80}"
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the file; None: there was none."""
        self._field = field
        self._on_data = on_data
        self._name = self._header = self._value = b""
        self._disposition = b""
        self._is_file = False
        self._parts = 0
        self._ended = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, part: bytes) -> None:
        """Reads the next bytes; raises `ValueError` if they are no part of such a form."""
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise ValueError(f"the body must be multipart/form-data, got {error}") from error

    def end(self) -> None:
        """Refuses a form that is not whole."""
        if not self._ended:
            raise ValueError("the body must end with its boundary, got one that was cut")
        if self.filename is None:
            rule = "must be given: a part of the form with a file's name"
            raise ValueError(f"{self._field} {rule}")

    def _on_part_begin(self) -> None:
        self._disposition = self._value = b""
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise ValueError(f"a form must have at most {_MOST_PARTS} parts, got more")

    def _on_header_field(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def _on_header_value(self, data: bytes, begin: int, end: int) -> None:
        self._value += data[begin:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"")
        self._is_file = self._name == self._field.encode() and b"filename" in options
        if self._is_file:
            if self.filename is not None:
                raise ValueError("a form must hold one file, got two")
            self.filename = options[b"filename"].decode("utf-8", "replace")

    def _on_part_data(self, data: bytes, begin: int, end: int) -> None:
        if self._is_file:
            self._on_data(data[begin:end])
            return
        self._value += data[begin:end]
        if len(self._value) > _LARGEST_FIELD:
            raise ValueError(
                f"a field of a form must have at most {_LARGEST_FIELD} bytes, got more"
            )

    def _on_part_end(self) -> None:
        if not self._is_file:
            name = self._name.decode("utf-8", "replace")
            self.fields[name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._ended = True


PURPOSE = "fine-tune"
LARGEST_FILE = 2**30
AT_ONCE = 16
"""Files of a tenant on their way: until they are there, none counts for the others' limit."""
_PARTIAL = ".partial-"
_LEFT_S = 86400.0
"""No upload takes as long: what a killed process has left is removed."""
_LONGEST_NAME = 255
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Arrival:
    """Bytes on their way into a file, which has no name in its folder before it is whole.

    Args:
        path: what it becomes.
        most_bytes: that it may have.
        lines: checks them while they arrive; None = they are a part of a file.
    """

    def __init__(self, path: Path, most_bytes: int, lines: LineCheck | None = None) -> None:
        folder = make_folder(path.parent)
        for left in folder.glob(f"{_PARTIAL}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFT_S:
                    left.unlink()
        self.path = path
        self.size = 0
        self._partial = folder / f"{_PARTIAL}{path.name}"
        self._most_bytes = most_bytes
        self._digest = hashlib.sha256()
        self._lines = lines
        self._file: BinaryIO = open(os.open(self._partial, _NEW, 0o600), "wb")  # noqa: SIM115

    def take(self, data: bytes) -> None:
        """Takes the next bytes; raises `ApiError` or `ValueError` if they are refused."""
        self.size += len(data)
        if self.size > self._most_bytes:
            raise refused("file", f"have at most {self._most_bytes:,} bytes", "more", status=413)
        if self._lines is not None:
            self._lines.feed(data)
        self._digest.update(data)
        self._file.write(data)

    def end(self) -> None:
        """Checks the lines as a whole, and gives the file its name."""
        if self._lines is not None:
            self._lines.end()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._partial, self.path)

    def close(self) -> None:
        """Removes what did not become a file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def row(self, name: str, purpose: str = PURPOSE, **facts: Any) -> NewUpload:
        """The row of what has ended, under a client's name for it."""
        if self._lines is not None:
            facts |= {"rows": self._lines.rows, "kinds": self._lines.kinds}
        return NewUpload(
            id=self.path.name,
            name=_display_name(name),
            purpose=purpose,
            digest=self._digest.hexdigest(),
            size=self.size,
            facts=facts,
        )


class Room(NamedTuple):
    """What a tenant may send."""

    most_bytes: int
    besides: int
    """Bytes that APIs keep for it beside its files."""


class Incoming:
    """What tenants send: counted while it comes, and held to their limits."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._counts: Counter[str] = Counter()

    @contextmanager
    def one(self, caller: Caller) -> Iterator[None]:
        """Counts one more while it comes; refuses one too many."""
        if self._counts[caller.tenant] >= AT_ONCE:
            rule = f"send at most {AT_ONCE} files at a time, got one more: try again when some are"
            raise ApiError(429, f"a tenant must {rule} there", headers={"Retry-After": "5"})
        self._counts[caller.tenant] += 1
        try:
            yield
        finally:
            self._counts[caller.tenant] -= 1

    async def room(self, caller: Caller, *, apart: int = 0) -> Room:
        """The room that a tenant has left, where `apart` of its bytes do not count."""
        service = self._service
        held = await service.read(service.store.uploads.bytes_of, caller.tenant)
        besides = await service.read(service.quota.beside_uploads, caller.tenant, fresh=True)
        besides -= apart
        return Room(max(0, caller.limits.upload_bytes - held - besides), besides)

    def file(self, caller: Caller, room: Room) -> Arrival:
        """A new training file of a tenant."""
        return self.arrival(caller, min(LARGEST_FILE, room.most_bytes), LineCheck("file"))

    def arrival(self, caller: Caller, most: int, lines: LineCheck | None = None) -> Arrival:
        """A new file of a tenant."""
        id = f"file-{secrets.token_hex(12)}"
        return Arrival(self._service.home.upload(caller.tenant, id), most, lines)

    async def keep(self, caller: Caller, new: NewUpload, room: Room) -> Upload:
        """Writes the row of a file that is on the disk; if that is refused there is no file."""
        add = partial(
            self._service.store.uploads.add,
            new,
            tenant=caller.tenant,
            most_bytes=caller.limits.upload_bytes,
            besides=room.besides,
        )
        try:
            return await self._service.change(add)
        except BaseException:
            self._service.home.upload(caller.tenant, new.id).unlink(missing_ok=True)
            raise


async def receive(arrival: Arrival, request: Request, field: str) -> FormReader:
    """Takes a form's one file whole, or raises `ApiError`; checks and writes in a thread."""

    def end() -> None:
        form.end()
        if field == "file":
            check_fields(form.fields)
        arrival.end()

    try:
        form = FormReader(request.headers.get("content-type", ""), field, arrival.take)
        async for part in request.stream():
            if part:
                await run_in_threadpool(form.feed, part)
        await run_in_threadpool(end)
        return form
    except ValueError as error:
        raise ApiError(400, str(error), param=field, code="invalid_file") from error
    finally:
        await run_in_threadpool(arrival.close)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuses another purpose, and what would let a file go by itself."""
    if fields.get("purpose") != PURPOSE:
        raise refused("purpose", f"be {PURPOSE}", fields.get("purpose"))
    for field in fields.keys() - {"purpose"}:
        name = field.partition("[")[0][:80]
        sentence = f"{name} must be left out: files stay until they are deleted"
        raise ApiError(400, sentence, param=name, code="unsupported_parameter")


def _display_name(name: str) -> str:
    """The client's name of a file, without folders and what cannot be printed."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[:_LONGEST_NAME] or "file"
