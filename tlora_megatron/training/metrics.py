"""A run's events as one stream, and the files of numbers that it writes.

All files are strict JSON: a NaN or inf is written as null and its line carries `"nonfinite": true`.
Importing this module needs neither torch nor TensorBoard nor W&B.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tlora_megatron.files import BY_UMASK, write_atomic

logger = logging.getLogger(__name__)


class EventSink(Protocol):
    """Takes the events of a loop, on every rank that gives it one; mostly that is the first alone.

    Kinds are those of `service.messages.EventKind`, and for the process itself:

    - begun: before the first step; `{"jobs": {name: [step, last step or None]}}`.
    - progress: behind every round; `{"rounds": int, "tokens_per_s": float}`, over all so far.
    - out_of_memory: on any rank; `{"joining": [name]}`, jobs that were in their first round.
    """

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Takes one event; it must not wait.

        Args:
            job: its name; None = it is the whole loop's.
        """


class Reports:
    """Hands events on: to a sink, if there is one, and what is for people to the log.

    Args:
        logs: this process writes the log.
    """

    def __init__(self, sink: EventSink | None, *, logs: bool) -> None:
        self._sink = sink
        self._logs = logs

    def emit(self, kind: str, job: str | None, body: Mapping[str, Any]) -> None:
        """Hands an event on; see `EventSink.emit`."""
        if self._sink is not None:
            self._sink.emit(kind, job, body)

    def note(self, job: str, message: str) -> None:
        """Reports a sentence about a job."""
        self.emit("note", job, {"message": message})
        if self._logs:
            logger.info("job %s: %s", job, message)


METRICS_FILE = "metrics.jsonl"
_TRAIN_SCALARS = ("loss", "grad_norm", "lr", "time_s")
_EVAL_SCALARS = {"eval_loss": "loss", "eval_exact_match": "exact_match"}


class JobMetrics:
    """Appends one job's numbers to `OUT/jobs/NAME/metrics.jsonl`, TensorBoard and W&B.

    Construct it on global rank 0 only, and once a job at a time: the file has one writer. Each
    line is written at once, so a SIGKILL loses at most that line. A disk that refuses one costs no
    training: one warning is logged, and the rest of it goes out with a later line. TensorBoard then
    lacks what its thread held, and goes on in a new file. Close it, or use it as a context manager.

    Args:
        tensorboard: write events to `OUT/jobs/NAME/tensorboard`; without the package one warning is
            logged for all jobs and nothing is written.
        may_write: asked before the file changes; once it says no, nothing more is written.
        resume_step: the last step the checkpoint holds. Lines of later steps are dropped, because
            the resumed job takes those steps again. 0 = start afresh: every line is dropped.

    Raises:
        ValueError: if the file to continue has a line that is not a JSON object with a step.
    """

    def __init__(
        self,
        output_dir: Path,
        job_name: str,
        *,
        tensorboard: bool,
        wandb_project: str | None,
        resume_step: int = 0,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.job_name = job_name
        self._may_write = may_write
        folder = Path(output_dir) / "jobs" / job_name
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_FILE
        kept = truncate_metrics(self.path, resume_step) if may_write() else []
        self._warned_of_disk = False
        self._events_deaths = self._events_rest = 0
        """How often TensorBoard's thread died, and the lines before it is opened again."""
        self._last_step = resume_step
        self._last_eval_step = max((r["step"] for r in kept if "eval_loss" in r), default=-1)
        self._events = _open_tensorboard(folder, resume_step) if tensorboard else None
        self._wandb = (
            _open_wandb(folder, job_name, wandb_project, resume_step) if wandb_project else None
        )
        self._file = self.path.open("ab", buffering=0)
        self._unwritten = b""
        """What the disk has refused, from the middle of a line perhaps."""

    def log_step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        target_tokens: int,
        tokens: int,
        time_s: float,
        *,
        skipped: bool = False,
        scores: Mapping[str, float] = {},
    ) -> None:
        """Writes one optimizer step.

        Args:
            loss: mean over the step's target tokens, before its update.
            grad_norm: 2-norm over the whole adapter, before clipping.
            target_tokens: tokens the loss is taken over, in the whole global batch.
            time_s: wall time since the job's previous step.
            scores: more values, by name.

        Raises:
            RuntimeError: if `step` is not greater than the last one, since each step stands once.
        """
        if step <= self._last_step:
            raise RuntimeError(
                f"job {self.job_name!r}: step must be greater than the last one written, "
                f"{self._last_step}, got {step}"
            )
        self._last_step = step
        record: dict[str, Any] = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr}
        record |= {"target_tokens": target_tokens, "tokens": tokens, "time_s": time_s, **scores}
        if skipped:
            record["skipped"] = True
        self._write(record, {f"train/{name}": record[name] for name in (*_TRAIN_SCALARS, *scores)})

    def log_eval(
        self,
        step: int,
        eval_loss: float,
        exact_match: float | None,
        *,
        scores: Mapping[str, float] = {},
    ) -> None:
        """Writes one evaluation after `step` updates; a step evaluated before is not repeated.

        Args:
            step: updates done so far; 0 = before training.
            exact_match: share of sequences generated exactly, 0 to 1; None = not measured.
            scores: more values, by name.
        """
        if step <= self._last_eval_step:
            return
        self._last_eval_step = step
        record = {"step": step, "eval_loss": eval_loss, "eval_exact_match": exact_match}
        scalars = {f"eval/{tag}": record[name] for name, tag in _EVAL_SCALARS.items()}
        record |= {f"eval_{name}": value for name, value in scores.items()}
        self._write(record, scalars | {f"eval/{name}": value for name, value in scores.items()})

    def flush(self) -> None:
        """Writes what the disk has refused; raises an `OSError` if it still does."""
        while self._unwritten and self._may_write():
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> bool:
        """Ends the TensorBoard and W&B streams, and closes the file unless the disk refuses lines.

        Returns:
            True if the file is closed; else a later call tries again.
        """
        try:
            if self._events is not None:
                self._events.close()
            if not self._file.closed:
                self.flush()
            self._file.close()
        except OSError as error:
            self._warn_of_disk(error)
        if self._wandb is not None:
            self._wandb.finish()
        self._events = self._wandb = None
        return self._file.closed

    def __enter__(self) -> JobMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: dict[str, Any], scalars: dict[str, float | None]) -> None:
        if not self._may_write():
            return
        strict = without_nonfinite(record)
        if any(strict[name] is None and value is not None for name, value in record.items()):
            strict["nonfinite"] = True
        known = {tag: value for tag, value in scalars.items() if value is not None}
        try:
            self._unwritten += json.dumps(strict, allow_nan=False).encode() + b"\n"
            self.flush()
        except OSError as error:
            self._warn_of_disk(error)
        step = record["step"]
        try:
            if self._events_deaths and self._events is None and not self._unwritten:
                self._events_rest -= 1
                if not self._events_rest:
                    self._events = _open_tensorboard(self.path.parent, self._last_step)
                    self._warned_of_disk = False
                    logger.warning("job %s: TensorBoard goes on at step %d", self.job_name, step)
            if self._events is not None:
                for tag, value in known.items():
                    self._events.add_scalar(tag, value, step)
        except OSError as error:
            # Its writing thread has died of this error and would raise it again every time.
            self._events, self._events_rest = None, 2**self._events_deaths
            self._events_deaths += 1
            self._warn_of_disk(error)
        if self._wandb is not None:
            self._wandb.log({"step": step, **known})

    def _warn_of_disk(self, error: OSError) -> None:
        if not self._warned_of_disk:
            self._warned_of_disk = True
            logger.warning("job %s: metrics could not be written: %s", self.job_name, error)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of one `metrics.jsonl`, in file order; a torn last line (no newline) is left out.

    Raises:
        ValueError: if a whole line is not a JSON object with an integer step.
    """
    lines = Path(path).read_bytes().split(b"\n")
    return [_parse_line(line, path, number) for number, line in enumerate(lines[:-1], start=1)]


def truncate_metrics(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Drops a torn last line and every line of a step after `last_step`; returns the lines kept.

    Atomic: a kill leaves the old file or the new one. `last_step` 0 drops every line, also the
    evaluation before training. A missing file is an empty one.
    """
    if not path.exists():
        return []
    if last_step == 0:
        write_atomic(path, "", mode=BY_UMASK)
        return []
    kept = [record for record in read_metrics(path) if record["step"] <= last_step]
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept)
    if text.encode() != path.read_bytes():
        write_atomic(path, text, mode=BY_UMASK)
    return kept


def write_summary(
    folder: Path, summary: dict[str, Any], permit: Callable[[], None] | None = None
) -> Path:
    """Writes `summary.json` into a folder atomically, NaN and inf as null, and returns its path.

    Call it on global rank 0 only.
    """
    path = Path(folder) / "summary.json"
    text = json.dumps(without_nonfinite(summary), indent=2, allow_nan=False) + "\n"
    write_atomic(path, text, mode=BY_UMASK, permit=permit)
    return path


def without_nonfinite(value: Any) -> Any:
    """`value` with every NaN or inf in it replaced by None, so that strict JSON can hold it."""
    if isinstance(value, dict):
        return {key: without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(
            f"{path}:{number} must be a JSON object with an integer step, got {line[:80]!r}"
        )
    return record


@cache
def _summary_writer() -> Any:
    """TensorBoard's writer class, or None; cached so that many jobs log one warning."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("no TensorBoard events are written: it is missing; pip install tensorboard")
        return None
    return SummaryWriter


def _open_tensorboard(folder: Path, resume_step: int) -> Any:
    writer = _summary_writer()
    if writer is None:
        return None
    # TensorBoard then hides what a killed run logged past the checkpoint.
    purge_step = resume_step + 1 if resume_step else 0
    return writer(log_dir=str(folder / "tensorboard"), purge_step=purge_step, flush_secs=10)


def _open_wandb(folder: Path, job_name: str, project: str, resume_step: int) -> Any:
    """A W&B run of this job's own; a resumed job continues the run whose id its folder holds."""
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            f"job {job_name!r}: W&B must be installed to log to project {project!r}; "
            "pip install 'wandb>=0.20'"
        ) from error
    id_file = folder / "wandb_run_id"
    known = resume_step > 0 and id_file.exists()
    run = wandb.init(
        project=project,
        name=job_name,
        group=folder.parents[1].name,
        id=id_file.read_text(encoding="utf-8") if known else None,
        resume="allow",
        dir=str(folder),
        reinit="create_new",
    )
    write_atomic(id_file, run.id, mode=BY_UMASK)
    # W&B's own counter refuses to go back, which a resumed job has to.
    run.define_metric("*", step_metric="step")
    return run
