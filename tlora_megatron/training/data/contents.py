"""The rows in a data file: JSON lines, one JSON array or a Parquet table, each also gzipped.

What a file is, its first bytes say: uploads have no names.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

_GZIP, _PARQUET, _BOM = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"


def raw_rows(content: bytes, where: str) -> Iterator[tuple[Any, str]]:
    """Yields what `parse_row` takes: each row, and its place for errors.

    Args:
        where: job and file, for errors.

    Raises:
        ValueError: if the file cannot be read as a whole.
        ImportError: for a Parquet table without pyarrow.
    """
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"a gzipped file must be whole, got {error}: {where}") from error
    content = content.removeprefix(_BOM)
    if content.startswith(_PARQUET):
        rows = _table(content, where)
    elif content.lstrip()[:1] == b"[":
        try:
            rows = json.loads(content)
        except (ValueError, RecursionError) as error:
            rule = "a file that begins with [ must be one JSON array"
            raise ValueError(f"{rule}, got {error}: {where}") from error
    else:
        # Not splitlines: JSON strings may hold U+2028 and other breaks as they are.
        lines = enumerate(content.split(b"\n"), start=1)
        yield from ((line, f"{where} line {number}") for number, line in lines if line.strip())
        return
    yield from ((row, f"{where} row {number}") for number, row in enumerate(rows, start=1))


def _table(content: bytes, where: str) -> list[Any]:
    try:
        from pyarrow import BufferReader, parquet
    except ImportError as error:
        install = "pip install 'tlora-megatron[data]'"
        raise ImportError(f"a Parquet file needs pyarrow: {install}: {where}") from error
    try:
        rows = parquet.read_table(BufferReader(content)).to_pylist()
    except (ValueError, OSError) as error:
        raise ValueError(f"a Parquet file must be whole, got {error}: {where}") from error
    return [without_nulls(row) for row in rows]


def without_nulls(value: Any) -> Any:
    """A value of a table without what is null, at any depth: there all rows have the same keys."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
