"""Sweeps of a service: their trials are jobs, and what was decided at their rungs is in the store.

A trial at a rung is evaluated, and paused until nobody is missing there: no GPU waits for others,
also where not all trials have room at once. Then the best are resumed, and the others cancelled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tlora_megatron.config.reader import read_spec
from tlora_megatron.config.rungs import Halving, steps_at
from tlora_megatron.config.sections import plain
from tlora_megatron.config.sweep import Sweep, SweepSpec
from tlora_megatron.files import read_object
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import OVER, Board, Job, JobState, NotFound, Store
from tlora_megatron.training.run.sweep_results import sweep_results

PREFIX = "sweep/"
"""Begins the names of sweeps' boards."""


def sweep_id(tenant: str, key: str) -> str:
    """The id that a submit's key gives: the same for a second one."""
    return f"s{hashlib.sha256(f'{tenant}/{key}'.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSweep:
    """A sweep, and its trials as they are now."""

    id: str
    tenant: str
    name: str
    submitted_at: float
    sweep: Sweep
    """Settings by the trials' names."""
    trials: Mapping[str, str]
    """Names of trials -> ids of their jobs."""
    rungs: Sequence[Mapping[str, Any]]
    jobs: Mapping[str, Job]
    """By the trials' names."""

    @property
    def active(self) -> set[str]:
        """Trials that have not ended, and are not to be cancelled."""
        there = ((name, job) for name, job in self.jobs.items() if job.state not in OVER)
        return {name for name, job in there if job.wish != "cancel"}

    def halving(self) -> Halving | None:
        """The state of the rungs; None without any."""
        stop = self.sweep.spec.stop
        if stop is None:
            return None
        # One that is not validated has no steps yet, and is missing at every rung.
        counts = {name: job.num_steps or 0 for name, job in self.jobs.items()}
        steps = {name: steps_at(stop.at, counts.get(name, 0)) for name in self.trials}
        return Halving(self.sweep.spec, steps, self.rungs)

    def stages(self) -> list[dict[str, Any]]:
        """The trials before each rung and behind the last, with what has become of them there.

        A trial's word is `kept` or `stopped` at a rung that is decided; else `waits`, or the state
        of its job.
        """
        here, found = list(self.trials), []
        for rung in [*self.rungs, {"at": 1.0, "scores": {}, "kept": None}]:
            kept, scores = rung["kept"], rung["scores"]
            words = {name: str(job.state) for name, job in self.jobs.items()}
            if kept is None:
                words |= {name: "waits" for name in scores if name in self.active}
            else:
                words = {name: "kept" if name in kept else "stopped" for name in here}
            found.append({"at": rung["at"], "trials": [[n, words.get(n, "")] for n in here]})
            if kept is None:
                break
            here = [name for name in here if name in kept]
        return found

    def open_rungs(self, name: str) -> tuple[int, ...]:
        """The steps behind which a trial is still to wait."""
        halving = self.halving()
        return () if halving is None else halving.left(name)


def add_sweep(store: Store, id_: str, sweep: Sweep, jobs: Sequence[Job]) -> None:
    """Keeps a sweep with the jobs of its trials, in their order; a second call does nothing."""
    if any(job.is_new for job in jobs):
        first = jobs[0]
        body = {
            "tenant": first.tenant,
            "name": first.name.rpartition("-")[0],
            "spec": plain(sweep.spec),
            "settings": plain(sweep.settings),
            "jobs": [job.id for job in jobs],
            "rungs": [],
            "submitted_at": first.submitted_at,
        }
        store.boards.write(PREFIX + id_, body)


def _stored(store: Store, board: Board) -> StoredSweep:
    body = board.body
    rows = {job.id: job for job in store.jobs.many(body["jobs"])}
    trials = dict(zip(body["settings"], body["jobs"], strict=True))
    spec = read_spec(SweepSpec, {k: v for k, v in body["spec"].items() if v is not None}, "sweep")
    return StoredSweep(
        id=board.name.removeprefix(PREFIX),
        tenant=body["tenant"],
        name=body["name"],
        submitted_at=body["submitted_at"],
        sweep=Sweep(spec=spec, settings=body["settings"]),
        trials=trials,
        rungs=body["rungs"],
        jobs={name: rows[job] for name, job in trials.items() if job in rows},
    )


def sweep_of(store: Store, id_: str) -> StoredSweep | None:
    """The sweep of an id."""
    found = store.boards.under(PREFIX + id_)
    return _stored(store, found[0]) if found else None


def sweeps_of(store: Store, tenant: str | None, most: int | None = None) -> list[StoredSweep]:
    """A tenant's newest sweeps, or all tenants', the newest first; None = any number."""
    return [_stored(store, board) for board in _boards(store, tenant)[:most]]


def _boards(store: Store, tenant: str | None) -> list[Board]:
    boards = [b for b in store.boards.under(PREFIX) if tenant in (None, b.body["tenant"])]
    return sorted(boards, key=lambda board: -board.body["submitted_at"])


def find_sweep(store: Store, text: str, tenant: str | None) -> StoredSweep:
    """The tenant's sweep of an id, or the newest of a name."""
    for board in _boards(store, tenant):
        if text in (board.name.removeprefix(PREFIX), board.body["name"]):
            return _stored(store, board)
    raise NotFound(f"a sweep's name or id must be one of the store's, got {text!r}")


def settle(store: Store, found: StoredSweep, arrived: Mapping[str, float] = {}) -> None:
    """Takes scores of trials at a rung, and asks of trials what follows; in a transaction.

    It may be called again at any time: what was decided stays, and is asked until it is done.

    Args:
        arrived: scores of trials that have come to the rung that is open to them.
    """
    halving = found.halving()
    if halving is None:
        return
    for name, score in arrived.items():
        halving.take(name, score)
    decisions = halving.settle(found.active)
    if arrived or decisions:
        board = store.boards.under(PREFIX + found.id)[0]
        store.boards.write(board.name, {**board.body, "rungs": halving.document()})
    for name, why in halving.stopped_before().items():
        if name in found.active:
            store.jobs.update(found.trials[name], error=why)
            store.jobs.request_actions([found.trials[name]], "cancel", by=f"sweep {found.name}")
            body = {"what": "stopped", "message": f"job {name!r} is {why}"}
            store.events.add("said", job=found.trials[name], body=body)
    stopped = halving.stopped_before()
    for name in found.active - set(stopped):
        job = found.jobs[name]
        behind = [step for step in halving.steps[name] if step not in halving.left(name)]
        if job.state is JobState.PAUSED and job.step in behind:
            store.jobs.request_actions([job.id], "resume", by=f"sweep {found.name}")


def shown_sweep(found: StoredSweep, home: Home) -> dict[str, Any]:
    """A sweep as plain values: its trials from best to worst, as far as is known."""
    jobs = {name: _facts_of(job, home) for name, job in found.jobs.items()}
    results = sweep_results(found.sweep, found.rungs, jobs)
    for row in results["ranking"]:
        row["job"] = found.trials[row["trial"]]
    states = [str(job.state) for job in found.jobs.values()]
    return {
        "id": found.id,
        "name": found.name,
        "tenant": found.tenant,
        "submitted_at": found.submitted_at,
        "states": {state: states.count(state) for state in dict.fromkeys(states)},
        "rungs": [
            {"at": rung["at"], "there": len(rung["scores"]), "kept": rung["kept"]}
            for rung in found.rungs
        ],
        **results,
    }


def _facts_of(job: Job, home: Home) -> dict[str, Any]:
    """What `sweep_results` wants to know of a job; `adapter` is the job's id."""
    facts = {"status": str(job.state), "reason": job.error, "tokens": job.tokens}
    facts |= {"steps": job.step, "max_steps": job.num_steps}
    if job.state is JobState.FINISHED:
        with suppress(OSError, ValueError):
            facts |= read_object(home.job(job.id) / "summary.json") or {}
    return facts | {"adapter": job.id if job.state is JobState.FINISHED else None}
