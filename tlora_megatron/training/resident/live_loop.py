"""A training loop whose jobs come and go, each with its own files, end and summary."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tlora_megatron.config.schema import RunSpec
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.driven.state import DrivenState
from tlora_megatron.training.evaluation import Evaluation
from tlora_megatron.training.formats.atomic_directory import NotPermitted
from tlora_megatron.training.formats.quantised import QuantisationCard
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.listener import SilentListener
from tlora_megatron.training.loop import TrainingLoop
from tlora_megatron.training.metrics import write_summary
from tlora_megatron.training.nano.rounds import NanoRounds
from tlora_megatron.training.resident.staging import StagedJob
from tlora_megatron.training.run.summary import job_summary
from tlora_megatron.training.saving.saver import Target
from tlora_megatron.training.stopping.run_watch import RunWatch
from tlora_megatron.training.super_model import StepReport, SuperModel

_MANY_REQUESTS = 256
"""Requests that change no weight, after which a checkpoint is due all the same: it lets them go.
"""

_FIRST_SAVE_S = 3.0
"""A job without a checkpoint is saved by time so soon after it has joined: a rank's death then
costs it seconds of work, not all of it."""

Tell = Callable[[str, str | None, Mapping[str, Any]], None]
"""Is told what happens: the kind of event, the name of the job if it is one's, and values."""


@dataclass(slots=True)
class _Saves:
    """The times at which a job is saved."""

    every_s: float
    every_steps: int
    has_checkpoint: bool
    saved_s: float = field(default_factory=time.monotonic)
    """Until the first save, when the job joined."""

    def late_s(self, now_s: float) -> float:
        """Seconds since a save was due; negative before."""
        if self.every_s <= 0:
            return -math.inf
        wait_s = self.every_s if self.has_checkpoint else min(self.every_s, _FIRST_SAVE_S)
        return now_s - self.saved_s - wait_s


class _Notes(SilentListener):
    """Passes on what is worth telling a person."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def on_event(self, name: str, message: str) -> None:
        self._tell("note", name, {"message": message})


class LiveLoop(TrainingLoop):
    """Rounds over jobs that join and leave between them.

    Evaluations do not stop the others: a job that is to be evaluated is held, keeps its slot, and
    `evaluate_part` scores a micro-batch of its rows at a time. A job that ended has its adapter and
    a summary of its own written before anybody is told.

    Args:
        tell: is told of events, on the writer.
        may_write: see `JobFiles`.
    """

    def __init__(
        self,
        super_model: SuperModel,
        backbone: Backbone,
        run: RunSpec,
        tell: Tell,
        *,
        base_model: str,
        quantisation: QuantisationCard | None = None,
        nano_rounds: NanoRounds | None = None,
        watch: RunWatch | None = None,
        may_write: Callable[[str], bool] = lambda _: True,
    ) -> None:
        is_writer = super_model.groups.is_writer
        self._tell: Tell = tell if is_writer else (lambda *_: None)
        super().__init__(
            super_model,
            backbone,
            run,
            _Notes(self._tell),
            base_model=base_model,
            quantisation=quantisation,
            nano_rounds=nano_rounds,
            watch=watch,
            may_write=may_write,
        )
        self._saves: dict[str, _Saves] = {}
        self._to_evaluate: deque[JobState] = deque()
        self._evaluation: Evaluation | None = None
        """The evaluation of the first of them, under way."""
        self._newcomers: dict[str, None] = {}
        """Jobs that have not been through a whole round yet."""
        self._unwritten: list[StepReport] = []
        """Steps that are written and told while the device runs the next round."""
        super_model.while_running = self.write_steps
        self._keeps_memory = False
        """Jobs have left since memory was last given back to the device."""
        self.on_counted: Callable[[str, int], None] = lambda *_: None
        """Is told of a driven job's checkpoint on the disk, and up to which request it counts."""
        self.start()

    @property
    def has_round(self) -> bool:
        """True if a round has something to do: some job trains and is not held."""
        return any(job.is_active and not job.is_idle for job in self.super_model.jobs)

    @property
    def has_work(self) -> bool:
        """True if there is a round to run, or an evaluation."""
        return self.has_round or bool(self._to_evaluate)

    @property
    def newcomers(self) -> list[str]:
        """Names of the jobs whose first round, or evaluation before it, is the next or present."""
        return list(self._newcomers)

    def names(self) -> list[str]:
        """Names of the jobs that train or are evaluated."""
        return [job.name for job in self.super_model.jobs if job.is_active]

    def join(self, staged: StagedJob) -> None:
        """Lets a prepared job take part from the next round on, or from its evaluation on."""
        job = staged.state
        self._saves[job.name] = _Saves(
            staged.checkpoint_every_s, staged.checkpoint_every_steps, has_checkpoint=job.step > 0
        )
        self._newcomers[job.name] = None
        self.admit(job, staged.metrics)
        if job.is_done:
            self._fail_unmoved([job])
        if job.is_active and (job.eval_before is None or job.is_done):
            self._evaluate([job])
        if job.is_done:
            if job.is_active:
                self.saver.save(job, [self._adapter(job)])
            self._retire([job])

    def leave(self, name: str, *, save: bool, lost: bool = False) -> bool:
        """Takes a job out; it is told as left once what is saved of it is on the disk.

        Args:
            lost: somebody else owns its files by now.

        Returns:
            False if no job of that name trains.
        """
        self.write_steps()
        job = self.release(name, save=save)
        if job is None:
            return False
        self._forget(job)
        facts = {"step": job.step} | ({"lost": True} if lost else {})
        answers = partial(self.files.before_checkpoint, name)
        self.saver.submit(answers, partial(self._tell, "left", name, facts), job=name)
        self.saver.report()  # of those who left before it, while this one waited for memory
        self._keeps_memory = True
        return True

    def drain(self) -> tuple[str, ...]:
        """Waits for the disk as the loop does; where all jobs have left, others get the memory."""
        self.write_steps()
        if self._keeps_memory and not self.super_model.jobs:
            self._keeps_memory = False
            if self.super_model.groups.device.type == "cuda":
                torch.cuda.synchronize()  # copies of who has left may still be under way
                torch.cuda.empty_cache()
        return super().drain()

    def close(self) -> None:
        """Writes what is left and closes the files; a second call does nothing."""
        self.write_steps()
        super().close()

    def wait_to_save(self, name: str) -> None:
        """Waits on the writer until a job that trains can be saved without a wait."""
        job = next(job for job in self.super_model.jobs if job.name == name)
        self.saver.wait_for_room(job)

    def save_jobs(self, names: Sequence[str]) -> None:
        """Checkpoints those of the jobs that have moved since they were saved."""
        jobs = [job for job in self.super_model.jobs if job.name in names and job.is_active]
        self._save([job for job in jobs if self._has_moved(job)])

    def _has_moved(self, job: JobState) -> bool:
        """True if a checkpoint now would be another one than the last."""
        if isinstance(job, DrivenState) and job.counted >= job.saved_count + _MANY_REQUESTS:
            return True
        return job.step > self.files.saved_step[job.name]

    def save_due(self, jobs: Sequence[JobState]) -> None:
        """Checkpoints those of the jobs whose number of steps asks for it."""
        self._save([job for job in jobs if job.is_active and self._checkpoint_due(job)])

    def save_soon(self, name: str) -> None:
        """Makes a job due that is saved by time."""
        self._saves[name].saved_s = -math.inf

    def note_step(self, report: StepReport) -> None:
        """Takes note of a step that was made between rounds."""
        self._log(report)
        self.write_steps()

    def write_steps(self) -> None:
        """Writes and tells the steps that have been made since the last call."""
        reports, self._unwritten = self._unwritten, []
        for report in reports:
            super()._write_step(report)
            values = {"loss": report.outcome.loss, "lr": report.lr, "tokens": report.tokens}
            self._tell("stepped", report.job.name, {"step": report.job.step, **values})

    def end(self, job: JobState) -> None:
        """Ends a job that is done, with its last checkpoint and its adapter."""
        self._save([job])
        self._retire([job])

    def due_by_time(self) -> list[str]:
        """The job whose last save is longest past its time, if one is that can be saved at once.

        Only the writer knows it. One job a round: rounds stand still for a copy of each.
        """
        now_s = time.monotonic()
        late = {
            job.name: self._saves[job.name].late_s(now_s)
            for job in self.super_model.jobs
            if job.is_active and self._has_moved(job)
        }
        by_name = {job.name: job for job in self.super_model.jobs}
        due = sorted((name for name in late if late[name] >= 0), key=late.__getitem__)
        return [name for name in due if self.saver.can_take(by_name[name])][-1:]

    def run_round(self) -> None:
        """Runs a round, if some job takes part, and what is due behind it.

        Steps are written behind the next round's launches, where they cost nothing. Only those of
        newcomers, whom somebody waits for, are written at once, and all where no round follows.
        """
        if not self.has_round:
            self.write_steps()
            return
        trains = [job.name for job in self.super_model.jobs if not job.is_idle]
        self.step()
        if any(name in self._newcomers for name in trains) or not self.has_round:
            self.write_steps()
        for name in trains:
            self._newcomers.pop(name, None)

    def evaluate_part(self) -> None:
        """Scores one micro-batch of the job whose evaluation is first, if there is one."""
        if not self._to_evaluate:
            return
        job = self._to_evaluate[0]
        if self._evaluation is None:
            self._evaluation = Evaluation([job], [job], self.super_model.groups.device)
        self.watch.tick("an evaluation")
        self.super_model.evaluate_part(self._evaluation, micro_batches=1)
        if not self._evaluation.is_complete:
            return
        result = self._evaluation.results()[0]
        assert result is not None, "only jobs with rows are evaluated"
        self._to_evaluate.popleft()
        self._evaluation = None
        job.is_held = False
        self._note_evaluation(job, result)
        if job.is_done:
            self._retire([job])

    def _evaluate(self, jobs: Sequence[JobState]) -> None:
        for job in jobs:
            if job.data.eval:
                job.is_held = True
                self._to_evaluate.append(job)

    def _note_evaluation(self, job: JobState, result: EvalResult) -> None:
        self.write_steps()
        super()._note_evaluation(job, result)
        scores = {"loss": result.loss, "exact_match": result.exact_match}
        self._tell("evaluated", job.name, {"step": job.step, **scores})

    def _write_step(self, report: StepReport) -> None:
        self._unwritten.append(report)

    def _event(self, job: JobState, message: str) -> None:
        self.write_steps()
        super()._event(job, message)

    def _save(self, jobs: Sequence[JobState]) -> None:
        if jobs:
            self.write_steps()  # a checkpoint's steps are never missing in the metrics
        super()._save(jobs)

    def _checkpoint_due(self, job: JobState) -> bool:
        every = self._saves[job.name].every_steps
        return every > 0 and job.step % every == 0

    def _checkpoint(self, job: JobState) -> Target:
        saves = self._saves[job.name]
        saves.saved_s, saves.has_checkpoint = time.monotonic(), True
        counted = None
        if isinstance(job, DrivenState):
            counted = job.saved_count = job.counted
        saved = partial(self._saved, job.name, job.step, counted)
        return super()._checkpoint(job)._replace(on_done=saved)

    def _saved(self, name: str, step: int, counted: int | None) -> None:
        self._tell("saved", name, {"step": step})
        if counted is not None:
            self.on_counted(name, counted)

    def _not_saved(self, job: JobState, step: int, error: Exception) -> None:
        super()._not_saved(job, step, error)
        self._tell("not_saved", job.name, {"step": step, "error": str(error)})

    def _retire(self, jobs: Sequence[JobState]) -> None:
        """Ends jobs; those that are held are ended once they are evaluated.

        A failed one leaves a placeholder only while somebody is there whose packing is not its own.
        """
        over = {job.name: job for job in jobs if not job.is_held}
        for job in over.values():
            if job.is_active:
                job.status = "finished"
        present = self.super_model.jobs
        is_shared = any(j.is_active and j.spec.portion_tokens is None for j in present)
        staying = [
            job
            for job in present
            if job.is_held or (not job.is_done and (job.is_active or is_shared))
        ]
        if over or len(staying) < len(present):
            self.write_steps()
            self._set_jobs([job if job.is_active else job.placeholder() for job in staying])
        for job in over.values():
            self._forget(job)
            self.files.close(job.name)
            self.saver.submit(on_done=partial(self._close_job, job), job=job.name)

    def _forget(self, job: JobState) -> None:
        """Drops what the loop keeps of a job that trains no more."""
        self.jobs = tuple(other for other in self.jobs if other.name != job.name)
        self._newcomers.pop(job.name, None)
        self._saves.pop(job.name, None)
        waiting = [other for other in self._to_evaluate if other is not job]
        if self._to_evaluate and self._to_evaluate[0] is job:
            self._evaluation = None
        self._to_evaluate = deque(waiting)

    def _close_job(self, job: JobState) -> None:
        """Writes the summary of a job whose adapter is on the disk, then tells that it ended."""
        summary = job_summary(job, self.files.folder(job))
        facts = {"status": job.status, "reason": job.reason, "step": job.step}
        errors: list[Exception] = []
        write = partial(self._write_summary, job, summary, errors)
        told = partial(self._tell_ended, job.name, facts, errors)
        self.saver.submit(write, told, job=job.name)

    def _write_summary(
        self, job: JobState, summary: dict[str, Any], errors: list[Exception]
    ) -> None:
        """Runs on the writer's thread."""
        try:
            permit = partial(self.files.permit, job.name)
            write_summary(self.files.folder(job), summary, permit)
        except OSError as error:
            errors.append(error)

    def _tell_ended(self, name: str, facts: Mapping[str, Any], errors: Sequence[Exception]) -> None:
        if any(isinstance(error, NotPermitted) for error in errors):
            self._tell("left", name, {"step": facts["step"], "lost": True})
            return
        for error in errors:
            self._tell("note", name, {"message": f"its summary could not be written: {error}"})
        self._tell("ended", name, facts)
