"""The files of a loop's jobs: their metrics, and what its saver writes of them."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tlora_megatron.config.schema import RunSpec
from tlora_megatron.training.formats.atomic_directory import NotPermitted
from tlora_megatron.training.formats.checkpoint import (
    checkpoint_state,
    remove_old_checkpoints,
    step_folder,
    write_checkpoint,
)
from tlora_megatron.training.formats.peft import write_adapter
from tlora_megatron.training.formats.quantised import QuantisationCard
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.metrics import JobMetrics
from tlora_megatron.training.saving.saver import Target
from tlora_megatron.training.saving.snapshot import BUFFERS, Snapshot
from tlora_megatron.training.super_model import StepReport

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRY_AGAIN_S = 2.0
T = TypeVar("T")


class JobFiles:
    """The files of jobs in the folders `OUT/jobs/NAME`.

    Args:
        may_write: asked by a job's name right before anything in its folder changes, also on the
            writer's thread.
        waits_for_room: asked again and again, on any thread, while a full disk refuses what a job
            ends with; False = refusals are errors.
    """

    def __init__(
        self,
        run: RunSpec,
        *,
        base_model: str,
        quantisation: QuantisationCard | None,
        has_metrics: bool,
        may_write: Callable[[str], bool] = lambda _: True,
        waits_for_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.saved_step: dict[str, int] = {}
        """The step of each job's last save, or at which it began."""
        self._run = run
        self._base_model = base_model
        self._quantisation = quantisation
        self._has_metrics = has_metrics
        self.may_write = may_write
        self._waits_for_room = waits_for_room
        self.before_checkpoint: Callable[[str], None] = lambda _: None
        """Called by a job's name, on the writer's thread, right before a checkpoint takes its
        name: what it counts must be on the disk before."""
        self._metrics: dict[str, JobMetrics] = {}

    def folder(self, job: JobState) -> Path:
        """The job's folder, `OUT/jobs/NAME`."""
        return Path(self._run.output_dir) / "jobs" / job.name

    def summary(self, job: JobState) -> dict[str, Any]:
        """Returns plain values about a job, as a `summary.json` holds them."""
        before, after = job.eval_before, job.eval_after
        adapter = self.folder(job) / "adapter"
        return {
            "status": job.status,
            "reason": job.reason,
            "rank": job.spec.lora.rank,
            "num_blocks": job.spec.lora.num_blocks,
            "steps": job.step,
            "max_steps": None if job.is_driven else job.plan.num_steps,
            "skipped_steps": 0 if job.is_driven else job.step - job.updates,
            "last_loss": job.last_loss,
            "eval_loss_before": before and before.loss,
            "eval_loss_after": after and after.loss,
            "exact_match_before": before and before.exact_match,
            "exact_match_after": after and after.exact_match,
            **({"scores_after": after.scores} if after is not None and after.scores else {}),
            "tokens": job.tokens,
            "target_tokens": job.target_tokens,
            "truncated_sequences": job.data.num_truncated,
            "dropped_sequences": job.data.num_dropped,
            "adapter": str(adapter) if job.status == "finished" else None,
        }

    def open_metrics(self, job: JobState) -> JobMetrics | None:
        """Opens the metrics of a job that may be taken later; None where there are none.

        Raises:
            ValueError: if what is there cannot be continued.
        """
        if not self._has_metrics:
            return None
        # A process that was killed may have left what its last save replaced.
        permit = partial(self.permit, job.name)
        remove_old_checkpoints(self.folder(job) / "checkpoints", job.step, permit)
        return JobMetrics(
            Path(self._run.output_dir),
            job.name,
            tensorboard=self._run.tensorboard,
            wandb_project=self._run.wandb_project,
            resume_step=job.step,
            may_write=partial(self.may_write, job.name),
        )

    def take(self, job: JobState, metrics: JobMetrics | None) -> None:
        """Writes a job's metrics from now on."""
        self.saved_step[job.name] = job.step
        if metrics is not None:
            self._metrics[job.name] = metrics

    def close(self, name: str) -> None:
        """Ends the metrics of a job; lines that the disk refuses are kept."""
        if name in self._metrics and self._metrics[name].close():
            self._metrics.pop(name)

    def close_all(self) -> None:
        """Ends the metrics of all jobs; a second call tries again what the disk has refused."""
        for name in list(self._metrics):
            self.close(name)

    def settle(self) -> None:
        """Waits for room for the lines of metrics that the disk has refused."""
        for metrics in self._metrics.values():
            with suppress(OSError):  # a warning was logged
                self.with_room(f"job {metrics.job_name}: its metrics", metrics.flush)
        self.close_all()

    def with_room(self, what: str, write: Callable[[], T]) -> T:
        """Writes something, again and again as long as a full disk refuses it and it is to wait.

        Raises:
            OSError: if the disk refuses for another reason, or nothing is to wait.
        """
        has_waited = False
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in _FULL or not self._waits_for_room():
                    raise
                if not has_waited:
                    logger.warning("%s waits for room on the disk: %s", what, error)
            has_waited = True
            time.sleep(_TRY_AGAIN_S)

    def log_step(self, report: StepReport) -> None:
        """Writes one optimizer step, where metrics are written."""
        job, outcome = report.job, report.outcome
        if job.name in self._metrics:
            self._metrics[job.name].log_step(
                job.step,
                outcome.loss,
                outcome.grad_norm,
                report.lr,
                report.target_tokens,
                report.tokens,
                report.time_s,
                skipped=not outcome.applied,
                scores=report.scores,
            )

    def log_eval(self, job: JobState, result: EvalResult) -> None:
        """Writes one evaluation, where metrics are written."""
        if job.name in self._metrics:
            self._metrics[job.name].log_eval(
                job.step, result.loss, result.exact_match, scores=result.scores
            )

    def checkpoint(self, job: JobState, on_error: Callable[[Exception], None]) -> Target:
        """Returns the target that makes a checkpoint of the job's snapshot."""
        directory, name, step = self.folder(job) / "checkpoints", job.name, job.step
        state, reference = checkpoint_state(job, self._quantisation), None
        if job.spec.preference is not None and job.spec.preference.has_reference:
            reference = job.reference

        def permit() -> None:
            self.before_checkpoint(name)
            self.permit(name)

        def write(snapshot: Snapshot) -> int:
            if reference is not None:
                permit()
                directory.parent.mkdir(parents=True, exist_ok=True)
                reference.write(directory.parent)
            folder = step_folder(directory, step)
            return write_checkpoint(folder, state, *snapshot.state(), permit)

        clean_up = partial(remove_old_checkpoints, directory, step, permit)
        target = Target(BUFFERS, write, on_error, clean_up=clean_up)
        return self._waiting(f"job {name}: its last checkpoint", target, job)

    def adapter(
        self,
        job: JobState,
        on_error: Callable[[Exception], None],
        directory: Path | None = None,
        *,
        durable: bool = True,
    ) -> Target:
        """Returns the target that makes an adapter for PEFT of the job's snapshot.

        Args:
            directory: None = `adapter` in the job's folder.
            durable: False = somebody else sees to it that it reaches the disk.
        """
        folder = self.folder(job) / "adapter" if directory is None else directory
        permit = partial(self.permit, job.name)

        def write(snapshot: Snapshot) -> int:
            return write_adapter(
                folder,
                lora=snapshot.lora,
                factors=snapshot.tensors(BUFFERS[0]),
                model=snapshot.spec,
                base_model=self._base_model,
                quantisation=self._quantisation,
                permit=permit,
                durable=durable,
            )

        target = Target(BUFFERS[:1], write, on_error)
        return self._waiting(f"job {job.name}: its adapter", target, job)

    def state(
        self,
        job: JobState,
        directory: Path,
        on_error: Callable[[Exception], None],
        check: Callable[[], None],
    ) -> Target:
        """Returns the target that makes a checkpoint with a name of its own of the job's snapshot.

        Args:
            check: raises a `ValueError` if nothing is to be written; on the writer's thread.
        """
        state, name = checkpoint_state(job, self._quantisation), job.name

        def permit() -> None:
            check()
            self.permit(name)

        def write(snapshot: Snapshot) -> int:
            return write_checkpoint(directory, state, *snapshot.state(), permit)

        return Target(BUFFERS, write, on_error)

    def _waiting(self, what: str, target: Target, job: JobState) -> Target:
        """The target, which waits for room if it is of a job's end."""
        if not job.is_done:
            return target
        return target._replace(
            write=lambda snapshot: self.with_room(what, lambda: target.write(snapshot))
        )

    def permit(self, name: str) -> None:
        """Does nothing while this process may change the files of a job.

        Raises:
            NotPermitted: once somebody else owns them.
        """
        if not self.may_write(name):
            raise NotPermitted(f"job {name!r} must not be written here any more: another owns it")
