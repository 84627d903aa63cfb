"""Shows jobs of a service until all have ended: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tlora_megatron.cli.service.reach.ports import JobRow, Service
from tlora_megatron.cli.service.rows import progress_words, state_words

_LINE_EVERY_S = 5.0


def wait_for(service: Service, jobs: Sequence[JobRow], console: Console) -> bool:
    """Waits until all jobs have ended.

    Returns:
        True if all of them have finished.
    """
    show = _Bars(console) if console.is_terminal else _Lines(console)
    ids = [job.id for job in jobs]
    try:
        while True:
            jobs = service.get(ids)
            show.update(jobs)
            if all(job.state.is_over for job in jobs):
                return all(job.state == "finished" for job in jobs)
            time.sleep(service.look_every_s)
    except KeyboardInterrupt:
        show.close()
        console.print("the jobs go on without this command; `tlora jobs` shows them")
        raise
    finally:
        show.close()


class _Bars:
    """A bar a job."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=console,
        )
        self._tasks = {}  # type: ignore[var-annotated]
        self._bars.start()

    def update(self, jobs: Sequence[JobRow]) -> None:
        """Shows where the jobs are."""
        for job in jobs:
            if job.id not in self._tasks:
                self._tasks[job.id] = self._bars.add_task(job.name, total=None, words="")
            total = job.num_steps or (1 if job.state.is_over else None)
            self._bars.update(
                self._tasks[job.id], total=total, completed=job.step, words=_words(job)
            )

    def close(self) -> None:
        """Leaves the bars as they are."""
        self._bars.stop()


class _Lines:
    """A line for each change of a state, and now and then one with the steps of what runs."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._states: dict[str, str] = {}
        self._line_s = clock()

    def update(self, jobs: Sequence[JobRow]) -> None:
        """Prints what is new."""
        for job in jobs:
            state = state_words(job)
            if self._states.get(job.id) != state:
                self._states[job.id] = state
                self._console.print(f"{job.name}: {_words(job)}")
        if self._clock() - self._line_s >= _LINE_EVERY_S:
            self._line_s = self._clock()
            running = [job for job in jobs if job.state == "running"]
            line = "  ".join(f"{job.name} {progress_words(job)}{_loss(job)}" for job in running)
            if line:
                self._console.print(line)

    def close(self) -> None:
        """Nothing is open."""


def _words(job: JobRow) -> str:
    """State, steps and loss of a job in one line, and why it failed."""
    steps = f"  {progress_words(job)}" if job.step or job.num_steps else ""
    why = f": {job.error}" if job.error else ""
    return f"{state_words(job)}{steps}{_loss(job)}{why}"


def _loss(job: JobRow) -> str:
    return "" if job.loss is None else f" loss {job.loss:.4f}"
