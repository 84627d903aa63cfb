"""A sweep's rungs, where trials wait while others train, and `sweep.json`, which keeps choices."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_megatron.config.reader import ConfigError, show
from tlora_megatron.config.rungs import Decision, Halving, rung_steps
from tlora_megatron.config.sections import plain
from tlora_megatron.config.sweep import Sweep
from tlora_megatron.files import BY_UMASK, read_object, write_atomic
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.metrics import without_nonfinite

logger = logging.getLogger(__name__)

SWEEP_FILE = "sweep.json"
"""In the output folder: the trials, what was decided at the rungs, and at the end the results."""


def score_of(metric: str, result: EvalResult | None) -> float:
    """Returns an evaluation's value of a metric; NaN where there is none."""
    if result is None:
        return math.nan
    named = {"loss": result.loss, "exact_match": result.exact_match, **result.scores}
    return named.get(metric.removeprefix("eval_"), math.nan)


class Rungs:
    """Holds trials at rungs and lets the best go on; the same on every rank of a run.

    Args:
        resuming: the folder holds this sweep, whose choices stand.

    Raises:
        ConfigError: if the folder holds another sweep, or a rung falls on no step of its own.
    """

    def __init__(
        self, sweep: Sweep, output_dir: Path, jobs: Sequence[JobState], *, resuming: bool
    ) -> None:
        self.sweep, self._path = sweep, output_dir / SWEEP_FILE
        known = (read_object(self._path) if resuming else None) or {}
        _check_same(self._path, sweep, known)
        self._halving: Halving | None = None
        self._has_news = True
        if (stop := sweep.spec.stop) is not None:
            names = {job.name: job for job in jobs}
            steps = {
                name: rung_steps(stop.at, job.plan.num_steps, name)
                for name in sweep.settings
                if (job := names.get(name)) is not None
            }
            self._halving = Halving(sweep.spec, steps, known.get("rungs", ()))

    def begin(self, jobs: Iterable[JobState]) -> Mapping[str, str]:
        """Tells trials where they wait; returns why some were stopped before a restart, by name."""
        if self._halving is None:
            return {}
        for job in jobs:
            if job.name in self._halving.steps:
                job.hold_at = self._halving.left(job.name)
        return self._halving.stopped_before()

    def settle(self, active: Sequence[JobState]) -> list[Decision]:
        """Holds the trials that have come to a rung and been evaluated there.

        Returns:
            What is decided at rungs where none is missing any more. Those that go on are held no
            more; the others are to leave.
        """
        if self._halving is None:
            return []
        jobs = {job.name: job for job in active if job.name in self._halving.steps}
        for job in jobs.values():
            if job.is_at_rung and not job.is_held:
                job.is_held = self._has_news = True
                self._halving.take(job.name, score_of(self.sweep.spec.metric, job.eval_after))
        decisions = self._halving.settle(jobs)
        for decision in decisions:
            self._has_news = True
            for name in decision.kept:
                jobs[name].is_held = False
                jobs[name].hold_at = jobs[name].hold_at[1:]
        return decisions

    def take_news(self) -> dict[str, Any] | None:
        """The rungs as plain values, if they are others than at the last call."""
        has_news, self._has_news = self._has_news, False
        return self.document() if has_news else None

    def document(self) -> dict[str, Any]:
        """What `sweep.json` keeps of the rungs, for `write`."""
        return {"rungs": [] if self._halving is None else self._halving.document()}

    def write(self, content: Mapping[str, Any]) -> None:
        """Writes `sweep.json`; a disk that refuses costs it, not the run.

        The writer of the run calls it, behind the checkpoints of the trials that it tells of.
        """
        document = {"sweep": self.sweep.spec, "trials": self.sweep.settings, **content}
        text = json.dumps(without_nonfinite(plain(document)), indent=2, allow_nan=False)
        try:
            write_atomic(self._path, text + "\n", mode=BY_UMASK)
        except OSError as error:
            logger.warning("a later start of the sweep will not know its rungs: %s", error)


def _check_same(path: Path, sweep: Sweep, known: Mapping[str, Any]) -> None:
    if not known:
        return
    for section, value in (("sweep", sweep.spec), ("trials", sweep.settings)):
        mine, theirs = json.loads(json.dumps(plain(value))), known.get(section) or {}
        for key in {**mine, **theirs}:
            if mine.get(key) != theirs.get(key):
                raise ConfigError(
                    f"run.output_dir must be new or hold this sweep, got {path} with {section}."
                    f"{key} {show(theirs.get(key))} instead of {show(mine.get(key))}"
                )
