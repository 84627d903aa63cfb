"""Trains the jobs of a super-model to their ends, one round after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tlora_megatron import timeline
from tlora_megatron.config.schema import RunSpec
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.formats.quantised import QuantisationCard
from tlora_megatron.training.job_files import JobFiles
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.listener import RunListener
from tlora_megatron.training.metrics import JobMetrics
from tlora_megatron.training.nano.rounds import NanoRounds
from tlora_megatron.training.round_timing import write_correction
from tlora_megatron.training.saving.saver import Saver, Target
from tlora_megatron.training.saving.writer import WriterDied
from tlora_megatron.training.stopping.run_watch import RunWatch
from tlora_megatron.training.stopping.signals import stop_sentence
from tlora_megatron.training.super_model import StepReport, SuperModel

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Runs rounds with what is due behind each: metrics, evaluation, checkpoints, export.

    `run` trains all jobs to their ends; `step` runs one round, for callers with a loop of their
    own, who call `close` at the end.

    Args:
        run: the run's settings; its output folder must be writable.
        base_model: name or path that exported adapters give as their base.
        quantisation: of the base.
        nano_rounds: chooses the number of nano-batches; None = it stays as it is.
        watch: is told of the rounds, and stops the loop at a signal; None = nobody is told.
        may_write: see `JobFiles`.
    """

    def __init__(
        self,
        super_model: SuperModel,
        backbone: Backbone,
        run: RunSpec,
        listener: RunListener,
        *,
        base_model: str,
        quantisation: QuantisationCard | None = None,
        nano_rounds: NanoRounds | None = None,
        watch: RunWatch | None = None,
        may_write: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.super_model = super_model
        self.backbone = backbone
        self.settings = run
        self.listener = listener
        self.nano_rounds = nano_rounds
        self.watch = watch or RunWatch()
        self.output_dir = Path(run.output_dir)
        self.jobs = super_model.jobs
        self.rounds = 0
        self.tokens = 0
        self.train_time_s = 0.0
        waits = partial(self.watch.tick, "a wait for the disk")
        self.saver = Saver(
            self.jobs, backbone, super_model.groups, run.save_memory_gb, on_wait=waits
        )
        self.stopped_by = 0
        """Number of the signal that has stopped the loop; 0 = none."""
        self.stop_sentence: str | None = None
        self._has_started = False
        self._failed_writes: list[str] = []
        """Jobs that could not be written, told since the last `drain`."""
        self.files = JobFiles(
            run,
            base_model=base_model,
            quantisation=quantisation,
            has_metrics=super_model.groups.is_writer,
            may_write=may_write,
        )
        for job in self.jobs:
            self.files.open(job)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of completed batches over the time spent in rounds."""
        return self.tokens / self.train_time_s if self.train_time_s else 0.0

    @property
    def is_over(self) -> bool:
        """True once every job has finished or failed; never before the start."""
        return self._has_started and not any(job.is_active for job in self.super_model.jobs)

    @property
    def has_ended(self) -> bool:
        """True once no more rounds follow: every job has ended, or a signal has stopped the run."""
        return self.is_over or self.stopped_by != 0

    def admit(self, job: JobState, metrics: JobMetrics | None = None) -> None:
        """Lets a further job take part from the next round on.

        Every rank calls it, between rounds. The bank must have been made for the job, too.

        Args:
            metrics: from `files.open_metrics`.
        """
        self.files.take(job, metrics)
        self.saver.expect(job.spec.lora)
        self.jobs = (*self.jobs, job)
        self._set_jobs([*self.super_model.jobs, job])

    def release(self, name: str, *, save: bool) -> JobState | None:
        """Takes a job that still trains out of the rounds; the others do not notice.

        Every rank calls it, between rounds.

        Args:
            save: have a checkpoint written; `drain` waits for it.

        Returns:
            The job; None if there is none of that name, or it has ended.
        """
        present = self.super_model.jobs
        job = next((job for job in present if job.name == name and job.is_active), None)
        if job is None:
            return None
        if save and job.step > self.files.saved_step[name]:
            self._save([job])
        self._set_jobs([other for other in present if other is not job])
        self.files.close(name)
        return job

    def _set_jobs(self, jobs: Sequence[JobState]) -> None:
        self.super_model.set_jobs(jobs)
        if self.nano_rounds is not None:
            self.nano_rounds.jobs_changed(self.jobs)

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
            self.close()

    def start(self) -> None:
        """Runs the first evaluation and retires jobs that were resumed past their last step.

        The first `step` calls it; a second call does nothing.
        """
        if self._has_started:
            return
        self.listener.on_start([(job.name, job.step, job.plan.num_steps) for job in self.jobs])
        self._begin(self.jobs)
        self._has_started = True

    def begin(self, job: JobState, metrics: JobMetrics | None) -> None:
        """Admits a job while others train, and does for it what `start` did for them."""
        self.admit(job, metrics)
        self.listener.on_join((job.name, job.step, job.plan.num_steps))
        self._begin([job])

    def _begin(self, jobs: Sequence[JobState]) -> None:
        done = [job for job in jobs if job.is_done]
        self._fail_unmoved(done)
        self._evaluate([job for job in jobs if job.eval_before is None or job.is_done])
        with timeline.phase("export"):
            for job in done:
                self.saver.save(job, [self._adapter(job)])
        self._retire(done)

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
            begin_s = time.perf_counter()
            with timeline.phase("rounds"):
                reports = (run_round or self.super_model.train_round)()
            self._after_round(reports, time.perf_counter() - begin_s)
            number = self.watch.end_round()
            if number and not self.is_over:
                self._stop(number)
        return reports

    def _after_round(self, reports: Sequence[StepReport], round_s: float) -> None:
        """Logs, evaluates, saves and ends the jobs that stepped."""
        self.train_time_s += round_s
        self.rounds += 1
        if self.nano_rounds is not None and self.super_model.round is not None:
            self.nano_rounds.after_round(
                self.super_model.jobs, self.super_model.round, round_s, has_waited=bool(reports)
            )
        for report in reports:
            self._log(report)
        stepped = [report.job for report in reports]
        ended = [job for job in stepped if not job.is_active or job.is_done]
        self._fail_unmoved(ended)
        self._evaluate([job for job in stepped if self._eval_due(job)])
        active = [job for job in stepped if job.is_active]
        self._save([job for job in active if job.is_done or self._checkpoint_due(job)])
        self._retire(ended)
        self.saver.report()
        self.listener.on_round(self.tokens_per_s)

    def _stop(self, number: int) -> None:
        """Ends the loop with everything saved, because a signal asked for it."""
        self.stopped_by = number
        self.watch.stop(number)
        left = [job.name for job in self.super_model.jobs if job.is_active]
        self.save_active()
        self.stop_sentence = stop_sentence(number, self.rounds, left, self.drain())

    @property
    def saved_steps(self) -> dict[str, int]:
        """The step of each job's last save, or at which it began; `drain` has it on the disk."""
        return dict(self.files.saved_step)

    def evaluate_active(self) -> None:
        """Evaluates the jobs that still train, beside what is due by their own steps."""
        self._evaluate([job for job in self.super_model.jobs if job.is_active])

    def save_active(self) -> None:
        """Checkpoints every job that still trains, but none twice at the same step."""
        active = [job for job in self.super_model.jobs if job.is_active]
        self._save([job for job in active if job.step > self.files.saved_step[job.name]])

    def export(self, job: JobState, directory: Path) -> None:
        """Writes a job's present adapter and waits until it is on the disk; collective.

        Raises:
            ValueError: on the writer, if a weight is not finite or the directory holds something
                else.
            OSError: on the writer, if the disk refuses.
        """
        errors: list[Exception] = []
        target = self._adapter(job, directory)._replace(on_error=errors.append)
        with timeline.phase("export"):
            self.saver.save(job, [target])
            self.saver.drain()
        if errors:
            raise errors[0]

    def drain(self) -> tuple[str, ...]:
        """Waits until everything that was saved or exported is on the disk; not collective.

        What could not be written becomes its job's event.

        Returns:
            Names of the jobs that could not be written since the last call; none on ranks that
            write nothing.
        """
        with timeline.phase("saving"):
            self.saver.drain()
        failed, self._failed_writes = self._failed_writes, []
        return tuple(dict.fromkeys(failed))

    def close(self) -> None:
        """Finishes what is being written and closes the files; a second call does nothing."""
        try:
            with timeline.phase("saving"):
                self.saver.close()
        except WriterDied as error:  # `drain` raises it; an error on its way here counts more
            logger.error("%s", error)
        finally:
            self.files.close_all()

    def _log(self, report: StepReport) -> None:
        self.tokens += report.tokens
        self._write_step(report)
        if not report.outcome.applied:
            self._nonfinite(report)

    def _write_step(self, report: StepReport) -> None:
        self.files.log_step(report)
        self.listener.on_step(report.job.name, report.job.step, report.outcome.loss, report.lr)

    def _nonfinite(self, report: StepReport) -> None:
        """Applies the job's own policy to a NaN or inf; other jobs are not touched."""
        job, outcome = report.job, report.outcome
        what = f"step {job.step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        if job.spec.on_nonfinite == "fail":
            self._fail(job, f"not finite at {what}")
        elif job.nonfinite_in_a_row >= self.settings.max_nonfinite_steps:
            self._fail(job, f"not finite for {job.nonfinite_in_a_row} steps, last at {what}")
        else:
            self._event(job, f"update skipped at {what}")

    def _fail_unmoved(self, jobs: Sequence[JobState]) -> None:
        """Fails those of the jobs at their ends whose adapters are what they were at the start."""
        for job in jobs:
            if job.is_active and not job.updates:
                self._fail(
                    job,
                    f"none of its {job.step} updates could be applied, as none of its "
                    "losses and gradients was finite",
                )

    def _fail(self, job: JobState, reason: str) -> None:
        job.status, job.reason = "failed", reason
        self._event(job, f"failed: {reason}")

    def _event(self, job: JobState, message: str) -> None:
        self.listener.on_event(job.name, message)
        if self.super_model.groups.is_writer:
            logger.info("job %s: %s", job.name, message)

    def _eval_due(self, job: JobState) -> bool:
        every = job.spec.eval_every_steps
        return job.is_active and (job.is_done or (every is not None and job.step % every == 0))

    def _checkpoint_due(self, job: JobState) -> bool:
        every = self.settings.checkpoint_every_steps
        return every > 0 and job.step % every == 0

    def _evaluate(self, jobs: Sequence[JobState]) -> None:
        if not any(job.data.eval for job in jobs):
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

    def _save(self, jobs: Sequence[JobState]) -> None:
        """Takes the jobs' states to be written beside the next rounds, and ended ones' adapters."""
        if not jobs:
            return
        goes_on = any(job.is_active and not job.is_done for job in self.super_model.jobs)
        with self.saver.stop() if goes_on else timeline.phase("saving"):
            for job in jobs:
                self.watch.tick("a save")
                self.files.saved_step[job.name] = job.step
                targets = [self._checkpoint(job)]
                if job.is_done:
                    targets.append(self._adapter(job))
                self.saver.save(job, targets)
            if (rates := self.super_model.settle_rates()) is not None:
                self.saver.submit(partial(write_correction, rates, self.output_dir))

    def _checkpoint(self, job: JobState) -> Target:
        return self.files.checkpoint(job, partial(self._not_saved, job, job.step))

    def _adapter(self, job: JobState, directory: Path | None = None) -> Target:
        return self.files.adapter(job, partial(self._not_exported, job), directory)

    def _not_saved(self, job: JobState, step: int, error: Exception) -> None:
        """A disk that refuses costs this checkpoint, not the run or older ones."""
        self._failed_writes.append(job.name)
        self._event(job, f"could not be saved at step {step}: {error}")

    def _not_exported(self, job: JobState, error: Exception) -> None:
        self._failed_writes.append(job.name)
        self._fail(job, f"its adapter could not be written: {error}")

    def _retire(self, jobs: Sequence[JobState]) -> None:
        """Frees the slots of jobs that ended; failed ones leave a placeholder."""
        for job in jobs:
            if job.is_active:
                job.status = "finished"
        present = self.super_model.jobs
        staying = [job for job in present if not job.is_done]
        if jobs or len(staying) < len(present):
            self.super_model.set_jobs(
                [job if job.is_active else job.placeholder() for job in staying]
            )

    def job_dir(self, job: JobState) -> Path:
        """The job's folder, `OUT/jobs/NAME`."""
        return self.files.folder(job)
