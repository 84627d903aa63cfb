"""The history of one job: its events and its steps in one order, to the end or as they come."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from tlora_megatron.service.home import Home
from tlora_megatron.service.store import OVER, Event, Store
from tlora_megatron.training.metrics import METRICS_FILE

_LOOK_EVERY_S = 0.1
_PAGE = 1000
_ABOVE = 2**63
"""Databases hold no number as large."""
_IN_METRICS = ("evaluated",)
"""Events that are lines of the job's own metrics, too."""

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
        """Reads what `str` made.

        Raises:
            ValueError: if it is something else.
        """
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
    """Reads the history of a job.

    Args:
        store: has its events.
        home: has its steps.
        job: its id.
        after: the place behind which to begin.
    """

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


class _Steps:
    """Reads a job's `metrics.jsonl` while it is written.

    A job that goes on from a checkpoint takes steps again, and the file is cut before. A step that
    has been told is not told twice.
    """

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
        self._waiting += [
            {"kind": _kind(row), **row} for row in map(json.loads, whole.splitlines())
        ]

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


def _kind(row: Row) -> str:
    return "evaluation" if "eval_loss" in row else "step"


def _event_row(event: Event) -> Row:
    return {"kind": "event", "at": event.at, "event": event.kind, **event.body}
