"""Checks the lines of a training file while it arrives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tlora_megatron.training.data.jsonl_file import parse_row

LONGEST_LINE = 4 * 2**20
"""Bytes; a line is held in memory."""
_UNUSED = ("tools", "functions", "parallel_tool_calls", "function_call")
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
        where = f"{self._name} line {self._number}"
        row = parse_row(line, where)
        if row.kind == "messages":
            _check_chat(row.fields, where)
        self.rows += 1
        self.kinds[row.kind] = self.kinds.get(row.kind, 0) + 1

    def _too_long(self, number: int) -> None:
        raise ValueError(
            f"a line must have at most {LONGEST_LINE:,} bytes, got more: {self._name} line {number}"
        )


def _check_chat(fields: Mapping[str, Any], where: str) -> None:
    """Refuses what chats of the API may hold and training would pass over."""
    for key in _UNUSED:
        if fields.get(key):
            raise ValueError(f"{key} must be left out, got {_short(fields[key])}: {where}")
    has_answer = False
    for index, message in enumerate(fields["messages"]):
        name = f"messages[{index}]"
        if message.get("weight", 1) != 1:
            rule = "be 1 or left out: all answers of a chat are learnt"
            raise ValueError(f"{name}.weight must {rule}, got {_short(message['weight'])}: {where}")
        for key in ("tool_calls", "function_call"):
            if message.get(key):
                raise ValueError(f"{name}.{key} must be left out, got one: {where}")
        has_answer |= message["role"] == "assistant"
    if not has_answer:
        raise ValueError(f"messages must hold one of role assistant, got none: {where}")


def _short(value: Any) -> str:
    return json.dumps(value)[:80]
