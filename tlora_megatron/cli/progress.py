"""Shows a running training: a bar per job on a terminal, otherwise a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

_MOST_JOBS_IN_A_LINE = 8


@dataclass(slots=True)
class _JobState:
    step: int
    max_steps: int | None
    loss: float | None = None
    bar: TaskID | None = None

    @property
    def is_done(self) -> bool:
        return self.max_steps is not None and self.step >= self.max_steps


class _Bars(Progress):
    """One bar per job, and a line below with the speed of the whole run."""

    footer = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.footer, style="dim")


class RichProgress:
    """Shows events as live bars if `console` is a terminal, otherwise as a line now and then.

    Args:
        console: the console to print to.
        line_every_s: seconds between two lines.
        clock: returns the seconds of a monotonic clock.
    """

    def __init__(
        self,
        console: Console,
        *,
        line_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._line_every_s = line_every_s
        self._clock = clock
        self._start_s = self._last_line_s = clock()
        self._tokens_per_s: float | None = None
        self._jobs: dict[str, _JobState] = {}
        self._prepared: dict[str, int | None] = {}
        """Last steps of jobs that are about to join."""
        self._bars = _make_bars(console) if console.is_terminal else None
        self._is_open = False

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Shows an event of the run; kinds that say nothing to a person are passed over."""
        if kind == "begun":
            self._begin(body["jobs"])
        elif kind == "progress":
            self._show_rate(body["tokens_per_s"])
        elif job is None:
            return
        elif kind == "prepared":
            self._prepared[job] = body["num_steps"]
        elif kind == "joined":
            self._add(job, body["from_step"], self._prepared.pop(job, None))
            self._print(f"{job}: joins at step {body['from_step']}")
        elif kind == "stepped":
            self._show_step(job, body["step"], body["loss"], body["lr"])
        elif kind == "left" and job in self._jobs:
            self._print(f"{job}: is saved at step {body['step']} and leaves: cancelled")
        elif kind == "note":
            self._print(f"{job}: {body['message']}")

    def close(self) -> None:
        """Ends the display; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._bars is not None:
            self._bars.stop()
        else:
            self._print(self._line(list(self._jobs)))

    def _begin(self, jobs: Mapping[str, tuple[int, int | None]]) -> None:
        self._is_open = True
        self._start_s = self._last_line_s = self._clock()
        for name, (step, max_steps) in jobs.items():
            self._add(name, step, max_steps)
        if self._bars is not None:
            self._bars.start()
        else:
            self._print(f"training {len(jobs)} jobs: {', '.join(jobs)}")

    def _add(self, name: str, step: int, max_steps: int | None) -> None:
        if name in self._jobs and self._bars is not None:  # it was cancelled, and comes back
            bar = self._jobs[name].bar
            if bar is not None:
                self._bars.remove_task(bar)
        self._jobs[name] = _JobState(step=step, max_steps=max_steps)
        if self._bars is not None:
            self._jobs[name].bar = self._bars.add_task(
                name, total=max_steps, completed=step, loss="", lr=""
            )

    def _show_step(self, name: str, step: int, loss: float, lr: float) -> None:
        job = self._jobs[name]
        job.step, job.loss = step, loss
        if self._bars is not None and job.bar is not None:
            self._bars.update(job.bar, completed=step, loss=f"loss {loss:.4f}", lr=f"lr {lr:.2e}")
        else:
            self._print_line_if_due()

    def _show_rate(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        if self._bars is not None:
            self._bars.footer = f"{tokens_per_s:,.0f} tokens/s"
        else:
            self._print_line_if_due()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_line_if_due(self) -> None:
        now_s = self._clock()
        if now_s - self._last_line_s >= self._line_every_s:
            self._last_line_s = now_s
            self._print(self._line([n for n, job in self._jobs.items() if not job.is_done]))

    def _line(self, names: list[str]) -> str:
        minutes, seconds = divmod(int(self._clock() - self._start_s), 60)
        parts = [f"[{minutes:02d}:{seconds:02d}]"]
        if self._tokens_per_s is not None:
            parts.append(f"{self._tokens_per_s:,.0f} tokens/s")
        parts += [_describe(name, self._jobs[name]) for name in names[:_MOST_JOBS_IN_A_LINE]]
        if len(names) > _MOST_JOBS_IN_A_LINE:
            parts.append(f"and {len(names) - _MOST_JOBS_IN_A_LINE} more")
        return "  ".join(parts)


def _describe(name: str, job: _JobState) -> str:
    total = "" if job.max_steps is None else f"/{job.max_steps}"
    loss = "" if job.loss is None else f" loss {job.loss:.4f}"
    return f"{name} {job.step}{total}{loss}"


def _make_bars(console: Console) -> _Bars:
    return _Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False),
        TextColumn("{task.fields[lr]}", markup=False),
        console=console,
    )
