"""Says in Trainer's terms how far many jobs are: rounds, epochs, losses since the last log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.super_model import StepReport


def epoch_of(jobs: Sequence[JobState]) -> float:
    """How often every job that still trains has seen its data; once all have ended, the most."""
    active = [_epoch(job) for job in jobs if job.is_active]
    return min(active) if active else max((_epoch(job) for job in jobs), default=0.0)


def planned_epochs(jobs: Sequence[JobState]) -> int:
    """Epochs, begun ones included, after which the last job has ended."""
    ends = (job.plan.num_steps * job.plan.batch_size / job.plan.num_sequences for job in jobs)
    return max((math.ceil(end) for end in ends), default=0)


def _epoch(job: JobState) -> float:
    end = float(job.plan.epochs or math.inf)
    return min(end, job.step * job.plan.batch_size / job.plan.num_sequences)


class RoundCount:
    """Estimates how many rounds the jobs need; it gets exact towards the end."""

    def __init__(self, jobs: Sequence[JobState]) -> None:
        self._jobs = jobs
        self._begins = {job.name: job.step for job in jobs}

    def estimate(self, rounds: int) -> int:
        """Rounds from the first to the last, after so many."""
        left = (self._rounds_left(job, rounds) for job in self._jobs if job.is_active)
        return rounds + max(left, default=0)

    def _rounds_left(self, job: JobState, rounds: int) -> int:
        steps_left = job.plan.num_steps - job.step
        done = job.step - self._begins[job.name]
        return math.ceil(steps_left * rounds / done) if done else steps_left


class LogSums:
    """Gathers the jobs' losses from one log to the next."""

    def __init__(self) -> None:
        self._reports: dict[str, list[StepReport]] = defaultdict(list)

    def add(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self._reports[report.job.name].append(report)

    def take(self) -> dict[str, float]:
        """The logs since the last call: the mean of each job's losses, and its last rate.

        `loss` is the mean over the jobs. Empty if no job has made a step.
        """
        logs = {}
        for name, reports in self._reports.items():
            logs[f"loss/{name}"] = fmean(report.outcome.loss for report in reports)
            logs[f"grad_norm/{name}"] = reports[-1].outcome.grad_norm
            logs[f"learning_rate/{name}"] = reports[-1].lr
        losses = [logs[f"loss/{name}"] for name in self._reports]
        self._reports.clear()
        return {"loss": fmean(losses), **logs} if losses else {}


def eval_metrics(results: Mapping[str, EvalResult], prefix: str) -> dict[str, float]:
    """Evaluations by Trainer's names for several sets: `eval_loss`, `eval_NAME_loss` of each."""
    metrics = {}
    for field in ("loss", "exact_match"):
        each = {name: float(getattr(result, field)) for name, result in results.items()}
        metrics[f"{prefix}_{field}"] = fmean(each.values())
        metrics |= {f"{prefix}_{name}_{field}": value for name, value in each.items()}
    return metrics


def last_results(jobs: Sequence[JobState]) -> dict[str, EvalResult]:
    """The last evaluation of each job that has had one."""
    last = {job.name: job.eval_after or job.eval_before for job in jobs}
    return {name: result for name, result in last.items() if result is not None}


class RoundFlow(TrainerCallback):
    """Decides when to log, evaluate and save; takes the place of Trainer's DefaultFlowCallback.

    That one would stop the training at `state.max_steps`, which is an estimate here. Evaluations
    and checkpoints every so many steps are the jobs' own, so only those of an epoch are decided
    here.

    Args:
        logs_every_round: nobody has said how often to log.
    """

    def __init__(self, *, logs_every_round: bool) -> None:
        self._logs_every_round = logs_every_round

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Logs after so many rounds, or the first one."""
        every = 1 if self._logs_every_round else state.logging_steps
        is_due = args.logging_strategy == "steps" and state.global_step % every == 0
        if is_due or (args.logging_first_step and state.global_step == 1):
            control.should_log = True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Logs, evaluates and saves where the arguments say every epoch."""
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= args.eval_strategy == "epoch"
        control.should_save |= args.save_strategy == "epoch"
        return control
