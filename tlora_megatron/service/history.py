"""The history of one job: its events and its steps in one order, as they come or backwards."""

from __future__ import annotations

import json
import math
import os
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from tlora_megatron.service.home import Home
from tlora_megatron.service.store import OVER, Event, Store
from tlora_megatron.training.metrics import METRICS_FILE

_LOOK_EVERY_S = 0.1
_PAGE = 1000
_ABOVE = 2**63
"""Databases hold no number as large."""
_IN_METRICS = ("evaluated",)
"""Events that are lines of the job's own metrics, too."""
_BLOCK = 1 << 14
"""Bytes of the metrics that are read at a time, backwards: some hundred lines, half a page."""
_MARK = re.compile(r"(event|step|evaluation)-(0|[1-9]\d{0,17})")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in a job's history; as text it is the id of a row, from which a reader goes on."""

    seq: int = 0
    """Number of the last event."""
    step: int = 0
    evaluation: int = -1
    """Step of the last evaluation."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads what `str` made; raises `ValueError` if it is something else."""
        try:
            seq, step, evaluation = (int(part) for part in text.split("."))
            if not all(-1 <= part < _ABOVE for part in (seq, step, evaluation)):
                raise ValueError("out of range")
        except ValueError:
            raise ValueError(
                f"a place in a history must be like 12.3.0, got {text!r:.80}"
            ) from None
        return cls(seq=seq, step=step, evaluation=evaluation)

    def __str__(self) -> str:
        return f"{self.seq}.{self.step}.{self.evaluation}"


class Told(NamedTuple):
    """One thing that happened to a job."""

    place: Place
    """Where a reader goes on who has read it."""
    row: Row
    """`kind` is event, step or evaluation."""


class History:
    """Reads the history of a job from behind a place on."""

    def __init__(self, store: Store, home: Home, job: str, after: Place | None = None) -> None:
        self._store, self._job = store, job
        after = after or Place()
        self._seq = after.seq
        self._steps = _Steps(home.job(job) / METRICS_FILE, after.step, after.evaluation)

    def read(self) -> tuple[list[Told], bool]:
        """Returns what is new, events behind the steps before them, and True if it was the last."""
        # Looked at first: what the job did before it was over is then read below.
        is_over = self._store.jobs.get(self._job).state.is_over
        return list(self._new()), is_over

    def follow(self) -> Iterator[Told]:
        """Yields what is there and what comes, until the job is over."""
        is_over = False
        while not is_over:
            news, is_over = self.read()
            yield from news
            if not is_over:
                time.sleep(_LOOK_EVERY_S)

    def _new(self) -> Iterator[Told]:
        self._steps.read()
        while events := self._store.events.after(self._seq, job=self._job, limit=_PAGE):
            for event in events:
                yield from self._told(self._steps.until(_step_of(event)))
                self._seq = event.seq
                if event.kind not in _IN_METRICS:
                    yield from self._told([_event_row(event)])
        yield from self._told(self._steps.until(math.inf))

    def _told(self, rows: Iterator[Row] | list[Row]) -> Iterator[Told]:
        for row in rows:
            last = self._steps.last
            place = Place(seq=self._seq, step=last["step"], evaluation=last["evaluation"])
            yield Told(place, row)


class Mark(NamedTuple):
    """Names one row of a job's history, whatever comes before and behind it."""

    kind: Literal["event", "step", "evaluation"]
    number: int
    """Of the event, or of the step."""

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Reads what `str` made; None if it is something else."""
        found = _MARK.fullmatch(text)
        return None if found is None else cls(found[1], int(found[2]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.kind}-{self.number}"


class Past:
    """Reads the history of a job backwards, in the order of `History`.

    A page costs as much as it is long: of the file of steps the end alone is read, or what lies
    before a row. It is held until `close`.
    """

    def __init__(self, store: Store, home: Home, job: str) -> None:
        self._tail = _Tail(home.job(job) / METRICS_FILE)
        self._events = store.events.after(0, job=job, limit=None)
        # Up to which step all rows stand before the event.
        self._steps_before = list(accumulate(map(_step_of, self._events), max))

    def close(self) -> None:
        self._tail.close()

    def before(self, mark: Mark | None) -> Iterator[tuple[Mark, Row]] | None:
        """The rows before one, the newest first, or all; None if the history has no such row.

        Steps have the time `at` of the event before.
        """
        if mark is None:
            return self._backwards(len(self._events), self._tail.size)
        if mark.kind == "event":
            index = bisect_left(self._events, mark.number, key=lambda event: event.seq)
            if index == len(self._events) or self._events[index].seq != mark.number:
                return None
            return self._backwards(index, self._tail.end_of(self._steps_before[index]))
        begin = self._tail.begin_of(mark)
        if begin is None:
            return None
        return self._backwards(bisect_left(self._steps_before, mark.number), begin)

    def _backwards(self, index: int, end: int) -> Iterator[tuple[Mark, Row]]:
        """Merges the events before an index and the lines before a place in the file."""
        rows = self._tail.rows(end)
        _, row = next(rows, (0, None))
        while index or row is not None:
            event = self._events[index - 1] if index else None
            if row is not None and (event is None or row["step"] > self._steps_before[index - 1]):
                at = 0.0 if event is None else event.at
                yield Mark(row["kind"], row["step"]), {"at": at, **row}
                _, row = next(rows, (0, None))
                continue
            assert event is not None
            index -= 1
            if event.kind not in _IN_METRICS:
                yield Mark("event", event.seq), _event_row(event)


def rows_at(home: Home, job: str, steps: Iterable[int]) -> dict[int, list[Row]]:
    """Returns what a job measured at some steps; of its file little else is read."""
    with closing(_Tail(home.job(job) / METRICS_FILE)) as tail:
        return {step: tail.at(step) for step in steps}


def last_rows(path: Path, count: int | None = None, most_bytes: int | None = None) -> list[Row]:
    """The last whole lines of a job's metrics, in their order; the file may grow meanwhile.

    Args:
        count: so many lines at most; None: all.
        most_bytes: lines that begin so far from the end at most; None: however far.
    """
    with closing(_Tail(path)) as tail:
        first = 0 if most_bytes is None else tail.size - most_bytes
        lines = takewhile(lambda line: line[0] >= first, tail.lines(tail.size))
        return [json.loads(line) for _, line in islice(lines, count)][::-1]


class _Tail:
    """Reads a job's `metrics.jsonl` from any place on backwards.

    A file that is written anew, by a job that goes on from a checkpoint, gets another name first:
    what is open here stays as it is, but for lines that come. Steps grow from line to line.
    """

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        self.size = 0
        """Bytes of whole lines."""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        self.size = self._begin_of_line(os.fstat(self._file).st_size)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def rows(self, end: int) -> Iterator[tuple[int, Row]]:
        """Yields the rows before a line that begins at `end`, the last first, and their begins."""
        for place, line in self.lines(end):
            yield place, _row(line)

    def lines(self, end: int) -> Iterator[tuple[int, bytes]]:
        """Yields the lines before one that begins at `end`, the last first, behind their begins."""
        rest = b""
        while end > 0:
            begin = max(0, end - _BLOCK)
            content = self._read(begin, end) + rest
            # The first line of a block may begin in the block before.
            cut = (content.find(b"\n") + 1 or len(content)) if begin else 0
            place = begin + len(content)
            for line in reversed(content[cut:].splitlines(keepends=True)):
                place -= len(line)
                yield place, line
            rest, end = content[:cut], begin

    def at(self, step: int) -> list[Row]:
        """The lines of a step, the last first."""
        lines = (row for _, row in self.rows(self.end_of(step)))
        return list(takewhile(lambda row: row["step"] == step, lines))

    def end_of(self, step: float) -> int:
        """Where the lines up to a step end."""
        low, high = 0, 0 if step < 0 else self.size
        if math.isinf(step):
            return high
        while low < high:
            begin = self._begin_of_line((low + high) // 2)
            line = self._line(begin)
            if _row(line)["step"] <= step:
                low = begin + len(line)
            else:
                high = begin
        return low

    def begin_of(self, mark: Mark) -> int | None:
        """Where the line of a step or an evaluation begins; None if there is none."""
        for begin, row in self.rows(self.end_of(mark.number)):
            if row["step"] < mark.number:
                break
            if row["kind"] == mark.kind:
                return begin
        return None

    def _begin_of_line(self, place: int) -> int:
        """Where the line that a place is in begins."""
        while place > 0:
            begin = max(0, place - _BLOCK // 8)
            found = self._read(begin, place).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            place = begin
        return 0

    def _line(self, begin: int) -> bytes:
        content, end = b"", begin
        while b"\n" not in content:
            content += self._read(end, min(self.size, end + _BLOCK // 8))
            end = begin + len(content)
        return content[: content.index(b"\n") + 1]

    def _read(self, begin: int, end: int) -> bytes:
        assert self._file is not None, "a file that is not there has no bytes"
        found = os.pread(self._file, end - begin, begin)
        if len(found) != end - begin:
            raise OSError(f"{METRICS_FILE} must keep its {end:,} bytes while it is read, got less")
        return found


class _Steps:
    """Reads a job's `metrics.jsonl` while it is written; no step is told twice."""

    def __init__(self, path: Path, step: int, evaluation: int) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self._waiting: list[Row] = []
        self.last = {"step": step, "evaluation": evaluation}

    def read(self) -> None:
        """Takes what is new in the file; a line that is not whole yet waits."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset, self._waiting = found.st_ino, 0, []
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._waiting += map(_row, whole.splitlines())

    def until(self, step: float) -> Iterator[Row]:
        """Yields what waits up to a step."""
        while self._waiting and self._waiting[0]["step"] <= step:
            row = self._waiting.pop(0)
            if row["step"] > self.last[row["kind"]]:
                self.last[row["kind"]] = row["step"]
                yield row


def _step_of(event: Event) -> float:
    """The step behind which an event comes; behind its end a job takes none."""
    is_end = event.kind == "state" and event.body.get("to") in OVER
    return math.inf if is_end else event.body.get("step", -1)


def _row(line: bytes) -> Row:
    row = json.loads(line)
    return {"kind": "evaluation" if "eval_loss" in row else "step", **row}


def _event_row(event: Event) -> Row:
    return {"kind": "event", "at": event.at, "event": event.kind, **event.body}
