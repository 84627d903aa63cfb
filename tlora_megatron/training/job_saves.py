"""Saves a loop's jobs: when each is due, what is written, and what is reported once it is there."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tlora_megatron import timeline
from tlora_megatron.config.schema import RunSpec
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.training.driven_jobs import DrivenState
from tlora_megatron.training.formats.atomic_directory import NotPermitted
from tlora_megatron.training.job_files import JobFiles
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.metrics import JobMetrics, Reports, write_summary
from tlora_megatron.training.round_timing import write_correction
from tlora_megatron.training.run_watch import RunWatch
from tlora_megatron.training.saving.saver import Saver, Target
from tlora_megatron.training.saving.writer import WriterDied
from tlora_megatron.training.super_model import SuperModel

logger = logging.getLogger(__name__)

_MANY_REQUESTS = 256
"""Requests that change no weight, after which a checkpoint is due all the same: it lets them go."""

_FIRST_SAVE_S = 3.0
"""A job without a checkpoint is saved by time so soon after it has joined: a rank's death then
costs it seconds of work, not all of it."""
_GROWTH = 1.5
"""Each wait of a job that is saved soon over the one before: whenever its gang dies, at least two
thirds of the time behind the first save are kept."""


@dataclass(slots=True)
class SavePolicy:
    """Says when a job's next checkpoint is due: by its steps and by time."""

    every_steps: int = 0
    """0 = not by steps."""
    every_s: float = 0.0
    """0 = not by time."""
    soon: bool = False
    """Its last gang died: it is saved soon after it has joined, then less and less often."""
    saved_s: float = field(default_factory=time.monotonic)
    """Until the first save, when the job joined."""
    _wait_s: float = 0.0

    def join(self, now_s: float, *, has_checkpoint: bool) -> None:
        """Counts the time to the first save from now on."""
        waits = (
            [self.every_s] if has_checkpoint and not self.soon else [self.every_s, _FIRST_SAVE_S]
        )
        self.saved_s, self._wait_s = now_s, min(waits)

    def save(self, now_s: float) -> None:
        """Counts the time to the next save from now on."""
        waits = [self.every_s, self._wait_s * _GROWTH] if self.soon else [self.every_s]
        self.saved_s, self._wait_s = now_s, min(waits)

    def is_due(self, step: int) -> bool:
        """True if the step is one behind which the job is saved."""
        return self.every_steps > 0 and step % self.every_steps == 0

    def late_s(self, now_s: float) -> float:
        """Seconds since a save by time was due; negative before."""
        return now_s - self.saved_s - self._wait_s if self.every_s > 0 else -math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedJob:
    """A job that can join between two rounds."""

    state: JobState
    digest: str
    """The same on ranks that have read the same."""
    copied: torch.cuda.Event | None
    """The device has the adapter behind it."""
    metrics: JobMetrics | None
    """Opened where they are written."""
    saving: SavePolicy


class JobSaves:
    """Saves jobs beside their rounds. Every rank makes every call of `save` and `save_adapter`."""

    def __init__(
        self,
        super_model: SuperModel,
        backbone: Backbone,
        run: RunSpec,
        files: JobFiles,
        reports: Reports,
        watch: RunWatch,
    ) -> None:
        self.files = files
        self.on_counted: Callable[[str, int], None] = lambda *_: None
        """Called when a driven job's checkpoint is on the disk, with the last request it counts."""
        self._super_model = super_model
        self._output_dir = Path(run.output_dir)
        self._reports = reports
        self._watch = watch
        self._policies: dict[str, SavePolicy] = {}
        self._failed: list[str] = []
        """Jobs that could not be written, reported since the last `drain`."""
        self._keeps_memory = False
        """Jobs have left since memory was last given back to the device."""
        waits = partial(watch.tick, "a wait for the disk")
        self.saver = Saver(
            super_model.jobs, backbone, super_model.groups, run.save_memory_gb, on_wait=waits
        )

    def take(self, job: JobState, metrics: JobMetrics | None, policy: SavePolicy) -> None:
        """Keeps a job's files from now on, as its policy says."""
        policy.join(time.monotonic(), has_checkpoint=job.step > 0)
        self._policies[job.name] = policy
        self.files.take(job, metrics)

    def is_due(self, job: JobState) -> bool:
        """True if a job that still trains is to be saved behind the step that it has just made."""
        return job.is_active and self._policies[job.name].is_due(job.step)

    def due_by_time(self) -> list[str]:
        """The job whose save is longest past its time, if there is one that can be saved at once.

        Only the writer knows it. One job a round: rounds stand still for a copy of each.
        """
        now_s = time.monotonic()
        moved = [job for job in self._super_model.jobs if job.is_active and self.has_moved(job)]
        late = [(self._policies[job.name].late_s(now_s), job) for job in moved]
        due = sorted(((s, job) for s, job in late if s >= 0), key=lambda pair: pair[0])
        return [job.name for _, job in due if self.saver.can_take(job)][-1:]

    def make_due(self, name: str) -> None:
        self._policies[name].saved_s = -math.inf

    def has_moved(self, job: JobState) -> bool:
        """True if a checkpoint now would be another one than the last."""
        if isinstance(job, DrivenState) and job.counted >= job.saved_count + _MANY_REQUESTS:
            return True
        return job.step > self.files.saved_step[job.name]

    def save(self, jobs: Sequence[JobState]) -> None:
        """Takes the jobs' states to be written beside the next rounds, and ended ones' adapters."""
        if not jobs:
            return
        goes_on = any(job.is_active and not job.is_done for job in self._super_model.jobs)
        with self.saver.stop() if goes_on else timeline.phase("saving"):
            for job in jobs:
                self._watch.tick("a save")
                self.files.saved_step[job.name] = job.step
                targets = [self._checkpoint(job)]
                if job.is_done:
                    targets.append(self._adapter(job))
                self.saver.save(job, targets)
            if (rates := self._super_model.settle_rates()) is not None:
                self.saver.submit(partial(write_correction, rates, self._output_dir))

    def save_adapter(self, job: JobState) -> None:
        """Takes the adapter of a job that has ended before."""
        with timeline.phase("export"):
            self.saver.save(job, [self._adapter(job)])

    def save_moved(self, names: Sequence[str]) -> None:
        """Saves those of the jobs that have moved since their last save."""
        jobs = [job for job in self._super_model.jobs if job.is_active and job.name in names]
        self.save([job for job in jobs if self.has_moved(job)])

    def export(self, job: JobState, directory: Path) -> None:
        """Writes a job's present adapter and waits until it is on the disk; collective.

        Raises:
            ValueError: on the writer, if a weight is not finite or the directory holds something
                else.
        """
        errors: list[Exception] = []
        target = self.files.adapter(job, errors.append, directory)
        with timeline.phase("export"):
            self.saver.save(job, [target])
            self.saver.drain()
        if errors:
            raise errors[0]

    def drain(self) -> tuple[str, ...]:
        """Waits until all that was saved or exported is on the disk; not collective.

        Where all jobs have left, others get the memory of the device.

        Returns:
            Names of the jobs that could not be written since the last call; none on ranks that
            write nothing.
        """
        if self._keeps_memory and not self._super_model.jobs:
            self._keeps_memory = False
            if self._super_model.groups.device.type == "cuda":
                torch.cuda.synchronize()  # copies of who has left may still be under way
                torch.cuda.empty_cache()
        with timeline.phase("saving"):
            self.saver.drain()
        failed, self._failed = self._failed, []
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

    def end_left(self, job: JobState, why: str | None, *, lost: bool) -> None:
        """Closes a job that has left; reports it as `left` once what was saved is on the disk."""
        self._close(job)
        facts: dict[str, Any] = {"step": job.step, **({"lost": True} if lost else {})}
        facts |= {} if why is None else {"reason": why}
        answers = partial(self.files.before_checkpoint, job.name)
        left = partial(self._reports.emit, "left", job.name, facts)
        self.saver.submit(answers, left, job=job.name)
        self.saver.report()  # of those who left before it, while this one waited for memory
        self._keeps_memory = True

    def end(self, job: JobState) -> None:
        """Closes a job that has ended; reports it as `ended` behind its adapter and summary."""
        self._close(job)
        self.saver.submit(on_done=partial(self._write_summary, job), job=job.name)

    def _close(self, job: JobState) -> None:
        self.files.close(job.name)
        self._policies.pop(job.name, None)

    def _write_summary(self, job: JobState) -> None:
        """Writes the summary of a job whose adapter is on the disk, or could not be written."""
        content, errors = self.files.summary(job), list[OSError]()
        folder, permit = self.files.folder(job), partial(self.files.permit, job.name)

        def write() -> None:
            try:
                write_summary(folder, content, permit)
            except OSError as error:
                errors.append(error)

        facts = {"status": job.status, "reason": job.reason, "step": job.step}
        self.saver.submit(write, partial(self._report_end, job.name, facts, errors), job=job.name)

    def _report_end(self, name: str, facts: dict[str, Any], errors: Sequence[OSError]) -> None:
        if any(isinstance(error, NotPermitted) for error in errors):
            self._reports.emit("left", name, {"step": facts["step"], "lost": True})
            return
        for error in errors:
            message = f"its summary could not be written: {error}"
            self._reports.emit("note", name, {"message": message})
        self._reports.emit("ended", name, facts)

    def _checkpoint(self, job: JobState) -> Target:
        self._policies[job.name].save(time.monotonic())
        counted = None
        if isinstance(job, DrivenState):
            counted = job.saved_count = job.counted
        target = self.files.checkpoint(job, partial(self._not_saved, job.name, job.step))
        return target._replace(on_done=partial(self._saved, job.name, job.step, counted))

    def _saved(self, name: str, step: int, counted: int | None) -> None:
        self._reports.emit("saved", name, {"step": step})
        if counted is not None:
            self.on_counted(name, counted)

    def _not_saved(self, name: str, step: int, error: Exception) -> None:
        """A disk that refuses costs this checkpoint, not the run or older ones."""
        self._failed.append(name)
        self._reports.note(name, f"could not be saved at step {step}: {error}")
        self._reports.emit("not_saved", name, {"step": step, "error": str(error)})

    def _adapter(self, job: JobState) -> Target:
        return self.files.adapter(job, partial(self._not_exported, job))

    def _not_exported(self, job: JobState, error: Exception) -> None:
        self._failed.append(job.name)
        job.status, job.reason = "failed", f"its adapter could not be written: {error}"
        self._reports.note(job.name, f"failed: {job.reason}")
