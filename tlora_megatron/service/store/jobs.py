"""Jobs: accepted once, changed by legal steps, listed by pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from sqlalchemy import ColumnElement, Connection, bindparam, desc, func, or_, select, update

from tlora_megatron.config.job_rows import Acted
from tlora_megatron.service.store import tables
from tlora_megatron.service.store.database import Part
from tlora_megatron.service.store.leases import end_lease
from tlora_megatron.service.store.rows import Job, JobTotals, NewJob, Progress
from tlora_megatron.service.store.states import (
    JOB_CHANGES,
    LIVE,
    OVER,
    IllegalChange,
    JobState,
    NotFound,
    RequestedAction,
)
from tlora_megatron.service.store.submitting import insert_jobs

_JOB = tables.job.c
_THERE = _JOB.removed_at.is_(None)
_PAGE = 250
_NAMES_FOLDERS = ("/jobs/j", 'init_from":"', 'resume_from":"')
"""In documents of jobs that may need folders of others; they are written without blanks."""


class JobFields(TypedDict, total=False):
    """Fields of a job's row that a change may set besides the state."""

    document: Mapping[str, Any]
    schedule: Mapping[str, Any]
    stats: Mapping[str, Any] | None
    step: int
    num_steps: int | None
    tokens: int
    loss: float | None
    error: str | None


class Jobs(Part):
    """The jobs of a store. Every change of state is one transaction with its event."""

    def submit(
        self,
        new: Sequence[NewJob],
        *,
        tenant: str = "local",
        most_unfinished: int | None = None,
    ) -> list[Job]:
        """Accepts jobs, all or none; a job whose key came before is returned as it is now.

        The order is kept, and `is_new` is True of those that this call made.

        Raises:
            KeyReused: if a key came before with another job.
            NameTaken: if an unfinished job of the tenant has the name.
            OverLimit: if the tenant would have more jobs than it may.
            StoreFull: if the disk is full; nothing was accepted.
        """
        with self._database.write() as connection:
            now = self._database.clock()
            return insert_jobs(connection, new, tenant, now, most_unfinished)

    def change(
        self,
        job: str,
        to: JobState,
        *,
        release: str | None = None,
        why: str | None = None,
        body: Mapping[str, Any] | None = None,
        **fields: Unpack[JobFields],
    ) -> Job:
        """Changes a job's state, and further fields.

        Args:
            release: why its lease ends with this change; None: it keeps it.
            why, body: go into the event.

        Raises:
            IllegalChange: if the new state may not follow, or does not go with its lease.
        """
        to = JobState(to)
        with self._database.write() as connection:
            found = tables.job_of(connection, job)
            _check_change(found, to, released=release is not None)
            now = self._database.clock()
            if release is not None:
                end_lease(connection, found, now, release)
                found = replace(found, gang=None, gang_epoch=None, lease=None)
            values = _times(found, to, now)
            if _answers(found, to):
                values["wish"] = None
            event = {"from": found.state.value, "to": to.value, **(body or {})}
            if why is not None:
                event["why"] = why
            tables.record(connection, now, "state", job=job, gang=found.gang, body=event)
            return _set(connection, found, values, fields)

    def update(self, job: str, **fields: Unpack[JobFields]) -> Job:
        """Changes fields of a job, with no event."""
        with self._database.write() as connection:
            return _set(connection, tables.job_of(connection, job), {}, fields)

    def progress(self, reports: Sequence[Progress]) -> None:
        """Notes how far jobs have come, with no events; those that are over stay as they are."""
        if not reports:
            return
        values: dict[str, ColumnElement[Any]] = {
            name: func.coalesce(bindparam(f"new_{name}"), _JOB[name])
            for name in ("step", "tokens", "loss", "num_steps")
        }
        # Not `not_in`: its list of parameters cannot be sent with several rows at once.
        unfinished = [_JOB.state != state for state in OVER]
        query = update(tables.job).where(_JOB.id == bindparam("of"), *unfinished)
        rows = [
            {
                "of": report.job,
                "new_step": report.step,
                "new_tokens": report.tokens,
                "new_loss": report.loss,
                "new_num_steps": report.num_steps,
            }
            for report in reports
        ]
        self._database.execute(query.values(values), rows)

    def request_action(self, job: str, action: RequestedAction, *, by: str = "") -> Job:
        """Notes what a user wants of a job; raises `IllegalChange` if it refuses."""
        acted = self.request_actions([job], action, by=by)
        if acted.refused:
            self.get(job)
            raise IllegalChange(acted.refused[job])
        return acted.jobs[0]

    def request_actions(
        self, jobs: Sequence[str], action: RequestedAction, *, by: str = ""
    ) -> Acted[Job]:
        """Notes what a user wants of jobs; a controller carries it out.

        A job that is neither paused nor about to be cannot be resumed: it stays as it is. One that
        is over, or is to be cancelled already, refuses.
        """

        def why_not(job: Job) -> str | None:
            if job.state.is_over:
                return f"be unfinished to {action}, got one that is {job.state}"
            if job.wish == "cancel" != action:
                return f"not be on its way to being cancelled to {action}, got one that is"
            return None

        def is_new(job: Job) -> bool:
            is_held = job.state is JobState.PAUSED or job.wish is not None
            return job.wish != action and (action != "resume" or is_held)

        body = {"wish": action, "by": by}
        return self._ask(jobs, "wished", lambda _: body, why_not, is_new, wish=action)

    def remove(
        self, jobs: Sequence[str], *, needed: Mapping[str, str], by: str = "", part: str = ""
    ) -> Acted[Job]:
        """Takes jobs that have ended out of all lists: their folders may go now.

        Args:
            needed: id of a job -> what needs its folder; it refuses.
            part: what may go of their folders while the jobs stay; empty: the jobs.
        """

        def why_not(job: Job) -> str | None:
            if not job.state.is_over:
                return f"have ended to be removed, got one that is {job.state}"
            if job.id in needed:
                return f"be needed by nothing to be removed, got one that {needed[job.id]}"
            return None

        body = {"part": part, "by": by}
        values = {} if part else {"removed_at": self._database.clock()}
        is_there = lambda job: job.removed_at is None  # noqa: E731
        return self._ask(jobs, "removed", lambda _: body, why_not, is_there, **values)

    def cancel_waiting(self, jobs: Sequence[str]) -> list[Job]:
        """Cancels jobs that no gang has, each as `change` would."""

        def why_not(job: Job) -> str | None:
            _check_change(job, JobState.CANCELLED, released=False)
            return None

        def body(job: Job) -> dict[str, Any]:
            return {"from": job.state.value, "to": "cancelled", "why": "cancelled"}

        now = self._database.clock()
        values = {"state": JobState.CANCELLED, "changed_at": now, "ended_at": now, "wish": None}
        return self._ask(jobs, "state", body, why_not, lambda _: True, **values).jobs

    def _ask(
        self,
        jobs: Sequence[str],
        kind: str,
        body: Callable[[Job], dict[str, Any]],
        why_not: Callable[[Job], str | None],
        is_new: Callable[[Job], bool],
        **values: Any,
    ) -> Acted[Job]:
        """Sets columns of jobs that do not refuse, with an event each where that is new."""
        now = self._database.clock()
        with self._database.write() as connection:
            found = {job.id: job for job in self.many(jobs)}
            missing = {job: str(tables.missing_job(job)) for job in jobs if job not in found}
            acted: Acted[Job] = Acted([], missing)
            events = []
            for job in found.values():
                if (why := why_not(job)) is not None:
                    acted.refused[job.id] = f"job {job.name!r} ({job.id}) must {why}"
                elif not is_new(job):
                    acted.jobs.append(job)
                else:
                    events.append({"at": now, "job": job.id, "kind": kind, "body": body(job)})
                    acted.jobs.append(replace(job, **values))
            for part in tables.in_parts(events):
                of = [event["job"] for event in part]
                if values:
                    connection.execute(update(tables.job).where(_JOB.id.in_(of)).values(**values))
                connection.execute(tables.event.insert(), part)
        return acted

    def removed(self) -> set[str]:
        """Ids of the jobs that were removed."""
        with self._database.read() as connection:
            return set(connection.scalars(select(_JOB.id).where(~_THERE)))

    def clear_wish(self, job: str, expected: RequestedAction) -> bool:
        """Clears a requested action that is carried out; False if it is another by now."""
        query = update(tables.job).where(_JOB.id == job, _JOB.wish == expected).values(wish=None)
        return self._database.execute(query) == 1

    def get(self, job: str) -> Job:
        """The job of an id, also if it was removed; raises `NotFound` if there is none."""
        with self._database.read() as connection:
            return tables.job_of(connection, job)

    def many(self, jobs: Sequence[str]) -> list[Job]:
        """The jobs of some ids, in the order of their numbers; ids of none are passed over."""
        found = []
        with self._database.read():
            for part in tables.in_parts(jobs):
                found += self._database.all(Job, tables.query_of(Job).where(_JOB.id.in_(part)))
        return sorted(found, key=lambda job: job.number)

    def find(self, text: str, *, tenant: str = "local") -> Job:
        """The tenant's job of an id, or the unfinished, else newest, one of a name."""
        mine = tables.query_of(Job).where(_JOB.tenant == tenant, _THERE)
        named = mine.where(_JOB.name == text)
        queries = (
            mine.where(_JOB.id == text),
            named.where(_JOB.state.not_in(OVER)),
            named.order_by(desc(_JOB.number)).limit(1),
        )
        with self._database.read():
            for query in queries:
                if (found := self._database.first(Job, query)) is not None:
                    return found
        raise NotFound(f"a job's name or id must be one of the store's, got {text!r}")

    def newest_of_key(self, prefix: str, *, tenant: str, within_s: float) -> Job | None:
        """The tenant's newest job whose key begins so, if it was submitted so lately."""
        query = tables.query_of(Job).where(
            _JOB.tenant == tenant,
            _THERE,
            _JOB.key.startswith(prefix, autoescape=True),
            _JOB.submitted_at >= self._database.clock() - within_s,
        )
        return self._database.first(Job, query.order_by(desc(_JOB.number)).limit(1))

    def page(
        self,
        *,
        states: Collection[JobState] | None = None,
        tenant: str | None = None,
        after: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> list[Job]:
        """Jobs in the order of their numbers, or backwards, from behind number `after` on."""
        query = tables.query_of(Job).where(_THERE).limit(limit)
        query = query.order_by(desc(_JOB.number) if newest_first else _JOB.number)
        if after is not None:
            query = query.where(_JOB.number < after if newest_first else _JOB.number > after)
        if states is not None:
            query = query.where(_JOB.state.in_(states))
        if tenant is not None:
            query = query.where(_JOB.tenant == tenant)
        return self._database.all(Job, query)

    def each(
        self, states: Collection[JobState] | None = None, tenant: str | None = None
    ) -> Iterator[Job]:
        """All jobs in these states (None: in any), the first submitted first."""
        after: int | None = 0
        while after is not None:
            page = self.page(states=states, tenant=tenant, after=after, limit=_PAGE)
            yield from page
            after = page[-1].number if len(page) == _PAGE else None

    def unfinished_rows(self) -> list[Job]:
        """The jobs that are not over, in the order of their numbers."""
        query = tables.query_of(Job).where(_JOB.state.not_in(OVER)).order_by(_JOB.number)
        return self._database.all(Job, query)

    def counts(self, *, tenant: str | None = None) -> dict[JobState, int]:
        """Number of jobs in each state that has any."""
        query = select(_JOB.state, func.count()).where(_THERE).group_by(_JOB.state)
        if tenant is not None:
            query = query.where(_JOB.tenant == tenant)
        with self._database.read() as connection:
            return {state: int(count) for state, count in connection.execute(query)}

    def tallies(self) -> dict[tuple[str, JobState], JobTotals]:
        """The jobs of each tenant in each state, summed up."""
        sums = (func.count(), func.sum(_JOB.tokens), func.min(_JOB.submitted_at))
        query = select(_JOB.tenant, _JOB.state, *sums).group_by(_JOB.tenant, _JOB.state)
        with self._database.read() as connection:
            return {
                (of, state): JobTotals(*found) for of, state, *found in connection.execute(query)
            }

    def document(self, job: str) -> dict[str, Any]:
        """The job as an entry of `jobs` in a run's configuration."""
        found = self.documents([job])
        if job not in found:
            raise tables.missing_job(job)
        return found[job]

    def documents(self, jobs: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = {}
        with self._database.read() as connection:
            for part in tables.in_parts(jobs):
                query = select(tables.document).where(tables.document.c.job.in_(part))
                found.update({row.job: row.body for row in connection.execute(query)})
        return found

    def documents_with_folders(self) -> dict[str, dict[str, Any]]:
        """Id -> document of the unfinished jobs that may name folders of other jobs."""
        query = select(tables.document).join(tables.job, _JOB.id == tables.document.c.job)
        query = query.where(
            _JOB.state.not_in(OVER), or_(*map(tables.document_text.contains, _NAMES_FOLDERS))
        )
        with self._database.read() as connection:
            return {row.job: row.body for row in connection.execute(query)}


def _check_change(job: Job, to: JobState, *, released: bool) -> None:
    name = f"job {job.name!r} ({job.id})"
    if to not in JOB_CHANGES[job.state]:
        states = ", ".join(sorted(JOB_CHANGES[job.state])) or "nothing else"
        raise IllegalChange(f"{name} must go from {job.state} to {states}, got {to}")
    if to not in LIVE and job.lease is not None and not released:
        raise IllegalChange(
            f"{name} must give its lease back to become {to}, got one that gang {job.gang} holds: "
            "say `release` when the gang has left it or is gone"
        )
    if to in (JobState.STARTING, JobState.RUNNING) and job.lease is None:
        raise IllegalChange(f"{name} must be leased to a gang to become {to}, got no lease")


def _answers(job: Job, to: JobState) -> bool:
    """True if the change carries out the action that was requested, or makes it pointless."""
    return to.is_over or (
        (job.wish == "pause" and to is JobState.PAUSED)
        or (job.wish == "resume" and job.state is JobState.PAUSED)
    )


def _times(job: Job, to: JobState, now: float) -> dict[str, Any]:
    values: dict[str, Any] = {"state": to, "changed_at": now}
    if to is JobState.RUNNING and job.started_at is None:
        values["started_at"] = now
    if to.is_over:
        values["ended_at"] = now
    return values


def _set(
    connection: Connection, job: Job, values: dict[str, Any], fields: Mapping[str, Any]
) -> Job:
    """Writes columns of a job, and its document where it is among the fields."""
    values = {**values, **fields}
    body = values.pop("document", None)
    if body is not None:
        query = update(tables.document).where(tables.document.c.job == job.id)
        connection.execute(query.values(body=dict(body)))
    if values:
        connection.execute(update(tables.job).where(_JOB.id == job.id).values(**values))
    return replace(job, **values)
