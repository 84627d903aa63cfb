"""Listeners of a run: they are told what happens while jobs train. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

JobStart = tuple[str, int, int | None]
"""Name of a job, its steps done before this run, its steps at the end (None = not known)."""


class RunListener(Protocol):
    """Is told what happens in a run.

    Called on every rank, so all ranks but the first should have a `SilentListener`.
    """

    def on_start(self, jobs: Sequence[JobStart]) -> None:
        """Called once, before the first step, with all jobs that are going to train."""

    def on_join(self, job: JobStart) -> None:
        """A job has joined those that train."""

    def on_step(self, name: str, step: int, loss: float, lr: float) -> None:
        """Job `name` has done its optimizer step `step`, counted from 1."""

    def on_round(self, tokens_per_s: float) -> None:
        """A round has ended; the throughput so far, over all jobs."""

    def on_event(self, name: str, message: str) -> None:
        """Something worth telling a person has happened to job `name`."""

    def on_finish(self) -> None:
        """The run has ended; no more calls follow."""


class SilentListener:
    """Ignores everything it is told."""

    def on_start(self, jobs: Sequence[JobStart]) -> None:
        """Ignored."""

    def on_join(self, job: JobStart) -> None:
        """Ignored."""

    def on_step(self, name: str, step: int, loss: float, lr: float) -> None:
        """Ignored."""

    def on_round(self, tokens_per_s: float) -> None:
        """Ignored."""

    def on_event(self, name: str, message: str) -> None:
        """Ignored."""

    def on_finish(self) -> None:
        """Ignored."""
