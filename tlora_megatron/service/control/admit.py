"""Admits jobs that users submit, and does what users request: to cancel, pause or resume a job."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.records import (
    LiveJob,
    live_job,
    schedule_of,
    stats_of,
    submission_of,
    take_stats,
)
from tlora_megatron.service.prepare.pool import PreparePool
from tlora_megatron.service.prepare.submission import ORDER, Outcome, Refused
from tlora_megatron.service.store import Event, Job, JobState

_KINDS = ("submitted", "wished")
_EVENTS, _PAGE = 500, 100
"""Events and outcomes taken in at a time, so that gangs are never kept waiting for long."""


class Admission:
    """Takes in new jobs and requests from the store's events."""

    def __init__(self, context: Context, validator: PreparePool, last_event: int) -> None:
        self._context = context
        self._validator = validator
        self._seen = last_event
        self._outcomes: deque[Outcome] = deque()
        self._is_full = self._is_cancelling = False

    def look(self) -> None:
        last, self._is_cancelling = self._context.store.events.last(), False
        events: Sequence[Event] = ()
        if self._seen < last:
            events = self._context.store.events.after(self._seen, kinds=_KINDS, limit=_EVENTS)
            jobs = dict.fromkeys(event.job for event in events if event.job is not None)
            # Who submits thousands must not wait for a change that there is not.
            is_asked = any(event.kind == "wished" for event in events)
            with self._context.store.transaction() if is_asked else nullcontext():
                new = self._update(self._context.store.jobs.many(list(jobs)))
            self.take(new)
            self._seen = events[-1].seq if len(events) == _EVENTS else last
        self._is_full = len(events) == _EVENTS
        # Processes that start now would check jobs of the next page, which ends them again.
        if not (self._is_full and self._is_cancelling):
            self._take_outcomes()

    @property
    def has_more(self) -> bool:
        return self._is_full or bool(self._outcomes)

    def _update(self, rows: Sequence[Job]) -> list[LiveJob]:
        """Adds jobs and does what is asked of them; returns the new ones."""
        known, new = self._context.state.jobs, []
        for row in rows:
            if row.id in known:
                known[row.id].requested = row.wish
            elif not row.state.is_over:
                new.append(live_job(row))
                self._context.state.add(new[-1])
        there = [known[row.id] for row in rows if row.id in known]
        asked = [live for live in there if live.requested is not None]
        waiting = [live for live in asked if not live.state.is_live]
        if cancelled := [live for live in waiting if live.requested == "cancel"]:
            self._cancel(cancelled)  # thousands may be cancelled at once, new ones, too
        for live in asked:
            if not live.state.is_over:
                self.fulfil(live)
        return new

    def _cancel(self, waiting: Sequence[LiveJob]) -> None:
        """Cancels jobs that no gang has."""
        self._is_cancelling = True
        self._context.cancel_waiting(waiting)
        self._validator.forget({live.id for live in waiting})

    def take(self, new: Iterable[LiveJob]) -> None:
        """Validates those of some jobs that are new or were being validated."""
        found = {live.id: live for live in new if live.state is JobState.VALIDATING}
        documents = self._context.store.jobs.documents(list(found))
        for live in found.values():
            try:
                submission = submission_of(documents[live.id])
            except ValueError as error:
                self._context.fail(live, f"job {live.name!r} cannot be read: {error}")
                continue
            self._validator.submit(live.id, submission, live.priority)

    def fulfil(self, live: LiveJob) -> None:
        """Does what a user requests of a job, as far as it can be done now."""
        context = self._context
        if live.requested == "resume":
            if live.failed_saves:
                live.failed_saves = 0
                context.remember(live)
            if live.state is JobState.PAUSED:
                context.change(live, JobState.QUEUED, why="resumed")
                context.enqueue(live)
            else:
                # It is still leaving, or never paused: it is queued when its gang lets it go.
                context.store.jobs.clear_wish(live.id, "resume")
                live.requested = None
        elif live.state.is_live:
            # The gang lets it go first: `plan_actions` sees a member that no target has.
            context.state.withdraw(live, context.clock())
            context.note_pause(live)
            context.wants_actions = context.wants_decision = True
            if not context.state.is_held(live):
                context.vacate(live, why=f"{live.requested} before a gang had it")
        elif live.requested == "cancel":
            self._cancel([live])
        elif live.state is JobState.QUEUED:
            context.state.withdraw(live, context.clock())
            context.note_pause(live)
            context.change(live, JobState.PAUSED, why="paused")

    def _take_outcomes(self) -> None:
        self._outcomes.extend(self._validator.poll())
        if not self._outcomes:
            return
        with self._context.store.transaction():
            for _ in range(min(_PAGE, len(self._outcomes))):
                result = self._outcomes.popleft()
                live = self._context.state.jobs.get(result.job)
                if live is not None and live.state is JobState.VALIDATING:
                    self._accept(live, result)

    def _accept(self, live: LiveJob, result: Outcome) -> None:
        context = self._context
        if isinstance(result, Refused):
            context.change(live, JobState.FAILED, why=result.error, error=result.error)
            return
        stats = stats_of(result.load(), tokens=result.train_tokens, num_steps=result.num_steps)
        document = context.store.jobs.document(live.id)
        document[ORDER] = {"document": dict(result.document), "tokens": dict(result.tokens)}
        take_stats(live, stats)
        live.step = int(result.from_step)
        try:
            context.pricing.add_base(live.base, document["base_model"])
        except (OSError, ValueError) as failure:
            context.change(live, JobState.FAILED, why=str(failure), error=str(failure))
            return
        for note in result.notes:
            context.say("note", note, job=live.id)
        paused = live.requested == "pause"
        context.change(
            live,
            JobState.QUEUED,
            why="validated",
            document=document,
            stats=stats,
            num_steps=live.num_steps,
            step=live.step,
            schedule=schedule_of(live),
        )
        if paused:
            context.change(live, JobState.PAUSED, why="paused")
        else:
            context.enqueue(live, is_new=True)
