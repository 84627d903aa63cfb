"""The display of `tlora serve`: a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tlora_megatron.cli.service.job_table import (
    count_words,
    duration_words,
    job_table,
    progress_words,
)
from tlora_megatron.cli.tables import JsonConsole, make_table
from tlora_megatron.service.logs import log

if TYPE_CHECKING:
    from tlora_megatron.service.store import Gang, Job, Store

_SPEED_OVER_S = 10.0
_LOOK_EVERY_S = 0.5
_LINE_EVERY_S = 10.0
_MOST_IN_A_LINE = 8
_CHANGES = ("submitted", "state")
_PAGE = 1000
_ROWS_BESIDE_JOBS = 14
"""Lines of a terminal that the heading, the gangs and the queue take."""


class Speeds:
    """Tokens a second of every job, over the last seconds, from what the store says of them."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def update(self, jobs: Iterable[Job], now_s: float) -> None:
        """Takes note of the tokens of jobs that train; others are forgotten."""
        training = {job.id: job.tokens for job in jobs if job.state == "running"}
        self._seen = {job: self._seen.get(job, deque()) for job in training}
        for job, tokens in training.items():
            seen = self._seen[job]
            if seen and tokens < seen[-1][1]:
                seen.clear()  # it went on from a checkpoint
            seen.append((now_s, tokens))
            while now_s - seen[0][0] > _SPEED_OVER_S:
                seen.popleft()

    def of(self, job: str) -> float:
        """Tokens a second of a job; 0 as long as nothing is known."""
        seen = self._seen.get(job)
        if not seen or seen[-1][0] == seen[0][0]:
            return 0.0
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


class Board:
    """Shows a service while its controller runs, from the store, which a thread reads."""

    def __init__(self, store: Store, console: Console, title: str) -> None:
        self._store, self._console, self._title = store, console, title
        self._speeds = Speeds()
        self._start_s = time.time()
        self._told = 0
        """The last event whose change was printed."""
        self._ends = Flag()
        self._thread = Thread(target=self._run, name="board", daemon=True)

    def __enter__(self) -> Board:
        self._told = self._store.events.last()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def say(self, sentence: str, **more: object) -> None:
        """Prints a sentence of the controller, above the table if there is one.

        `more` are fields of a log in JSON.
        """
        log(sentence, **more)
        if isinstance(self._console, JsonConsole):
            self._console.tell(sentence, **more)
        else:
            self._console.print(f"{time.strftime('%H:%M:%S')}  {sentence}")

    def _run(self) -> None:
        from tlora_megatron.service.store import StoreError

        show = self._show_table if self._console.is_terminal else self._show_lines
        while True:
            # The controller says what is wrong with the store, and goes on; so does this.
            with suppress(StoreError):
                show()
                return
            if self._ends.wait(_LOOK_EVERY_S):
                return

    def _show_table(self) -> None:
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while not self._ends.wait(_LOOK_EVERY_S):
                live.update(self.table(), refresh=True)
                self._told = self.say_changes(self._told, log)

    def _show_lines(self) -> None:
        """A line for each change of a job, and now and then one with the steps of what runs."""
        from tlora_megatron.service.store import JobState

        line_s = time.monotonic()
        while not self._ends.wait(_LOOK_EVERY_S):
            self._told = self.say_changes(self._told)
            running = self._store.jobs.page(states=[JobState.RUNNING], limit=_PAGE)
            self._speeds.update(running, time.time())
            if running and time.monotonic() - line_s >= _LINE_EVERY_S:
                line_s = time.monotonic()
                self.say(self._line(running))
        self._told = self.say_changes(self._told)

    def say_changes(self, seq: int, say: Callable[..., None] | None = None) -> int:
        """Prints the changes of jobs after an event; returns the number of the last event.

        `say` takes them instead.
        """
        last = self._store.events.last()
        while seq < last:
            events = self._store.events.after(seq, kinds=_CHANGES, limit=_PAGE)
            jobs = {job.id: job for job in self._store.jobs.many([str(e.job) for e in events])}
            for event in events:
                if (job := jobs.get(str(event.job))) is not None:
                    words = change_words(job, event.kind, event.body)
                    (say or self.say)(words, job=job.id, name=job.name, tenant=job.tenant)
            seq = events[-1].seq if len(events) == _PAGE else last
        return seq

    def _line(self, running: Sequence[Job]) -> str:
        """Speed of all jobs together, and the steps of the first ones."""
        speed = sum(self._speeds.of(job.id) for job in running)
        words = [f"{job.name} {progress_words(job)}" for job in running[:_MOST_IN_A_LINE]]
        if len(running) > _MOST_IN_A_LINE:
            words.append(f"and {len(running) - _MOST_IN_A_LINE} more")
        return "  ".join([f"{speed:,.0f} tokens/s", *words] if speed else words)

    def table(self) -> RenderableType:
        """Heading, gangs, unfinished jobs, and how many jobs are in which state."""
        now, now_s = self._store.load(), time.time()
        self._speeds.update(now.jobs, now_s)
        words = count_words(self._store.jobs.counts())
        rows = max(3, self._console.height - _ROWS_BESIDE_JOBS - len(now.gangs))
        jobs = sorted(now.jobs, key=lambda job: (not job.state.is_live, job.number))
        parts: list[RenderableType] = [
            Text(f"{self._title}, {duration_words(now_s - self._start_s)}", style="bold")
        ]
        if now.gangs:
            parts.append(gang_table(now.gangs, jobs, self._speeds.of))
        if jobs:
            parts.append(job_table(jobs[:rows], now_s))
        if len(jobs) > rows:
            words += f"; {len(jobs) - rows:,} are not shown"
        return Group(*parts, Text(words + "; Ctrl-C stops", style="dim"))


def gang_table(gangs: Iterable[Gang], jobs: Iterable[Job], speed: Callable[[str], float]) -> Table:
    """A row a gang: its base, layout, GPUs and jobs, and its tokens a second."""
    columns = ("gang", "state", "base", "layout", "GPUs", "jobs", "tokens/s")
    table = make_table(*columns, right=("jobs", "tokens/s"))
    members: dict[tuple[str | None, int | None], list[Job]] = {}
    for job in jobs:
        members.setdefault((job.gang, job.gang_epoch), []).append(job)
    for gang in gangs:
        own = [job for job in members.get((gang.name, gang.epoch), []) if job.state.is_live]
        section = gang.spec.base_model
        base = str(section.get("path") or section.get("config") or "-")
        table.add_row(
            f"{gang.name} #{gang.epoch}",
            str(gang.state),
            base.rstrip("/").rsplit("/", 1)[-1],
            layout_words(gang.spec.parallel, gang.spec.world_size),
            " ".join(f"{node}:{gpu}" for node, gpu in gang.spec.gpus),
            str(len(own)),
            f"{sum(speed(job.id) for job in own):,.0f}",
        )
    return table


def layout_words(parallel: Mapping[str, object], world_size: int) -> str:
    """How a gang's processes share the model: `TP2 DP2`, `1 process`."""
    sizes = {key: int(str(parallel.get(f"{key}_size", 1))) for key in ("tp", "pp", "cp")}
    rest = world_size
    for size in sizes.values():
        rest //= size
    words = [f"{key.upper()}{size}" for key, size in {**sizes, "dp": rest}.items() if size > 1]
    return " ".join(words) or "1 process"


def change_words(job: Job, kind: str, body: Mapping[str, object]) -> str:
    """One line about a change of a job: `mirror: running -> finished`."""
    if kind == "submitted":
        return f"{job.name} ({job.id}) submitted"
    why = f": {body['why']}" if body.get("why") else ""
    return f"{job.name} ({job.id}) {body.get('from')} -> {body.get('to')}{why}"
