"""Checks the lines of a training file while it arrives."""

from __future__ import annotations

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
        """How many rows have which format: completion, messages or text."""

    def feed(self, part: bytes) -> None:
        """Checks all lines that the part completes.

        Raises:
            ValueError: naming the file and the line.
        """
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            self._check(line)
        if len(self._rest) > LONGEST_LINE:
            self._too_long(self._number + 1)

    def end(self) -> None:
        """Checks what follows the last line break.

        Raises:
            ValueError: as `feed` does, or if no line holds anything.
        """
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
