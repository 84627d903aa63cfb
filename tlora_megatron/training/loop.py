"""Trains jobs on one super-model, round after round; jobs may join and leave between two rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tlora_megatron import timeline
from tlora_megatron.config.schema import RunSpec
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.evaluation import HeldJobs
from tlora_megatron.training.job_files import JobFiles
from tlora_megatron.training.job_saves import JobSaves, SavePolicy, StagedJob
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.metrics import EventSink, Reports
from tlora_megatron.training.nano.rounds import NanoRounds
from tlora_megatron.training.run_watch import RunWatch
from tlora_megatron.training.signals import stop_sentence
from tlora_megatron.training.super_model import StepReport, SuperModel


class Loop:
    """Runs rounds with what is due behind each: metrics, evaluation, checkpoints, export.

    `run` trains all jobs to their ends. `step` runs one round, for callers with a loop of their
    own, who call `saves.close` at the end. `resident.commands.JobCommands` lets jobs come and go.

    Args:
        events: takes what happens, on every rank that has one; None = it is not reported.
        is_live: for jobs that come and go. One that is evaluated is held and keeps its slot, and
            `evaluate_part` scores a micro-batch of its rows at a time; else all rows at once, while
            the others wait. A failed one keeps its place in the packing only while some job trains
            whose packing is not its own; else always. One that ends has a summary of its own and
            is forgotten behind it; else `jobs` keeps it, for the summary of the run.
        nano_rounds: chooses the number of nano-batches; None = it stays as it is.
    """

    def __init__(
        self,
        super_model: SuperModel,
        backbone: Backbone,
        run: RunSpec,
        files: JobFiles,
        events: EventSink | None = None,
        *,
        is_live: bool = False,
        nano_rounds: NanoRounds | None = None,
        watch: RunWatch | None = None,
    ) -> None:
        self.super_model = super_model
        self.backbone = backbone
        self.settings = run
        self.files = files
        self.nano_rounds = nano_rounds
        self.watch = watch or RunWatch()
        self.output_dir = Path(run.output_dir)
        self.jobs = super_model.jobs
        """All jobs of a run; where each has a summary of its own, those that have not ended."""
        self.rounds = 0
        self.tokens = 0
        self.train_time_s = 0.0
        self.reports = Reports(events, logs=super_model.groups.is_writer)
        self.saves = JobSaves(super_model, backbone, run, files, self.reports, self.watch)
        self.saver = self.saves.saver
        self.stopped_by = 0
        """Number of the signal that has stopped the loop; 0 = none."""
        self.stop_sentence: str | None = None
        self._is_live = is_live
        self._has_started = False
        self._joining: dict[str, None] = {}
        self._held = HeldJobs()
        for job in self.jobs:
            policy = SavePolicy(run.checkpoint_every_steps)
            self.saves.take(job, files.open_metrics(job), policy)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of completed batches over the time spent in rounds."""
        return self.tokens / self.train_time_s if self.train_time_s else 0.0

    @property
    def is_over(self) -> bool:
        """True once every job has finished or failed; never before the start."""
        return self._has_started and not self.active

    @property
    def has_ended(self) -> bool:
        """True once no more rounds follow: every job has ended, or a signal has stopped the run."""
        return self.is_over or self.stopped_by != 0

    @property
    def active(self) -> list[JobState]:
        """The jobs that train or are evaluated, in slot order."""
        return [job for job in self.super_model.jobs if job.is_active]

    @property
    def has_round(self) -> bool:
        """True if a round has something to do: some job trains and is not held."""
        return any(not job.is_idle for job in self.active)

    @property
    def has_work(self) -> bool:
        """True if there is a round to run, or a part of an evaluation."""
        return self.has_round or bool(self._held)

    @property
    def joining(self) -> list[str]:
        """Jobs that have joined, and have not been through a whole round yet."""
        return list(self._joining)

    def run(self, on_boundary: Callable[[], None] = lambda: None) -> None:
        """Trains until every job has finished or failed, or a signal stops the run.

        Args:
            on_boundary: called behind every round but the last, on every rank.
        """
        try:
            with self.watch.watching():
                while not self.has_ended:
                    self.step()
                    if not self.has_ended:
                        on_boundary()
        finally:
            self.saves.close()

    def start(self) -> None:
        """Runs the first evaluation and retires jobs that were resumed past their last step.

        The first `step` or `join` calls it; a second call does nothing.
        """
        if self._has_started:
            return
        if self.jobs:
            jobs = {job.name: [job.step, job.plan.num_steps] for job in self.jobs}
            self.reports.emit("begun", None, {"jobs": jobs})
        self._begin(self.jobs)
        self._has_started = True

    def join(self, staged: StagedJob) -> None:
        """Lets a prepared job take part from the next round on, or from its evaluation on.

        Every rank calls it, between rounds. The bank must have been made for the job, too.
        """
        self.start()
        job = staged.state
        self._joining[job.name] = None
        self.saves.take(job, staged.metrics, staged.saving)
        self.saver.expect(job.spec.lora)
        self.jobs = (*[other for other in self.jobs if other.name != job.name], job)
        self.super_model.set_jobs([*self.super_model.jobs, job])
        self._note_jobs()
        self._begin([job])

    def leave(self, name: str, *, save: bool, lost: bool = False) -> bool:
        """Takes a job that still trains out of the rounds; the others do not notice.

        Every rank calls it, between rounds. It is reported as `left` once what is saved of it is on
        the disk.

        Args:
            lost: somebody else owns its files by now.

        Returns:
            False if there is none of that name, or it has ended.
        """
        job = next((job for job in self.active if job.name == name), None)
        if job is None:
            return False
        if save and job.step > self.files.saved_step[name]:
            self.saves.save([job])
        self.super_model.set_jobs([other for other in self.super_model.jobs if other is not job])
        if not self._is_live:
            job.status, job.reason = "cancelled", f"cancelled at step {job.step}"
        self._forget(job)
        self._note_jobs()
        self.saves.end_left(job, lost=lost)
        return True

    def step(self, run_round: Callable[[], list[StepReport]] | None = None) -> list[StepReport]:
        """Runs one round and what is due behind it.

        Args:
            run_round: runs the round where the super-model's engine does not; from `begin_round` to
                `end_round`, whose reports it returns.

        Returns:
            One report for each job that made a step; none once the loop has ended.
        """
        with self.watch.watching():
            self.start()
            if self.has_ended:
                return []
            self.watch.begin_round(self.rounds + 1)
            joined = [job for job in self.active if job.name in self._joining and not job.is_idle]
            begin_s = time.perf_counter()
            with timeline.phase("rounds"):
                reports = (run_round or self.super_model.train_round)()
            self._after_round(reports, time.perf_counter() - begin_s)
            number = self.watch.end_round()
            if number and not self.is_over:
                self._stop(number)
            for job in joined:
                self._joining.pop(job.name, None)
        return reports

    def note_step(self, report: StepReport) -> None:
        """Writes and reports an optimizer step; applies the job's policy if it was not finite."""
        self.tokens += report.tokens
        self.files.log_step(report)
        job, outcome = report.job, report.outcome
        values = {"loss": outcome.loss, "lr": report.lr, "tokens": report.tokens}
        self.reports.emit("stepped", job.name, {"step": job.step, **values})
        if outcome.applied:
            return
        what = f"step {job.step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        if job.spec.on_nonfinite == "fail":
            self._fail(job, f"not finite at {what}")
        elif job.nonfinite_in_a_row >= self.settings.max_nonfinite_steps:
            self._fail(job, f"not finite for {job.nonfinite_in_a_row} steps, last at {what}")
        else:
            self.reports.note(job.name, f"update skipped at {what}")

    def evaluate_part(self) -> None:
        """Scores one micro-batch of the first job that is held for it, if there is one."""
        if not self._held:
            return
        self.watch.tick("an evaluation")
        score = partial(self.super_model.evaluate_part, micro_batches=1)
        scored = self._held.score_part(self.super_model.groups.device, score)
        if scored is not None:
            job, result = scored
            if result is not None:
                self._note_evaluation(job, result)
            if job.is_done:
                self._retire([job])

    def evaluate_active(self) -> None:
        """Evaluates the jobs that still train, beside what is due by their own steps."""
        self._evaluate(self.active)

    @property
    def saved_steps(self) -> dict[str, int]:
        """The step of each job's last save, or at which it began, on the disk or not."""
        return dict(self.files.saved_step)

    def save_active(self) -> None:
        """Checkpoints every job that still trains, but none twice at the same step."""
        self.saves.save([job for job in self.active if job.step > self.files.saved_step[job.name]])

    def end(self, job: JobState) -> None:
        """Ends a job that is done, with its last checkpoint and its adapter."""
        self.saves.save([job])
        self._retire([job])

    def _begin(self, jobs: Sequence[JobState]) -> None:
        """Evaluates jobs before their first step, and ends those that are past their last one."""
        done = [job for job in jobs if job.is_done]
        self._fail_unmoved(done)
        begun = [job for job in jobs if job.is_active]
        self._evaluate(
            [j for j in begun if j.eval_before is None or j.is_done or j.lacks_reference]
        )
        for job in begun:
            if job.is_done:
                self.saves.save_adapter(job)
        self._retire(done)

    def _after_round(self, reports: Sequence[StepReport], round_s: float) -> None:
        """Logs, evaluates, saves and ends the jobs that stepped."""
        self.train_time_s += round_s
        self.rounds += 1
        if self.nano_rounds is not None and self.super_model.round is not None:
            self.nano_rounds.after_round(
                self.super_model.jobs, self.super_model.round, round_s, has_waited=bool(reports)
            )
        for report in reports:
            self.note_step(report)
        stepped = [report.job for report in reports]
        ended = [job for job in stepped if not job.is_active or job.is_done]
        self._fail_unmoved(ended)
        active = [job for job in stepped if job.is_active]
        self._evaluate([job for job in active if job.is_eval_due])
        self.saves.save([job for job in active if job.is_done or self.saves.is_due(job)])
        self._retire(ended)
        self.saver.report()
        done = {"rounds": self.rounds, "tokens_per_s": self.tokens_per_s}
        self.reports.emit("progress", None, done)

    def _stop(self, number: int) -> None:
        """Ends the loop with everything saved, because a signal asked for it."""
        self.stopped_by = number
        self.watch.stop(number)
        left = [job.name for job in self.active]
        self.save_active()
        self.stop_sentence = stop_sentence(number, self.rounds, left, self.saves.drain())

    def _fail_unmoved(self, jobs: Sequence[JobState]) -> None:
        """Fails those of the jobs at their ends whose adapters are what they were at the start."""
        why = "updates could be applied, as none of its losses and gradients was finite"
        for job in jobs:
            if job.is_active and not job.updates:
                self._fail(job, f"none of its {job.step} {why}")

    def _fail(self, job: JobState, reason: str) -> None:
        job.status, job.reason = "failed", reason
        self.reports.note(job.name, f"failed: {reason}")

    def _evaluate(self, jobs: Sequence[JobState]) -> None:
        scored = [job for job in jobs if job.data.eval or job.lacks_reference]
        if not scored:
            return
        if self._is_live:
            self._held.add(scored)
            return
        with timeline.phase("evaluation"):
            results = self.super_model.evaluate(jobs, lambda: self.watch.tick("an evaluation"))
        for job, result in zip(jobs, results, strict=True):
            if result is not None:
                self._note_evaluation(job, result)

    def _note_evaluation(self, job: JobState, result: EvalResult) -> None:
        if job.step == 0:
            job.eval_before = result
        else:
            job.eval_after = result
        self.files.log_eval(job, result)
        scores = {"loss": result.loss, "exact_match": result.exact_match}
        self.reports.emit("evaluated", job.name, {"step": job.step, **scores})

    def _retire(self, jobs: Sequence[JobState]) -> None:
        """Frees the slots of jobs that ended; failed ones leave a placeholder where needed."""
        over = [job for job in jobs if not job.is_held]
        for job in over:
            if job.is_active:
                job.status = "finished"
        present = self.super_model.jobs
        keeps = not self._is_live or any(
            job.is_active and job.spec.portion_tokens is None for job in present
        )
        staying = [
            job for job in present if job.is_held or (not job.is_done and (job.is_active or keeps))
        ]
        if over or len(staying) < len(present):
            slots = [job if job.is_active else job.placeholder() for job in staying]
            self.super_model.set_jobs(slots)
        if over and self._is_live:
            for job in over:
                self._forget(job)
                self.saves.end(job)
            self._note_jobs()

    def _note_jobs(self) -> None:
        if self.nano_rounds is not None:
            self.nano_rounds.jobs_changed(self.jobs)

    def _forget(self, job: JobState) -> None:
        """Drops what the loop keeps of a job that trains no more."""
        if self._is_live:
            self.jobs = tuple(other for other in self.jobs if other.name != job.name)
        self._joining.pop(job.name, None)
        self._held.drop(job)
