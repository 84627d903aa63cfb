"""Lets jobs join and leave a run while it trains; every rank of the run has one of these."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tlora_megatron.training.live.mailbox import Request, RunMailbox
from tlora_megatron.training.loop import TrainingLoop
from tlora_megatron.training.resident.mail import Agreement, Readiness, gather_texts
from tlora_megatron.training.resident.staging import Failed, StagedJob, Stager
from tlora_megatron.training.stopping.run_watch import StopAgreement


class Record(Protocol):
    """Keeps, on the writer, what was changed of a run."""

    def joined(self, document: Mapping[str, Any]) -> None:
        """Notes a job that joins now."""

    def cancelled(self, name: str) -> None:
        """Notes a job that has left for good."""


class LiveJobs:
    """Carries out what others ask of a run, behind the same round on every rank.

    Args:
        stager: prepares jobs beside the rounds.
        agreement: of the run's rounds; tells every rank when mail waits.
        mailbox: where requests come in, and a record of them, on the writer; None elsewhere.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        stager: Stager,
        agreement: StopAgreement,
        mailbox: RunMailbox | None,
        record: Record | None,
    ) -> None:
        self._loop, self._stager, self._agreement = loop, stager, agreement
        self._mailbox, self._record = mailbox, record
        self._preparing: dict[str, Request] = {}
        """By job; the same on all ranks."""
        if mailbox is not None:
            agreement.mail_waits = lambda: mailbox.has_mail

    def at_boundary(self) -> None:
        """Takes requests, and lets jobs join that are ready; collective over the world."""
        ready = {}
        if self._preparing:
            states = {name: self._stager.state(name) for name in self._preparing}
            ready = Readiness(self._agreement.group, states).read()
        for name, is_ready in ready.items():
            self._finish(self._preparing.pop(name), name, is_ready=is_ready)
        if self._agreement.has_mail:
            for request in self._share():
                self._carry_out(request)

    def close(self) -> None:
        """Ends the thread that prepares jobs; a second call does nothing."""
        self._stager.close()

    def _share(self) -> Sequence[Request]:
        """The first rank's requests, on every rank."""
        words = Agreement(self._agreement.group)
        words.begin([] if self._mailbox is None else self._mailbox.take())
        return [Request(number, body) for number, body in words.read()]

    def _carry_out(self, request: Request) -> None:
        kind, name = request.body.get("kind"), str(request.body.get("job"))
        if kind == "add":
            self._add(request, name)
        elif kind == "cancel":
            self._cancel(request, name)
        else:
            self._answer(request, {"error": f"a request must be add or cancel, got {kind!r}"})

    def _add(self, request: Request, name: str) -> None:
        known = {job.name for job in self._loop.jobs if job.status != "cancelled"}
        if name in known or name in self._preparing:
            error = f"job {name!r} must have a name of its own, got that of a job of the run"
            self._answer(request, {"error": error})
            return
        self._stager.order(name, request.body)
        self._preparing[name] = request

    def _finish(self, request: Request, name: str, *, is_ready: bool) -> None:
        """Lets a job join that all ranks have prepared; one that some rank refuses is gone."""
        found = self._stager.found(name)
        if not is_ready or not isinstance(found, StagedJob):
            own = found.error if isinstance(found, Failed) else ""
            reasons = [text for text in gather_texts(self._agreement.group, own) if text]
            unlike = f"every process must read the same data for job {name!r}, got others on some"
            self._stager.drop(name)
            self._answer(request, {"error": reasons[0] if reasons else unlike})
            return
        loop, staged = self._loop, self._stager.take(name)
        job = staged.state
        if self._record is not None:
            self._record.joined(request.body["document"])
        from_step = job.step
        loop.jobs = tuple(other for other in loop.jobs if other.name != name)
        loop.begin(job, staged.metrics)
        gc.freeze()
        facts = {"round": loop.rounds, "from_step": from_step, "num_steps": job.plan.num_steps}
        self._answer(request, facts)

    def _cancel(self, request: Request, name: str) -> None:
        asked = self._preparing.pop(name, None)
        if asked is not None:
            self._stager.drop(name)
            self._answer(asked, {"error": f"job {name!r} was cancelled before it joined"})
            self._answer(request, {"step": 0})
            return
        job = self._loop.release(name, save=True)
        if job is None:
            self._answer(request, {"error": self._not_training(name)})
            return
        job.status, job.reason = "cancelled", f"cancelled at step {job.step}"
        if self._record is not None:
            self._record.cancelled(name)
        self._loop.listener.on_event(name, f"is saved at step {job.step} and leaves: cancelled")
        self._answer(request, {"step": job.step})

    def _not_training(self, name: str) -> str:
        """Says why a job cannot be cancelled: it may have ended while the request was under way."""
        for job in self._loop.jobs:
            if job.name == name:
                state = f"{job.status} at step {job.step}"
                return f"job {name!r} must still train to be cancelled, got one that is {state}"
        active = [job.name for job in self._loop.super_model.jobs if job.is_active]
        return f"the job to cancel must be one that trains: {', '.join(active)}; got {name!r}"

    def _answer(self, request: Request, body: Mapping[str, Any]) -> None:
        if self._mailbox is not None:
            self._mailbox.answer(request.number, body)
