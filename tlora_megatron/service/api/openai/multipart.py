"""Reads a form with one file as it arrives: small fields into memory, the file to whoever wants it.

FastAPI's own forms are whole on the disk before anybody may refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_LARGEST_FIELD = 1024
_MOST_PARTS = 16


class FormReader:
    """Reads the form of one request.

    Args:
        content_type: The request's header.
        on_data: Takes the file's bytes.
    """

    def __init__(self, content_type: str, on_data: Callable[[bytes], None]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ValueError(
                f"a file must come as multipart/form-data with a boundary, got {content_type!r:.80}"
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """File name in the field `file`; None: there was none."""
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
        """Reads the next bytes of the body.

        Raises:
            ValueError: if they are no part of such a form, or `on_data` refuses.
        """
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise ValueError(f"the body must be multipart/form-data, got {error}") from error

    def end(self) -> None:
        """Refuses a form that is not whole."""
        if not self._ended:
            raise ValueError("the body must end with its boundary, got one that was cut")
        if self.filename is None:
            raise ValueError("file must be given: a part of the form with a file's name")

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
        self._is_file = self._name == b"file" and b"filename" in options
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
