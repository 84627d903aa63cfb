"""Carries out what clients ask, at the boundaries between rounds: passes, steps together, scores.

All ranks do the same behind the same round: the first one says how many requests there are, each
reads them, and results are gathered before any rank uses them.

1. Begin: the next request of each job is read and checked; a wrong one is answered with a sentence
   and has changed nothing. Sequences of `forward_backward` are a batch like any other, in portions
   of their own; those of `forward` run without gradients, a micro-batch between rounds, and so do
   first those of a loss whose slopes depend on all of a datum (`driven_jobs`).
2. Answer: one all-reduce gathers the log-probabilities of all requests that the round has ended.
   The host computes the loss from them, and a thread writes the answer. If anything is not finite,
   the gradient is what it was before.
3. Step: `optim_step` sums and clips the gradients of the requests since the last one, with the
   client's own settings. Steps of several jobs are one wait for the device.
4. Go on: a checkpoint names the last request that its weights count. After a death or a move the
   later ones are carried out again, with the same bits; answers that are there stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tlora_megatron.config.job import OptimizerSpec
from tlora_megatron.config.sections import read_job
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.driven_jobs import NO_DATA, DrivenState, OpenPlan, gathered, judge
from tlora_megatron.training.driven_requests import (
    SAMPLED_STEPS,
    Answer,
    Clients,
    Request,
    RequestError,
    check_request,
)
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.optimizer import StepOutcome, StepRequest, step_adapters
from tlora_megatron.training.resident.saved_states import StateFiles
from tlora_megatron.training.run.preparation import PreparedJob, start_job
from tlora_megatron.training.super_model import Engine, StepReport, SuperModel


class Next(NamedTuple):
    """A job's next request."""

    job: DrivenState
    number: int
    request: Request


def step_together(loop: Loop, asked: Sequence[Next]) -> Iterator[tuple[Next, Answer]]:
    """Makes the steps that clients ask for; waits for the device once. Collective over the world.

    A step whose gradient is not finite changes nothing, and the gradient is gone.
    """
    if not asked:
        return
    model = loop.super_model
    slots = {job.name: slot for slot, job in enumerate(model.jobs)}
    none = torch.zeros((), device=model.groups.device)
    requests = []
    for job, _, request in asked:
        adam = request.adam()
        optimizer = OptimizerSpec(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=max(0.0, adam.grad_clip_norm),
        )
        requests.append(StepRequest(slots[job.name], optimizer, optimizer.lr, job.updates, none))
    exact = model.round_shape.exactness is not None
    outcomes = step_adapters(model.bank, model.groups, requests, exact=exact)
    for one, outcome in zip(asked, outcomes, strict=True):
        yield one, _note(loop, one, outcome)


def _note(loop: Loop, asked: Next, outcome: StepOutcome) -> Answer:
    job, number, request = asked
    if not outcome.applied:
        job.moved(number, applied=False)
        what = "weights" if outcome.loss != outcome.loss else "gradient"
        error = f"the {what} must be finite for a step; the gradient has been dropped"
        return Answer(error=error, category="user")
    loss = job.mean_loss
    job.updates += 1
    job.last_loss = loss
    tokens, targets = job.moved(number, applied=True)
    reported, lr = StepOutcome(loss, outcome.grad_norm, True), request.adam().learning_rate
    loop.note_step(StepReport(job, reported, lr, tokens, targets, job.batch_time_s, {}))
    job.batch_time_s = 0.0
    return Answer(metrics={"grad_norm": outcome.grad_norm}, values={"step": job.updates})


def _about_samples(job: DrivenState, request: Request, logprobs: np.ndarray) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the trainer's, and its weights behind.

    A target of which neither log-probability nor advantage was given was not sampled, and those
    that were recorded beside the first one of its place do not count.
    """
    arrays, found = request.arrays, {}
    if "logprobs" in arrays:
        places = [place for runs in request.runs for place in range(runs)]
        is_sampled_T = (arrays["logprobs"] != 0) | (arrays["advantages"] != 0)
        is_sampled_T &= np.repeat(places, arrays["lengths"]) == 0
        found["sampler_gap"] = np.abs(logprobs.astype(float) - arrays["logprobs"])[is_sampled_T]
    found["staleness"] = job.step - np.array(request.params.get(SAMPLED_STEPS, ()))
    return {
        f"{name}:{kind}": float(reduce(values))
        for name, values in found.items()
        for kind, reduce in (("mean", np.mean), ("max", np.max))
        if len(values)
    }


_RANK = 8
"""Of an adapter that is still 0: it changes no bit of the base."""


def score_base(
    super_model: SuperModel[Engine], spec: Backbone, tokens: Sequence[int]
) -> np.ndarray:
    """Log-probabilities of all tokens but the first, fp32; waits for the device.

    Collective over the world; the super-model must have no job.
    """
    assert not super_model.jobs, "the base is scored before jobs come"
    lora = {"rank": _RANK, "target_modules": ["q_proj"]}
    entry = {"name": "base", "driven": True, "lora": lora, "max_seq_len": len(tokens)}
    prepared = PreparedJob(
        spec=read_job(entry, None), data=NO_DATA, plan=OpenPlan(), checkpoint=None, imported=None
    )
    job = start_job(prepared, spec, super_model.bank.new_slab(prepared.spec.lora))
    assert isinstance(job, DrivenState), "it is driven"
    arrays: dict[str, np.ndarray] = {
        "lengths": np.array([len(tokens) - 1], np.int32),
        "tokens": np.array(tokens[:-1], np.int32),
        "targets": np.array(tokens[1:], np.int64),
    }
    super_model.set_jobs([job])
    try:
        job.begin(1, Request(op="forward", arrays=arrays), super_model.groups.device)
        while job.to_score:
            (job.to_score,) = super_model.forward_part([job.to_score])
        return gathered([job])[0]
    finally:
        super_model.set_jobs([])


News = Mapping[str, Any]
"""News that the first rank has seen: `upto`, last request of each job with new ones; `answered`,
those of them that somebody has answered before; `full`, jobs that cannot be saved now."""
_AHEAD = 64
"""Requests of a job that are looked for beyond the last one that was carried out."""
_CHANGE_NOTHING = ("forward", "save_state")
"""Not `save_for_sampler`: what it has published may not have reached the disk."""


class RequestExecutor:
    """The requests of all driven jobs of a loop."""

    def __init__(self, loop: Loop, clients: Clients) -> None:
        self._loop = loop
        self._model = loop.super_model
        self._is_writer = self._model.groups.is_writer
        self._clients = clients
        self._answered: dict[str, set[int]] = {}
        """Requests that were answered before this loop got to them, by job."""
        self._files = StateFiles(loop, clients, self._answer)
        loop.files.before_checkpoint = clients.flush
        loop.saves.on_counted = self._counted

    @property
    def jobs(self) -> list[DrivenState]:
        """The driven jobs that train, in slot order."""
        jobs = self._model.jobs
        return [job for job in jobs if isinstance(job, DrivenState) and job.is_active]

    @property
    def has_work(self) -> bool:
        """True if sequences wait that run without gradients."""
        return any(job.to_score for job in self.jobs)

    @property
    def is_held_up(self) -> bool:
        """True if a request waits for the disk."""
        return any(job.done < job.known and job.running is None for job in self.jobs)

    @property
    def has_news(self) -> bool:
        """True if some job has a request that no rank knows of; the first rank asks."""
        return any(
            job.known < job.done + _AHEAD and self._clients.has_request(job.name, job.known + 1)
            for job in self.jobs
        )

    def news(self) -> News | None:
        """Returns the first rank's news for the others; None if there is no driven job."""
        jobs = self.jobs
        if not jobs:
            return None
        upto: dict[str, int] = {}
        answered: dict[str, list[int]] = {}
        for job in jobs:
            last = job.known
            while last < job.done + _AHEAD and self._clients.has_request(job.name, last + 1):
                last += 1
            if last > job.known:
                upto[job.name] = last
                numbers = range(job.known + 1, last + 1)
                old = [n for n in numbers if self._clients.is_answered(job.name, n)]
                answered |= {job.name: old} if old else {}
        full = [job.name for job in jobs if not self._loop.saver.can_take(job)]
        return {"upto": upto, "answered": answered, "full": full}

    def forward_part(self) -> None:
        """Runs a micro-batch of the sequences that wait without gradients, if there are any."""
        if not self.has_work:
            return
        slots = self._model.jobs
        queues = [(j.to_score or []) if isinstance(j, DrivenState) else [] for j in slots]
        left = self._model.forward_part(queues)
        for job, rest in zip(slots, left, strict=True):
            if isinstance(job, DrivenState) and job.to_score is not None:
                job.to_score = rest

    def loads(self) -> dict[str, int | None]:
        """How far states are read that jobs wait for; see `staging.Readiness`."""
        return self._files.loads()

    def advance(self, news: News | None, ready: Mapping[str, bool]) -> None:
        """Answers what has run, and carries out what can be; every rank with the same news.

        Args:
            ready: of `loads`, what the ranks have agreed on.
        """
        if news is None:
            return
        jobs = self.jobs
        names = {job.name for job in jobs}
        self._files.forget(names)
        self._answered = {name: old for name, old in self._answered.items() if name in names}
        for job in jobs:
            job.known = news["upto"].get(job.name, job.known)
            self._answered.setdefault(job.name, set()).update(news["answered"].get(job.name, ()))
        self._end_requests([job for job in jobs if job.has_run])
        for job in jobs:
            if job.name in ready and self._files.is_loading(job):
                self._files.take_up(job, is_read=ready[job.name])
        self._files.full = set(news["full"])
        steps = {job.name: job.step for job in jobs}
        while self._carry_out(jobs):
            pass
        stepped = [job for job in jobs if job.step > steps[job.name]]
        self._loop.saves.save([job for job in stepped if self._loop.saves.is_due(job)])
        for job in jobs:
            if job.has_left:
                self._loop.end(job)
                del self._answered[job.name]

    def flush(self) -> None:
        """Waits until all answers are on the disk, where they are written."""
        if self._is_writer:
            self._clients.flush(None)

    def _end_requests(self, jobs: Sequence[DrivenState]) -> None:
        if not jobs:
            return
        for job, logprobs in zip(jobs, gathered(jobs), strict=True):
            running = job.running
            assert running is not None, "it has run"
            verdict = judge(running.request, logprobs)
            if verdict.error is None and job.runs_again(logprobs):
                continue
            job.end(is_good=verdict.error is None, loss=verdict.loss)
            if verdict.error is not None:
                self._refuse(job, running.number, verdict.error)
                continue
            params = running.request.params
            metrics = {"loss:sum": verdict.loss, **_about_samples(job, running.request, logprobs)}
            told = {key: params[key] for key in ("runs", "loss_fn") if "runs" in params}
            answer = Answer(metrics=metrics, values=told, logprobs=logprobs)
            self._answer(job, running.number, answer)

    def _carry_out(self, jobs: Sequence[DrivenState]) -> bool:
        """Carries out the next request of every job that has one; False if none has."""
        found = [entry for job in jobs if (entry := self._next(job)) is not None]
        if not found:
            return False
        asked = []
        moved = False
        for entry in found:
            if entry.request.op == "optim_step":
                asked.append(entry)
            elif not self._carry_out_one(*entry):
                continue  # it waits
            moved = True
        for one, answer in step_together(self._loop, asked):
            self._answer(one.job, one.number, answer)
        return moved

    def _next(self, job: DrivenState) -> Next | None:
        """A job's next request, if it can be carried out; a wrong one is answered and passed."""
        if self._files.is_loading(job):
            return None
        while job.done < job.known and job.running is None and not job.has_left:
            number = job.done + 1
            try:
                request = self._clients.read(job.name, number)
                model = self._loop.backbone
                longest = job.spec.max_seq_len
                check_request(request, vocab_size=model.vocab_size, longest=longest)
            except RequestError as error:
                job.finish(number)
                self._refuse(job, number, str(error))
                continue
            is_old = number in self._answered.get(job.name, ())
            if is_old and request.op in _CHANGE_NOTHING:
                job.finish(number)
                continue
            return Next(job, number, request)
        return None

    def _carry_out_one(self, job: DrivenState, number: int, request: Request) -> bool:
        """Carries out a request that is no optimizer step; False if it must wait."""
        if request.has_sequences:
            job.begin(number, request, self._model.groups.device)
            return True
        if request.op == "leave":
            job.has_left = True
            job.finish(number)
            self._answer(job, number, Answer(values={"step": job.updates}))
            return True
        carry_out: Mapping[str, Callable[[DrivenState, int, Request], bool]] = {
            "save_state": self._files.save_state,
            "save_for_sampler": self._files.save_for_sampler,
            "load_state": self._files.load_state,
        }
        return carry_out[request.op](job, number, request)

    def _answer(self, job: DrivenState, number: int, answer: Answer) -> None:
        self._answered.get(job.name, set()).discard(number)
        if self._is_writer:
            self._clients.answer(job.name, number, answer)

    def _refuse(self, job: DrivenState, number: int, error: str) -> None:
        self._answer(job, number, Answer(error=error, category="user"))

    def _counted(self, job: str, number: int) -> None:
        """Hears that a checkpoint is on the disk, on the thread that trains."""
        if self._is_writer:
            self._clients.covered(job, number)
