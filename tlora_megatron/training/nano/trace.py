"""Writes and reads `OUT/nano_batches.jsonl`, which has a line for each measured step.

A line that cannot be used (edited by hand, or of an earlier version) is passed over with a warning
and stays where it is.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from tlora_megatron.files import BY_UMASK, write_atomic

logger = logging.getLogger(__name__)

TRACE_FILE = "nano_batches.jsonl"
"""In the output folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    """One measured step."""

    step: int
    """Number of steps measured so far, this one included."""
    nano_batches: int
    """Most nano-batches of a micro-batch in it."""
    time_s: float
    tokens: int
    """Tokens of all jobs."""
    phase: str
    """Purpose of the step; see `controller.Phase`."""
    kept: int
    """The choice behind it, of whichever mix of jobs made one last."""
    jobs: int
    """Number of jobs that trained."""
    mix: str
    """Short hash of the jobs; see `rounds.mix_key`."""
    chosen: int | None = None
    """The mix's own choice; None while it has made none."""
    job_steps: dict[str, int] | int = 0
    """Steps of each of the run's jobs, by name, behind this one: tells what a checkpoint is behind.
    One number: of all together, as earlier versions wrote it."""

    @classmethod
    def parse(cls, text: bytes) -> TraceLine:
        """Parses a line; ignores unknown keys, and raises ValueError for a broken line."""
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError(f"a line must be a JSON object, got {text[:80]!r}")
        values = {}
        for field in fields(cls):
            value, kind = record.get(field.name, field.default), _KINDS[field.name]
            if not _is_of(value, kind):
                got = "none" if value is MISSING else repr(value)
                name = getattr(kind, "__name__", kind)
                raise ValueError(f"{field.name} must be of type {name}, got {got}")
            values[field.name] = value
        return cls(**values)

    def steps_of(self, names: Iterable[str]) -> int:
        """Sum of the steps of the named jobs."""
        if isinstance(self.job_steps, int):
            return self.job_steps
        return sum(self.job_steps.get(name, 0) for name in names)


def _is_of(value: object, kind: Any) -> bool:
    if isinstance(value, dict):
        return dict[str, int] in get_args(kind) and all(type(n) is int for n in value.values())
    plain = tuple(k for k in get_args(kind) or (kind,) if k != dict[str, int])
    return isinstance(value, plain) and not isinstance(value, bool)


_KINDS = get_type_hints(TraceLine)


class Resumed(NamedTuple):
    """The part of a trace that a resumed run goes on from."""

    step: int
    """Step of the last line that the checkpoints include; 0 = there is none."""
    last: TraceLine | None
    """Last line that was written, even if it was cut off: measurements stay true."""


NOTHING = Resumed(0, None)


class NanoTrace:
    """The writer's file. A disk that refuses it costs the run nothing but a warning."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / TRACE_FILE
        self._warned_of_disk = False

    def begin(self) -> None:
        """Empties the file."""
        try:
            write_atomic(self.path, "", mode=BY_UMASK)
        except OSError as error:
            self._warn_of_disk("emptied", error)

    def resume(self, job_steps: Mapping[str, int]) -> Resumed:
        """Removes the lines of steps that a resumed run does again, and a torn last line.

        Args:
            job_steps: steps of each job, by name, in the checkpoint that it goes on from.
        """
        try:
            return self._resume(job_steps)
        except FileNotFoundError:
            return NOTHING
        except OSError as error:
            self._warn_of_disk("read", error)
            return NOTHING

    def append(self, line: TraceLine) -> None:
        """Appends a line, whole or not at all."""
        text = (json.dumps(asdict(line)) + "\n").encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                if file.write(text) < len(text):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn_of_disk("written", error)

    def _resume(self, job_steps: Mapping[str, int]) -> Resumed:
        whole = self.path.read_bytes()
        cut = end = whole.rfind(b"\n") + 1
        last = kept = None
        broken: list[tuple[int, ValueError]] = []
        while end and kept is None:
            begin = whole.rfind(b"\n", 0, end - 1) + 1
            try:
                line = TraceLine.parse(whole[begin:end])
            except ValueError as error:
                broken.insert(0, (whole.count(b"\n", 0, begin) + 1, error))
            else:
                last = last or line
                if line.steps_of(job_steps) <= sum(job_steps.values()):
                    kept = line
                else:
                    cut = begin
            end = begin
        _warn_of_lines(self.path, broken)
        if cut < len(whole):
            os.truncate(self.path, cut)
        return Resumed(kept.step if kept else 0, last)

    def _warn_of_disk(self, what: str, error: OSError) -> None:
        if not self._warned_of_disk:
            self._warned_of_disk = True
            logger.warning("%s could not be %s: %s", self.path, what, error)


def read_trace(output_dir: Path) -> list[TraceLine]:
    """Reads all lines that are whole and valid; none if there is no file."""
    path = output_dir / TRACE_FILE
    if not path.exists():
        return []
    lines, broken = [], []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            lines.append(TraceLine.parse(text))
        except ValueError as error:
            broken.append((number, error))
    _warn_of_lines(path, broken)
    return lines


def _warn_of_lines(path: Path, broken: Sequence[tuple[int, ValueError]]) -> None:
    if broken:
        number, error = broken[0]
        more = f" ({len(broken)} such lines in all)" if len(broken) > 1 else ""
        logger.warning("%s:%d is passed over: %s%s", path, number, error, more)
